// Binary search: index of the last of `n` ascending starts (the first is 0) that is at or before `position`.
template <typename Index>
__device__ __forceinline__ unsigned int sequence_of(const Index* __restrict__ starts, unsigned int n,
                                                    unsigned long long position) {
    unsigned int low = 0;
    for (unsigned int high = n; high - low > 1;) {
        const unsigned int middle = low + (high - low) / 2;
        if (static_cast<unsigned long long>(starts[middle]) <= position) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}
