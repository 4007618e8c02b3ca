// Returns the index of the last of `n` ascending starts that is at or before `position`, by binary search. The first start is 0.
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
