// A pack has 8 elements. Let g = lane / 4 and c = lane % 4. A lane reads one pack at a time: packs c, c + 4, … of keys g and g + 8 of a
// tile, and packs g, g + 8, … of the values of keys 2c, 2c + 1, 2c + 8 and 2c + 9. A lane copies contiguous packs, and neighboring lanes
// copy adjacent bytes, because requests for parts of several L2 lines would halve the DRAM throughput.
constexpr unsigned int PACK = 8;
constexpr unsigned int PACKS = HEAD / PACK;
constexpr unsigned int KEY_PACKS = (PACKS + 3) / 4, VALUE_PACKS = (PACKS + 7) / 8;
constexpr unsigned int PACK_BYTES = 32 * 8;                        // bytes of one pack per lane of a warp
constexpr unsigned int COPY = HEAD % 16 == 0 ? 16 : 8;             // bytes that a lane copies at a time
constexpr unsigned int LANES_PER_ROW = KEY_PACKS * 4 * PACK / COPY;  // lanes that copy a row; packs beyond the end of a key's row become zeros
constexpr unsigned int VALUES_AT = 2 * KEY_PACKS * PACK_BYTES;
constexpr unsigned int STAGE_BYTES = VALUES_AT + 4 * VALUE_PACKS * PACK_BYTES;
constexpr unsigned int UNITS = ROWS * HEAD / 4;  // groups of four adjacent outputs, each reduced by one thread
static_assert(HEAD % PACK == 0, "rows are whole packs");

// Lane 4g + c reads several packs of a key. Returns the byte offset of the i-th of them within its group of 32 packs (one per lane). Packs
// that a lane copies in one access are adjacent. The 16 lanes that read at once access all banks.
__device__ __forceinline__ unsigned int key_place(unsigned int g, unsigned int c, unsigned int i) {
    return ((g ^ (i % 2 * 2 + i / 2 % 2)) * 4 + c) * 8;
}

// Lane 4g + c reads one pack of a value in each group of 32 packs (one per lane). Returns the byte offset of this pack within group `row`.
// Packs that a lane copies in one access are adjacent. The 16 lanes that read at once access all banks.
__device__ __forceinline__ unsigned int value_place(unsigned int g, unsigned int c, unsigned int row) {
    return ((c ^ row % 2) * 8 + (g ^ c / 2 * 4)) * 8;
}

// Byte offset, within a stage, of a pack of a key.
__device__ __forceinline__ unsigned int key_offset(unsigned int key, unsigned int pack) {
    return (key / 8 * KEY_PACKS + pack / 4) * PACK_BYTES + key_place(key % 8, pack % 4, pack / 4);
}

// Byte offset, within a stage, of a pack of the value of `key`.
__device__ __forceinline__ unsigned int value_offset(unsigned int key, unsigned int pack) {
    const unsigned int row = (key % 2 + key / 8 * 2) * VALUE_PACKS + pack / 8;
    return VALUES_AT + row * PACK_BYTES + value_place(pack % 8, key % 8 / 2, row);
}

{% set multiplies_in_f16 = true %}{% include "partials/cache_decode.cu" %}
{%- if appends %}
{% include "partials/cache_encode.cu" %}
// Loads a pack of the projection's row{% if scaled %}, divides it by `scale`,{% endif %} and converts it to E4M3.
__device__ __forceinline__ uint2 pack_in_e4m3(const T* from{% if scaled %}, float scale{% endif %}) {
    unsigned int words[4];
    // ld.global.nc is not used, because the compiler may move such loads before griddepcontrol.wait.
    asm volatile("ld.global.v4.u32 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(from) : "memory");
    float value[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = to_float(T{static_cast<unsigned short>(words[i / 2] >> i % 2 * 16)}){% if scaled %} / scale{% endif %};
    return uint2{pack_e4m3(value[0], value[1], value[2], value[3]), pack_e4m3(value[4], value[5], value[6], value[7])};
}
{%- endif %}
