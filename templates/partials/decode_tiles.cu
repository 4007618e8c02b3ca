// The tiles of a warp: every WARPS-th pair of tiles of the CTA's keys, from key `first` up to key `end`.
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
    }

    __device__ __forceinline__ unsigned int key(unsigned int tile) const {
        return first + tile / 2 * STRIDE_OF_WARPS + tile % 2 * TILE;
    }

    // Starts copying a tile. Tiles must be copied in order. Keys from `end` on become zeros.
    __device__ __forceinline__ void copy(unsigned int tile, const {% if e4m3 %}unsigned char* keys, const unsigned char{% else %}T* keys, const T{% endif %}* values) {
        if (tile % 2 == 0) {
            slots = next_slots;
            load_slots(tile / 2 + 1);
        }
        const unsigned int to = stage(tile), left = end - key(tile);
{% if e4m3 %}#pragma unroll
        for (unsigned int from = 0; from < TILE * COPIES; from += 32) {
            const unsigned int i = from + threadIdx.x % 32, key = min(i / COPIES, TILE - 1), pack = i % COPIES * (COPY / PACK);
            const unsigned long long row = row_of(tile, key);
            if (TILE * COPIES % 32 != 0 && i >= TILE * COPIES) continue;
            const bool inside = key < left && pack < PACKS;
            const unsigned int value_row = (key % 2 + key / 8 * 2) * VALUE_PACKS + pack / 8;
            const unsigned int key_at =
                to + (key / 8 * KEY_PACKS + pack / 4) * PACK_BYTES + key_place(key % 8, pack % 4, pack / 4);
            const unsigned int value_at =
                to + VALUES_AT + value_row * PACK_BYTES + value_place(pack % 8, key % 8 / 2, value_row);
{% if appends %}            if (inside && this->key(tile) + key == newest) {
#pragma unroll
                for (unsigned int j = 0; j < COPY / PACK; ++j) {
                    store_pack(key_at + j * PACK, pack_in_e4m3(newest_key + (pack + j) * PACK{% if scaled %}, key_scale{% endif %}));
                    store_pack(value_at + j * PACK, pack_in_e4m3(newest_key + (VALUE_COLUMN - KEY_COLUMN) + (pack + j) * PACK{% if scaled %}, value_scale{% endif %}));
                }
                continue;
            }
{% endif %}            copy_packs(key_at, inside ? keys + row + pack * PACK : keys, inside);
            copy_packs(value_at, inside ? values + row + pack * PACK : values, inside);
        }
{% else %}#pragma unroll
        for (unsigned int nth = 0; nth < 4; ++nth) {
            const unsigned int key = nth * 4 + threadIdx.x % 32 / 8, g = threadIdx.x % 8;
            const unsigned long long row = row_of(tile, key);
{% if appends %}            const bool is_newest = this->key(tile) + key == newest;
            const T* of_key = is_newest ? newest_key : keys + row;
            const T* of_value = is_newest ? newest_key + (VALUE_COLUMN - KEY_COLUMN) : values + row;
{% else %}            const T *of_key = keys + row, *of_value = values + row;
{% endif %}#pragma unroll
            for (unsigned int i = 0; i < VALUE_PACKS; ++i) {
                const unsigned int pack = i * 8 + g;
                const bool inside = key < left && pack < PACKS;
                const unsigned int key_at = (key / 8 * KEY_PACKS + pack / 4) * PACK_BYTES + key_place(key % 8, pack % 4, pack / 4);
                const unsigned int value_at = ((key % 2 + key / 8 * 2) * VALUE_PACKS + i) * PACK_BYTES + value_place(g, key % 8 / 2);
                if (pack < KEY_PACKS * 4) copy_pack(to + key_at, inside ? of_key + pack * PACK : keys, inside);
                copy_pack(to + VALUES_AT + value_at, inside ? of_value + pack * PACK : values, inside);
            }
        }
{% endif %}    }

    __device__ __forceinline__ unsigned int stage(unsigned int tile) const { return shared + tile % STAGES * STAGE_BYTES; }

    unsigned int n;  // number of tiles

private:
    const int* own;
    unsigned int kv_head, first, end, shared;
    unsigned int slots, next_slots;  // slot of the lane's key in a pair of tiles
{% if appends %}    unsigned int newest;    // index of the token's own key
    const T* newest_key;    // the token's own key in the projection; its value has a fixed offset from the key
{% if scaled %}    float key_scale, value_scale;
{% endif %}{% endif %}
    __device__ __forceinline__ void load_slots(unsigned int pair) {
        const unsigned int key = first + pair * STRIDE_OF_WARPS + threadIdx.x % 32;
        next_slots = key < end ? __ldg(own + key) : 0;
    }

    __device__ __forceinline__ unsigned long long row_of(unsigned int tile, unsigned int key) const {
        const unsigned int slot = __shfl_sync(ALL_LANES, slots, tile % 2 * TILE + key);
        return slot / BLOCK * STRIDE + (kv_head * BLOCK + slot % BLOCK) * HEAD;
    }
{% if e4m3 and appends %}
    static __device__ __forceinline__ void store_pack(unsigned int to, const uint2& pack) {
        asm volatile("st.shared.v2.u32 [%0], { %1, %2 };" ::"r"(to), "r"(pack.x), "r"(pack.y) : "memory");
    }
{% endif %}};
