{%- set pair = "f16" %}{% if storage == "bf16" and not multiplies_in_f16 %}{% set pair = "bf16" %}{% endif -%}
// Converts four E4M3 elements of a cache to {{ pair }}, which represents them exactly. `low` receives the first two elements, and `high`
// the last two.
__device__ __forceinline__ void unpack_e4m3(unsigned int word, unsigned int& low, unsigned int& high) {
#if __CUDA_ARCH__ >= 890
    asm("{\n"
        ".reg .b16 a, b;\n"
        "mov.b32 { a, b }, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, a;\n"
        "cvt.rn.f16x2.e4m3x2 %1, b;\n"
        "}" : "=r"(low), "=r"(high) : "r"(word));
{%- if pair == "bf16" %}
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        unsigned int& pair = i == 0 ? low : high;
        const f16 first = {static_cast<unsigned short>(pair)}, second = {static_cast<unsigned short>(pair >> 16)};
        pair = pack_pair<bf16>(to_float(first), to_float(second));
    }
{%- endif %}
#else
    // Each element is in the upper byte of a half word. The addition carries only for a NaN, whose exponent and mantissa bits are all ones.
    // The carry sets the highest exponent bits of the result, which makes it a NaN.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned int bits = __byte_perm(word, 0, i == 0 ? 0x1404 : 0x3424), sign = bits & 0x80008000;
{%- if pair == "f16" %}
        // The bits of an E4M3 value, read as an f16, are the value times 2⁻⁸.
        const unsigned int magnitude = bits >> 1 & 0x3f803f80, nan = (magnitude + 0x00800080) & 0x40004000;
{%- else %}
        // The bits of an E4M3 value, read as a bf16, are the value times 2⁻¹²⁰.
        const unsigned int magnitude = bits >> 4 & 0x07f007f0, nan = ((magnitude + 0x00100010) & 0x08000800) * 15;
{%- endif %}
        unsigned int& to = i == 0 ? low : high;
        asm("fma.rn.{{ pair }}x2 %0, %1, %2, %3;" : "=r"(to)
            : "r"(sign | magnitude | nan), "r"({% if pair == "f16" %}0x5c005c00{% else %}0x7b807b80{% endif %}), "r"(0x80008000));
    }
#endif
}
