struct Tile {
    unsigned int start;   // first token of the sequence
    unsigned int length;  // tokens of the sequence; 0 if there is no such tile
    unsigned int first;   // first query of the tile, relative to the sequence
    unsigned int head;
{% if cached %}    unsigned int sequence;
    unsigned int keys;    // keys of the sequence; the last `length` of them belong to its tokens
{% endif %}
    __device__ __forceinline__ unsigned int all_keys() const { return {% if cached %}keys{% else %}length{% endif %}; }

    // Number of keys before the position of query `row` (relative to the sequence).
    __device__ __forceinline__ unsigned int keys_before(unsigned int row) const { return all_keys() - length + row; }

{% if skips_keys %}    // First key that query `row` attends to.
    __device__ __forceinline__ unsigned int first_key_of(unsigned int row) const {
        return keys_before(row) - min(keys_before(row), WINDOW);
    }

    // End of the keys that the first `rows` queries of the tile attend to.
    __device__ __forceinline__ unsigned int keys_of(unsigned int rows) const {
        const unsigned int end = keys_before(min(length, first + rows));
        return CAUSAL ? end : min(all_keys(), end + WINDOW);
    }
{% else %}    // Number of keys that the first `rows` queries of the tile attend to.
    __device__ __forceinline__ unsigned int keys_of(unsigned int rows) const {
        return CAUSAL ? keys_before(min(length, first + rows)) : all_keys();
    }
{% endif %}};

// Maps a tile index to a query tile of the batch. Every warp searches separately. In a batch of at most 32 sequences, each lane has one
// sequence and counts the tiles before it. Indices then have no gaps, and the longest sequence may come first. In larger batches, the tiles
// of sequence b have the indices from start(b) / ROWS + b on, where start(b) is the sequence's first token. Some indices have no tile.
//
// This code runs before griddepcontrol.wait, and reads offsets, which are batch data. This is safe for two reasons. The first kernel of a
// run begins after the upload of the offsets, and the CTAs of a later kernel begin only after all CTAs of the preceding kernel have begun.
// The next run's upload begins after this run's last kernel, which has waited for all kernels before it.
class TileScheduler {
public:
    __device__ __forceinline__ TileScheduler(const int* __restrict__ cu_lens, unsigned int batch)
        : cu_lens(cu_lens), batch(batch) {
        if (batch <= 32) load_lengths(0, batch);
    }
{% if causal %}
    // Like `at`, but with tiles in descending order of their number of keys, so that tiles with few keys come last. `past` is the number of
    // cached keys before the tokens of this lane's sequence.
    __device__ __forceinline__ Tile by_keys(unsigned int index, unsigned int past) {
        if (batch > 32) return at(index);
        constexpr unsigned int ALL = 0xffffffff;
        const unsigned int tile_index = index / HEADS;
        // Tiles are sorted by the number of keys before their first query, divided by ROWS and rounded down. For this lane's sequence, this
        // quotient is `least` for the first tile, increases by 1 per tile, and is end - 1 for the last tile.
        const unsigned int least = past / ROWS, tiles = tiles_of(length), end = least + tiles;
        const auto with_at_least = [&](unsigned int steps) {
            return __reduce_add_sync(ALL, min(tiles, end - min(end, steps)));
        };
        Tile tile;
        tile.start = tile.length = tile.first = tile.head = 0;
        if (tile_index >= with_at_least(0)) return tile;
        unsigned int steps = 0;
        for (unsigned int more = __reduce_max_sync(ALL, end); more - steps > 1;) {
            const unsigned int middle = steps + (more - steps) / 2;
            if (with_at_least(middle) > tile_index) steps = middle; else more = middle;
        }
        const unsigned int nth = tile_index - with_at_least(steps + 1);
        const bool owns = steps - least < tiles;  // unsigned: the difference wraps if `steps` is below `least`
        const unsigned int owners = __ballot_sync(ALL, owns), before_lane = (1u << threadIdx.x % 32) - 1;
        const unsigned int owner_lane = __ffs(__ballot_sync(ALL, owns && __popc(owners & before_lane) == nth)) - 1;
        tile.start = __shfl_sync(ALL, start, owner_lane);
        tile.length = __shfl_sync(ALL, length, owner_lane);
        tile.first = (steps - __shfl_sync(ALL, least, owner_lane)) * ROWS;
        tile.head = index % HEADS;
{% if cached %}        tile.sequence = owner_lane;
{% endif %}        return tile;
    }
{% endif %}
    __device__ __forceinline__ void in_order() {
        if (batch > 32) return;
        const unsigned int lane = threadIdx.x % 32, own = tiles_of(length);
        before = own;
#pragma unroll
        for (unsigned int step = 1; step < 32; step *= 2) {
            const unsigned int lower = __shfl_up_sync(0xffffffff, before, step);
            if (lane >= step) before += lower;
        }
        before -= own;
    }

