// A pack has 16 bytes, and a lane reads one pack at a time. Let g = lane / 4 and c = lane % 4. The lane reads packs c, c + 4, … of keys g
// and g + 8 of a tile, and packs g, g + 8, … of the values of keys 2c, 2c + 1, 2c + 8 and 2c + 9. The hardware serves 16-byte accesses of
// eight lanes at once. In a copy, these eight lanes access 128 contiguous bytes (an L2 line), because requests for parts of several lines
// would halve the DRAM throughput.
constexpr unsigned int PACK = 16 / sizeof(T);
constexpr unsigned int PACKS = HEAD / PACK;
constexpr unsigned int KEY_PACKS = (PACKS + 3) / 4, VALUE_PACKS = (PACKS + 7) / 8;
constexpr unsigned int PACK_BYTES = 32 * 16;  // bytes of one pack per lane of a warp
constexpr unsigned int VALUES_AT = 2 * KEY_PACKS * PACK_BYTES;
constexpr unsigned int STAGE_BYTES = VALUES_AT + 4 * VALUE_PACKS * PACK_BYTES;
constexpr unsigned int LANES_PER_ROW = 8;     // lanes that copy a row, one pack each at a time
constexpr unsigned int UNITS = ROWS * HEAD / 4;  // groups of four adjacent outputs, each reduced by one thread
static_assert(HEAD % 8 == 0, "rows are whole packs");

// Lane 4g + c reads several packs of a key. Returns the byte offset of the i-th of them within its group of 32 packs (one per lane). The
// offsets avoid bank conflicts among the eight lanes that copy a line, and among the eight lanes that read at once.
__device__ __forceinline__ unsigned int key_place(unsigned int g, unsigned int c, unsigned int i) {
    return ((g ^ i % 2) * 4 + c) * 16;
}

// Lane 4g + c reads one pack of a value in each group of 32 packs. Returns the byte offset of this pack within the group. The offsets avoid
// bank conflicts, as in key_place.
__device__ __forceinline__ unsigned int value_place(unsigned int g, unsigned int c) { return (c * 8 + (g ^ c * 2)) * 16; }

// Byte offset, within a stage, of a pack of a key.
__device__ __forceinline__ unsigned int key_offset(unsigned int key, unsigned int pack) {
    return (key / 8 * KEY_PACKS + pack / 4) * PACK_BYTES + key_place(key % 8, pack % 4, pack / 4);
}

// Byte offset, within a stage, of a pack of the value of `key`.
__device__ __forceinline__ unsigned int value_offset(unsigned int key, unsigned int pack) {
    const unsigned int row = (key % 2 + key / 8 * 2) * VALUE_PACKS + pack / 8;
    return VALUES_AT + row * PACK_BYTES + value_place(pack % 8, key % 8 / 2);
}
