constexpr float LARGEST_FINITE = 3.4028235e38f;
// Returns the magnitude of a value, or infinity for NaN.
__device__ __forceinline__ float magnitude(float value) {
    const float positive = fabsf(value);
    return positive <= LARGEST_FINITE ? positive : __int_as_float(0x7f800000);
}

// Rounds four values to 8-bit integers, to the nearest with ties to even. The first is in the lowest byte. NaN becomes 0.
__device__ __forceinline__ unsigned int pack_int8(float a, float b, float c, float d) {
    unsigned int word;
    asm("{\n"
        ".reg .s32 a, b, c, d;\n"
        ".reg .b32 high;\n"
        "cvt.rni.s32.f32 a, %1;\n"
        "cvt.rni.s32.f32 b, %2;\n"
        "cvt.rni.s32.f32 c, %3;\n"
        "cvt.rni.s32.f32 d, %4;\n"
        "cvt.pack.sat.s8.s32.b32 high, d, c, 0;\n"
        "cvt.pack.sat.s8.s32.b32 %0, b, a, high;\n"
        "}" : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
}

// Adds the four integers of a word to `sum`.
__device__ __forceinline__ int add_int8(unsigned int word, int sum) {
    asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(word), "r"(0x01010101));
    return sum;
}
