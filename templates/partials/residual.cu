// Splits a pair packed by pack_pair into its two elements.
template <typename T> __device__ __forceinline__ void unpack_pair(unsigned int pair, float& low, float& high) {
    low = to_float(T{static_cast<unsigned short>(pair & 0xffff)});
    high = to_float(T{static_cast<unsigned short>(pair >> 16)});
}

// Loads two neighboring elements in program order. If the compiler moved these loads ahead, fewer registers would be left for the
// accumulators.
template <typename T> __device__ __forceinline__ unsigned int load_pair(const T* from) {
    unsigned int pair;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(pair) : "l"(from));
    return pair;
}
