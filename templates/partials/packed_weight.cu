// A low-bit weight, packed for MMAs. It is stored in blocks of 64 columns. A block has ROW_BYTES bytes for every row of the weight. Four
// lanes share a row. Lane t of the four has columns 16s + 2t, 16s + 2t + 1, 16s + 2t + 8 and 16s + 2t + 9 for MMA s, with s from 0 to 3.
constexpr int ROW_BYTES = {% if packed == "int4" %}32{% else %}64{% endif %};
constexpr int LANE_WORDS = ROW_BYTES / 16;  // words per lane in a row of a block
{%- if group > 0 %}
constexpr int GROUP = {{ group }};  // columns that share a scale
{%- endif %}
{%- if packed == "int4" %}

// Scale of a group, and −(base + zero point), which is added to an unpacked value. The base is the unpacked value of integer 0. With f16,
// nibbles 1 and 5 of a word have another base, so `minus_high` is added to them. Each unsigned int holds a 16-bit value twice.
{%- if warp_mma %} The scale is applied to sums of products.{% endif %}
struct Scale { {% if warp_mma %}float factor; unsigned int{% else %}unsigned int factor,{% endif %} minus_zero{% if storage == "f16" %}, minus_high{% endif %}; };

// `word` contains the scale as an f16 in its lower half, and the zero point as an integer in its upper half.
__device__ __forceinline__ Scale scale_of(unsigned int word) {
    const unsigned int zero = __byte_perm(word, 0, 0x3232);
{%- if warp_mma or storage == "bf16" %}
    float factor;
    asm("{\n"
        ".reg .f16 low, high;\n"
        "mov.b32 { low, high }, %1;\n"
        "cvt.f32.f16 %0, low;\n"
        "}" : "=f"(factor) : "r"(word));
{%- endif %}
{%- set factor = "factor" %}
{%- if not warp_mma %}{% set factor = "pack_pair<bf16>(factor, factor)" %}{% if storage == "f16" %}{% set factor = "__byte_perm(word, 0, 0x1010)" %}{% endif %}{% endif %}
{%- if storage == "f16" %}
    return { {{ factor }}, zero | 0xe400e400, zero << 4 | 0xd400d400 };  // −(1024 + z), −(64 + z)
{%- else %}
    return { {{ factor }}, zero | 0xc300c300 };  // −(128 + z)
{%- endif %}
}

// Computes a · b + c in both halves.
__device__ __forceinline__ unsigned int fma_pair(unsigned int a, unsigned int b, unsigned int c) {
    unsigned int y;
    asm("fma.rn.{{ storage }}x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

// (a & mask) | base
__device__ __forceinline__ unsigned int masked_or(unsigned int a, unsigned int mask, unsigned int base) {
    unsigned int y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(a), "r"(mask), "r"(base));
    return y;
}

// Unpacks nibbles 0, 1, 4 and 5 of `word`, the integers of one MMA: columns 2t and 2t + 1 to `low`, and 2t + 8 and 2t + 9 to `high`.
__device__ __forceinline__ void unpack_weight(unsigned int word, const Scale& scale, unsigned int& low, unsigned int& high) {
    constexpr unsigned int ONE = {% if storage == "f16" %}0x3c003c00{% else %}0x3f803f80{% endif %};
{%- if storage == "f16" %}
    // Places nibbles v in the mantissa of the f16 value 1024: nibbles 0 and 4 become 1024 + v, and nibbles 1 and 5 become 1024 + 16v.
    low = fma_pair(masked_or(word, 0x000f000f, 0x64006400), ONE, scale.minus_zero);
    high = fma_pair(masked_or(word, 0x00f000f0, 0x64006400), 0x2c002c00, scale.minus_high);
{%- else %}
    // Places nibbles v in the lowest bits of the mantissa of the bf16 value 128, which gives 128 + v.
    low = fma_pair(masked_or(word, 0x000f000f, 0x43004300), ONE, scale.minus_zero);
    high = fma_pair(masked_or(word >> 4, 0x000f000f, 0x43004300), ONE, scale.minus_zero);
{%- endif %}
{%- if not warp_mma %}
    low = fma_pair(low, scale.factor, 0x80008000);
    high = fma_pair(high, scale.factor, 0x80008000);
{%- endif %}
}

// Returns the word with the integers of MMA s of a block, shifted so that they are nibbles 0, 1, 4 and 5.
__device__ __forceinline__ unsigned int word_of(const unsigned int (&words)[LANE_WORDS], int s) {
    return words[s / 2] >> s % 2 * 8;
}
{%- else %}

{%- if packed == "e4m3" %}
{%- if group > 0 %}

// Scale of a group{% if warp_mma %}, which is applied to sums of products{% else %}, in both halves of a register{% endif %}.
struct Scale { {% if warp_mma %}float{% else %}unsigned int{% endif %} factor; };

// `word` contains the scale as an f32.
__device__ __forceinline__ Scale scale_of(unsigned int word) {
    const float factor = __uint_as_float(word){% if storage == "f16" and not hopper %} * 256.0f{% endif %};
    return { {% if warp_mma %}factor{% else %}pack_pair<{{ storage }}>(factor, factor){% endif %} };
}
{%- endif %}

// Unpacks the bytes of `word`, the values of one MMA: columns 2t and 2t + 1 to `low`, and 2t + 8 and 2t + 9 to `high`.
__device__ __forceinline__ void unpack_weight(unsigned int word, {% if group > 0 %}const Scale& scale, {% endif %}unsigned int& low, unsigned int& high) {
{%- if storage == "f16" and hopper %}
    asm("{\n"
        ".reg .b16 a, b;\n"
        "mov.b32 { a, b }, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, a;\n"
        "cvt.rn.f16x2.e4m3x2 %1, b;\n"
        "}" : "=r"(low), "=r"(high) : "r"(word));
{%- else %}
    // Move each value to the upper byte of a 16-bit half.
    const unsigned int bits[2] = { __byte_perm(word, 0, 0x1404), __byte_perm(word, 0, 0x3424) };
{%- if storage == "f16" %}
    // The bits of an E4M3 value, read as an f16, are the value times 2⁻⁸. The scale includes the factor 2⁸.
    low = (bits[0] & 0x80008000) | (bits[0] >> 1 & 0x3f803f80);
    high = (bits[1] & 0x80008000) | (bits[1] >> 1 & 0x3f803f80);
{%- else %}
    // The bits of an E4M3 value, read as a bf16, are the value times 2⁻¹²⁰.
    low = (bits[0] & 0x80008000) | (bits[0] >> 4 & 0x07f007f0);
    high = (bits[1] & 0x80008000) | (bits[1] >> 4 & 0x07f007f0);
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(low) : "r"(0x7b807b80), "r"(0x80008000));
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(high) : "r"(0x7b807b80), "r"(0x80008000));
{%- endif %}
{%- endif %}
{%- if group > 0 and not warp_mma %}
    asm("fma.rn.{{ storage }}x2 %0, %0, %1, %2;" : "+r"(low) : "r"(scale.factor), "r"(0x80008000));
    asm("fma.rn.{{ storage }}x2 %0, %0, %1, %2;" : "+r"(high) : "r"(scale.factor), "r"(0x80008000));
{%- endif %}
}
{%- else %}
{%- if group > 0 %}
{%- set scaled_pairs = storage == "f16" and not warp_mma %}

