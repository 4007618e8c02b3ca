// Transposes a 4 × 4 matrix of 16-bit units over four neighboring lanes. Each lane holds a row, as two words of two units.
__device__ __forceinline__ uint2 transpose(unsigned int low, unsigned int high, int lane) {
    const bool is_upper = lane & 2, is_odd = lane & 1;
    unsigned int other = __shfl_xor_sync(ALL_LANES, is_upper ? low : high, 2);
    const unsigned int first = is_upper ? other : low, second = is_upper ? high : other;
    // Even lanes keep the lower 16-bit units of `first` and `second`, and odd lanes the upper units. Neighbors exchange the other units.
    other = __shfl_xor_sync(ALL_LANES, __byte_perm(first, second, is_odd ? 0x5410 : 0x7632), 1);
    return is_odd ? make_uint2(__byte_perm(other, first, 0x7610), __byte_perm(other, second, 0x7632))
                  : make_uint2(__byte_perm(first, other, 0x5410), __byte_perm(second, other, 0x7610));
}