    // Sorts sequences by descending length, so that short sequences fill the tail of the grid.
    __device__ __forceinline__ void longest_first() {
        if (batch > 32) return;
        // This key orders by length and then by position, with a single branch-free comparison.
        const unsigned int key = length * 32 + 31 - threadIdx.x % 32;
        before = 0;
#pragma unroll 4
        for (unsigned int other = 0; other < batch; ++other) {
            const unsigned int others = __shfl_sync(0xffffffff, key, other);
            before += tiles_of(others / 32) * static_cast<unsigned int>(others > key);
        }
    }

    // Sorts sequences by descending number of tiles, not by length. If no sequence has more than three tiles, three ballots replace the
    // loop over sequences in longest_first.
    __device__ __forceinline__ void most_tiles_first() {
        if (batch > 32) return;
        const unsigned int own = tiles_of(length), earlier = (1u << threadIdx.x % 32) - 1;
        if (__any_sync(0xffffffff, own > 3)) return longest_first();
        before = 0;
#pragma unroll
        for (unsigned int tiles = 1; tiles <= 3; ++tiles) {
            const unsigned int with = __ballot_sync(0xffffffff, own == tiles);
            before += tiles * __popc(own < tiles ? with : own == tiles ? with & earlier : 0);
        }
    }

    // Returns tile `index / HEADS` of head `index % HEADS`.
    __device__ __forceinline__ Tile at(unsigned int index) {
        const unsigned int tile_index = index / HEADS;
        if (batch > 32) narrow(tile_index);
        // Unsigned: an index before the sequence's first tile wraps to an index after its last tile.
        const unsigned int owners = __ballot_sync(0xffffffff, tile_index - before < tiles_of(length));
        const unsigned int owner_lane = owners == 0 ? 0 : __ffs(owners) - 1;
        Tile tile;
        tile.start = __shfl_sync(0xffffffff, start, owner_lane);
        tile.length = owners == 0 ? 0 : __shfl_sync(0xffffffff, length, owner_lane);
        const unsigned int rank = tile_index - __shfl_sync(0xffffffff, before, owner_lane);
        tile.first = (CAUSAL ? tiles_of(tile.length) - 1 - rank : rank) * ROWS;  // if causal, tiles with more keys come first
        tile.head = index % HEADS;
{% if cached %}        tile.sequence = first_sequence + owner_lane;
{% endif %}        return tile;
    }

private:
    const int* __restrict__ cu_lens;
    unsigned int batch;
    unsigned int start, length, before;  // this lane's sequence: first token, number of tokens, number of tiles in preceding sequences
{% if cached %}    unsigned int first_sequence;         // sequence of lane 0
{% endif %}
    static __device__ __forceinline__ unsigned int tiles_of(unsigned int length) { return (length + ROWS - 1) / ROWS; }

    __device__ __forceinline__ void load_lengths(unsigned int sequence, unsigned int span) {
        const unsigned int lane = threadIdx.x % 32, own = min(sequence + lane, batch - 1);
        start = cu_lens[own];
        length = lane < span ? cu_lens[own + 1] - start : 0;
        before = start / ROWS + own;
{% if cached %}        first_sequence = sequence;
{% endif %}    }

    // Narrows the search down to 32 sequences, one of which contains the tile.
    __device__ __forceinline__ void narrow(unsigned int index) {
        const unsigned int lane = threadIdx.x % 32;
        unsigned int sequence = 0, span = batch;
        while (span > 32) {
            const unsigned int step = (span + 31) / 32;
            const unsigned int probe = sequence + lane * step;
            const bool reached = lane * step < span &&
                static_cast<unsigned int>(cu_lens[probe]) / ROWS + probe <= index;
            const unsigned int steps = __popc(__ballot_sync(0xffffffff, reached)) - 1;
            sequence += steps * step;
            span = min(step, span - steps * step);
        }
        load_lengths(sequence, span);
    }
};