// Scale of a group{% if warp_mma %}, which is applied to sums of products{% elif scaled_pairs %}, in both halves of a register{% endif %}.
struct Scale { {% if scaled_pairs %}unsigned int{% else %}float{% endif %} factor; };

// `word` contains the scale as an f16.
__device__ __forceinline__ Scale scale_of(unsigned int word) {
{%- if scaled_pairs %}
    return { __byte_perm(word, 0, 0x1010) };
{%- else %}
    float factor;
    asm("cvt.f32.f16 %0, %1;" : "=f"(factor) : "h"(static_cast<unsigned short>(word)));
    return { factor };
{%- endif %}
}
{%- endif %}

// Unpacks the bytes of `word`, the integers of one MMA: bytes 0 and 2 (columns 2t and 2t + 1) to `low`, and bytes 1 and 3 (columns 2t + 8
// and 2t + 9) to `high`.
__device__ __forceinline__ void unpack_weight(unsigned int word, {% if group > 0 %}const Scale& scale, {% endif %}unsigned int& low, unsigned int& high) {
{%- if storage == "f16" %}
    // Places bytes in the mantissa of the f16 value 1024, which gives 1024 + 128 + the integer.
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(low) : "r"(__byte_perm(word, 0x64646464, 0x4240)), "r"(0xe480e480));
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(high) : "r"(__byte_perm(word, 0x64646464, 0x4341)), "r"(0xe480e480));
{%- if group > 0 and not warp_mma %}
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(low) : "r"(scale.factor), "r"(0x80008000));
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(high) : "r"(scale.factor), "r"(0x80008000));
{%- endif %}
{%- else %}
    // Places bytes in the mantissa of the f32 value 2²³, which gives 2²³ + 128 + the integer.
{%- set difference = "__uint_as_float(__byte_perm(word, 0x4b000000, 0x7440 + byte)) - 8388736.0f" %}
    const auto integer = [&](int byte) { return {% if group > 0 and not warp_mma %}({{ difference }}) * scale.factor{% else %}{{ difference }}{% endif %}; };
    low = pack_pair<bf16>(integer(0), integer(2));
    high = pack_pair<bf16>(integer(1), integer(3));
{%- endif %}
}
{%- endif %}
{%- if group == 0 %}

// Returns the factor for the sums of a row, given the row's scale.
__device__ __forceinline__ float row_factor(float scale) { return scale{% if packed == "e4m3" and storage == "f16" and not hopper %} * 256.0f{% endif %}; }
{%- endif %}

// Returns the word with the values of MMA s of a block.
__device__ __forceinline__ unsigned int word_of(const unsigned int (&words)[LANE_WORDS], int s) { return words[s]; }
{%- endif %}

// Reads a lane's words of a row from shared memory.
__device__ __forceinline__ void load_words(unsigned int (&to)[LANE_WORDS], unsigned int from) {
{%- if packed == "int4" %}
    asm volatile("ld.shared.v2.u32 { %0, %1 }, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from) : "memory");
{%- else %}
    asm volatile("ld.shared.v4.u32 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
{%- endif %}
}
{%- if group > 0 %}

__device__ __forceinline__ unsigned int load_word(unsigned int from) {
    unsigned int to;
    asm volatile("ld.shared.u{{ 8 * scale_bytes }} %0, [%1];" : "=r"(to) : "r"(from) : "memory");
    return to;
}
{%- endif %}
