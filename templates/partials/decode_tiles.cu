{% if e4m3 %}constexpr unsigned int PACKS_AT_ONCE = COPY / PACK;  // packs that a lane copies at once
{% else %}constexpr unsigned int PACKS_AT_ONCE = 1;  // packs that a lane copies at once
{% endif %}constexpr bool HAS_RUNS = 32 % LANES_PER_ROW == 0;           // whether the same lanes copy the same part of each row
constexpr unsigned int KEYS_AT_ONCE = 32 / LANES_PER_ROW;    // keys that a warp copies at once
constexpr unsigned int PERIOD = KEYS_AT_ONCE < 8 ? 8 / KEYS_AT_ONCE : 1;  // number of copies after which the offsets of packs repeat

// The tiles of a warp. The CTA's keys are divided into pairs of tiles, and a warp has every WARPS-th pair. Its first pair begins at key
// `first`, and its keys end before `end`.
class Tiles {
public:
    __device__ __forceinline__ Tiles(const int* own, unsigned int kv_head, unsigned int first, unsigned int end,
                                     unsigned int shared{% if appends %}, unsigned int newest, const T* newest_key{% if scaled %},
                                     float key_scale, float value_scale{% endif %}{% endif %})
        : own(own), kv_head(kv_head), first(first), end(end), shared(shared){% if appends %}, newest(newest), newest_key(newest_key){% if scaled %},
          key_scale(key_scale), value_scale(value_scale){% endif %}{% endif %} {
        const unsigned int left = first < end ? end - first : 0, pairs = (left + STRIDE_OF_WARPS - 1) / STRIDE_OF_WARPS;
        const unsigned int last = left - (pairs - 1) * STRIDE_OF_WARPS;  // number of keys from the last pair on
        n = pairs == 0 ? 0 : pairs * 2 - (last <= TILE);
        load_slots(0);
        const unsigned int lane = threadIdx.x % 32, pack = lane % LANES_PER_ROW * PACKS_AT_ONCE;
        offset = opaque(lane / LANES_PER_ROW * HEAD + pack * PACK);
#pragma unroll
        for (unsigned int i = 0; i < PERIOD; ++i) {
            const unsigned int key = (i * KEYS_AT_ONCE + lane / LANES_PER_ROW) % TILE;
            key_at[i] = opaque(key_offset(key, pack));
            value_at[i] = opaque(value_offset(key, pack));
        }
    }

    __device__ __forceinline__ unsigned int key(unsigned int tile) const {
        return first + tile / 2 * STRIDE_OF_WARPS + tile % 2 * TILE;
    }

    // Starts copying a tile. Tiles must be copied in order. Keys from `end` on become zeros.
    __device__ __forceinline__ void copy(unsigned int tile, const Cached* keys, const Cached* values) {
        if (tile % 2 == 0) {
            slots = next_slots;
            load_slots(tile / 2 + 1);
        }
        // Fast path: in most tiles, the keys are in consecutive slots of one cache block, and copying takes few instructions.
        const unsigned int first_slot = __shfl_sync(ALL_LANES, slots, tile % 2 * TILE), left = end - key(tile);
        const bool is_next = slots - first_slot == threadIdx.x % TILE || threadIdx.x % 32 / TILE != tile % 2;
        const bool are_adjacent = __all_sync(ALL_LANES, is_next) && first_slot % BLOCK <= BLOCK - TILE;
        if (HAS_RUNS && are_adjacent && left >= TILE{% if appends %} && newest - key(tile) >= TILE{% endif %}) {
            const unsigned long long row = row_of(first_slot);
            copy_run(stage(tile), keys + row, values + row);
        } else {
            copy_each(tile, left, keys, values);
        }
    }

    __device__ __forceinline__ unsigned int stage(unsigned int tile) const { return shared + tile % STAGES * STAGE_BYTES; }

    unsigned int n;  // number of tiles

private:
    const int* own;
    unsigned int kv_head, first, end, shared;
    unsigned int slots, next_slots;  // slots of the lane's key in the current and the next pair of tiles
    unsigned int offset;             // offset of the lane's part of a tile with consecutive slots, in elements
    unsigned int key_at[PERIOD], value_at[PERIOD];  // byte offsets, within a stage, of the lane's packs in the first PERIOD copies
{% if appends %}    unsigned int newest;    // index of the token's own key
    const T* newest_key;    // the token's own key in the projection; its value has a fixed offset from the key
{% if scaled %}    float key_scale, value_scale;
{% endif %}{% endif %}
    __device__ __forceinline__ void load_slots(unsigned int pair) {
        const unsigned int key = first + pair * STRIDE_OF_WARPS + threadIdx.x % 32;
        next_slots = key < end ? __ldg(own + key) : 0;
    }

    // Returns the offset of a slot's key in the cache, in elements.
    __device__ __forceinline__ unsigned long long row_of(unsigned int slot) const {
        return slot / BLOCK * STRIDE + (kv_head * BLOCK + slot % BLOCK) * HEAD;
    }

