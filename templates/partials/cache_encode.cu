// Conversion to the E4M3 elements of a cache. Ampere has no instruction for the conversion, so integer instructions compute the code.
#if __CUDA_ARCH__ >= 890
{% include "partials/quantize.cu" -%}
#else
__device__ __forceinline__ unsigned int e4m3_code(float x) {
    const float magnitude = fminf(fabsf(x), 448.0f);  // 448 for NaN; the code of NaN is the code of 448 with the lowest bit set
    const unsigned int bits = __float_as_uint(magnitude), sign = __float_as_uint(x) >> 24 & 0x80;
    // Magnitudes below 2⁻⁶ are rounded to multiples of 2⁻⁹. The mantissa of larger magnitudes is rounded to three bits.
    const unsigned int small = __float2uint_rn(magnitude * 512.0f), large = (bits + 0x7ffff + (bits >> 20 & 1) >> 20) - (120 << 3);
    return (magnitude < 0.015625f ? small : large) | sign | (x == x ? 0 : 1);
}

// Converts four values to E4M3, the first in the lowest byte. Magnitudes above 448 become 448, and NaN stays NaN.
__device__ __forceinline__ unsigned int pack_e4m3(float a, float b, float c, float d) {
    return e4m3_code(a) | e4m3_code(b) << 8 | e4m3_code(c) << 16 | e4m3_code(d) << 24;
}
#endif
