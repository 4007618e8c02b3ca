// The two elements that pack_pair puts in a register.
template <typename T> __device__ __forceinline__ void unpack_pair(unsigned int pair, float& low, float& high) {
    low = to_float(T{static_cast<unsigned short>(pair & 0xffff)});
    high = to_float(T{static_cast<unsigned short>(pair >> 16)});
}
