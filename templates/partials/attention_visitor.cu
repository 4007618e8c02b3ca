// Problem visitor of a grouped GEMM whose problems are the heads of all sequences. CTAs are persistent and process every gridDim.x-th tile.
// The 32 lanes of a warp find the next 32 tiles of the CTA at once and return them one by one (ByteTransformer, figure 7). All warps of a
// CTA find the same tiles.
constexpr unsigned int HEADS = {{ heads }};
constexpr bool TILE_KEYS = {{ tile_keys }};  // whether a tile has KEY_TILE keys rather than all keys

constexpr unsigned int ALL = 0xffffffffu;

struct Tile {
    unsigned int sequence;
    unsigned int head;
    unsigned int row;     // first query, relative to the sequence
    unsigned int column;  // first key, relative to the sequence
};

class Visitor {
public:
    // Finds the next tile of this CTA. Returns false after the last tile.
    __device__ __forceinline__ bool next(Tile& tile, const int* __restrict__ cu_lens, unsigned int batch) {
        if (visited % 32 == 0) look_ahead(cu_lens, batch);
        tile.sequence = __shfl_sync(ALL, ahead.sequence, visited % 32);
        tile.head = __shfl_sync(ALL, ahead.head, visited % 32);
        tile.row = __shfl_sync(ALL, ahead.row, visited % 32);
        tile.column = __shfl_sync(ALL, ahead.column, visited % 32);
        ++visited;
        return tile.sequence < batch;
    }

private:
    using Count = unsigned long long;

    unsigned int visited = 0;  // number of tiles returned so far
    Tile ahead;                // this lane's tile; its sequence is `batch` if there is no tile

    static __device__ __forceinline__ Count tiles_of_head(unsigned int length) {
        const Count rows = (length + ROWS - 1) / ROWS;
        return TILE_KEYS ? rows * key_tiles(length) : rows;
    }

    __device__ __forceinline__ void look_ahead(const int* __restrict__ cu_lens, unsigned int batch) {
        const unsigned int lane = threadIdx.x % 32;
        const Count number = blockIdx.x + static_cast<Count>(visited + lane) * gridDim.x;
        ahead.sequence = batch;
        Count before = 0;  // tiles of the sequences before `window`
        for (unsigned int window = 0; window < batch; window += 32) {
            // Lane i handles sequence window + i. `inclusive` becomes the number of tiles in all sequences up to and including this one.
            const unsigned int sequence = window + lane;
            const unsigned int length = sequence < batch ? cu_lens[sequence + 1] - cu_lens[sequence] : 0;
            Count inclusive = HEADS * tiles_of_head(length);
#pragma unroll
            for (unsigned int offset = 1; offset < 32; offset *= 2) {
                const Count lower = __shfl_up_sync(ALL, inclusive, offset);
                if (lane >= offset) inclusive += lower;
            }
            inclusive += before;
            const Count end = __shfl_sync(ALL, inclusive, 31);
            // Finds the tile's sequence by binary search over the lanes. The tiles of all earlier sequences end at or before `number`.
            unsigned int owner = 0;
#pragma unroll
            for (unsigned int step = 16; step > 0; step /= 2) {
                if (__shfl_sync(ALL, inclusive, owner + step - 1) <= number) owner += step;
            }
            const Count lower = __shfl_sync(ALL, inclusive, (owner + 31) % 32);
            const unsigned int n = __shfl_sync(ALL, length, owner);
            if (number >= before && number < end) {
                const Count local = number - (owner == 0 ? before : lower);
                const Count in_head = local % tiles_of_head(n);
                const unsigned int columns = TILE_KEYS ? key_tiles(n) : 1;
                ahead.sequence = window + owner;
                ahead.head = static_cast<unsigned int>(local / tiles_of_head(n));
                ahead.row = static_cast<unsigned int>(in_head / columns) * ROWS;
                ahead.column = static_cast<unsigned int>(in_head % columns) * KEY_TILE;
            }
            if (__shfl_sync(ALL, number, 31) < end) return;  // numbers ascend with the lane
            before = end;
        }
    }
};