    // Hides from the compiler how x was computed. Otherwise, the compiler would recompute x in each tile.
    static __device__ __forceinline__ unsigned int opaque(unsigned int x) {
        asm volatile("" : "+r"(x));
        return x;
    }

    // Starts copying the keys and values of a whole tile, whose rows are contiguous in the cache.
    __device__ __forceinline__ void copy_run(unsigned int to, const Cached* keys, const Cached* values) const {
        const unsigned int first_pack = threadIdx.x % LANES_PER_ROW * PACKS_AT_ONCE;
        keys += offset;
        values += offset;
#pragma unroll
        for (unsigned int key = 0; key < TILE; key += KEYS_AT_ONCE) {
            const unsigned int nth = key / KEYS_AT_ONCE % PERIOD, octet = key / 8;
#pragma unroll
            for (unsigned int i = 0; i < PACKS; i += LANES_PER_ROW * PACKS_AT_ONCE) {
                const unsigned int pack = i + first_pack;
                const bool inside = pack < PACKS;
                const unsigned int key_to = to + key_at[nth] + octet * KEY_PACKS * PACK_BYTES + key_offset(0, i);
                const unsigned int value_to = to + value_at[nth] + octet * 2 * VALUE_PACKS * PACK_BYTES + i / 8 * PACK_BYTES;
                const unsigned int from = key * HEAD + i * PACK;
                if (pack < KEY_PACKS * 4) copy_packs(key_to, inside ? keys + from : keys, inside);
                copy_packs(value_to, inside ? values + from : values, inside);
            }
        }
    }

    // Starts copying a tile of which only the first `left` keys exist. The keys may be in any slots of the cache.
    __device__ __forceinline__ void copy_each(unsigned int tile, unsigned int left, const Cached* keys, const Cached* values) const {
        const unsigned int to = stage(tile);
{% if e4m3 %}#pragma unroll
        for (unsigned int from = 0; from < TILE * LANES_PER_ROW; from += 32) {
            const unsigned int i = from + threadIdx.x % 32, key = min(i / LANES_PER_ROW, TILE - 1), pack = i % LANES_PER_ROW * PACKS_AT_ONCE;
            const unsigned long long row = row_of(slot_of(tile, key));
            if (TILE * LANES_PER_ROW % 32 != 0 && i >= TILE * LANES_PER_ROW) continue;
            const bool inside = key < left && pack < PACKS;
{% if appends %}            if (inside && this->key(tile) + key == newest) {
#pragma unroll
                for (unsigned int j = 0; j < PACKS_AT_ONCE; ++j) {
                    const T* from = newest_key + (pack + j) * PACK;
                    store_pack(to + key_offset(key, pack) + j * PACK, pack_in_e4m3(from{% if scaled %}, key_scale{% endif %}));
                    store_pack(to + value_offset(key, pack) + j * PACK, pack_in_e4m3(from + (VALUE_COLUMN - KEY_COLUMN){% if scaled %}, value_scale{% endif %}));
                }
                continue;
            }
{% endif %}            copy_packs(to + key_offset(key, pack), inside ? keys + row + pack * PACK : keys, inside);
            copy_packs(to + value_offset(key, pack), inside ? values + row + pack * PACK : values, inside);
        }
{% else %}#pragma unroll
        for (unsigned int nth = 0; nth < 4; ++nth) {
            const unsigned int key = nth * 4 + threadIdx.x % 32 / 8;
            const unsigned long long row = row_of(slot_of(tile, key));
{% if appends %}            const bool is_newest = this->key(tile) + key == newest;
            const T* of_key = is_newest ? newest_key : keys + row;
            const T* of_value = is_newest ? newest_key + (VALUE_COLUMN - KEY_COLUMN) : values + row;
{% else %}            const T *of_key = keys + row, *of_value = values + row;
{% endif %}#pragma unroll
            for (unsigned int i = 0; i < VALUE_PACKS; ++i) {
                const unsigned int pack = i * 8 + threadIdx.x % 8;
                const bool inside = key < left && pack < PACKS;
                if (pack < KEY_PACKS * 4) copy_packs(to + key_offset(key, pack), inside ? of_key + pack * PACK : keys, inside);
                copy_packs(to + value_offset(key, pack), inside ? of_value + pack * PACK : values, inside);
            }
        }
{% endif %}    }

    // Returns the slot of a key of `tile`. The tile must belong to the pair of tiles that is being copied.
    __device__ __forceinline__ unsigned int slot_of(unsigned int tile, unsigned int key) const {
        return __shfl_sync(ALL_LANES, slots, tile % 2 * TILE + key);
    }
{% if e4m3 and appends %}
    static __device__ __forceinline__ void store_pack(unsigned int to, const uint2& pack) {
        asm volatile("st.shared.v2.u32 [%0], { %1, %2 };" ::"r"(to), "r"(pack.x), "r"(pack.y) : "memory");
    }
{% endif %}};
