struct Tile {
    unsigned int start;   // first token of the sequence
    unsigned int length;  // tokens of the sequence; 0 where there is no such tile
    unsigned int first;   // first query of the tile, counted in the sequence
    unsigned int head;
};

// The tiles of a batch, as each warp finds them for itself. Of at most 32 sequences each lane has one and counts
// the tiles before its own: no number is left out, and the longest may come first. The tiles of more are
// numbered as in partials/attention_tile.cu: sequence b has its first at start(b) / ROWS + b.
//
// None of this waits for the kernel before. Offsets are batch data: a run's first kernel begins when their
// upload is done, and a later one's blocks when all blocks of the one before it have begun, so after that.
// The next run's upload begins when this run's last kernel is done, which waited for all before it.
class Tiles {
public:
    __device__ __forceinline__ Tiles(const int* __restrict__ cu_lens, unsigned int batch)
        : cu_lens(cu_lens), batch(batch) {
        if (batch <= 32) look_at(0, batch);
    }

    // In the order of the sequences.
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

    // The longest first, so that what is left at the end is short.
    __device__ __forceinline__ void longest_first() {
        if (batch > 32) return;
        // One comparison and no branch: the longer first, then the earlier.
        const unsigned int key = length * 32 + 31 - threadIdx.x % 32;
        before = 0;
#pragma unroll 4
        for (unsigned int other = 0; other < batch; ++other) {
            const unsigned int others = __shfl_sync(0xffffffff, key, other);
            before += tiles_of(others / 32) * static_cast<unsigned int>(others > key);
        }
    }

    // The same but for sequences of as many tiles, and without a look at each where they have three at most.
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

    // Tile `index / HEADS` for head `index % HEADS`.
    __device__ __forceinline__ Tile at(unsigned int index) {
        const unsigned int tile_index = index / HEADS;
        if (batch > 32) narrow(tile_index);
        // In unsigned numbers, an index before the first is far beyond the last.
        const unsigned int owner = __ballot_sync(0xffffffff, tile_index - before < tiles_of(length));
        const unsigned int nth = owner == 0 ? 0 : __ffs(owner) - 1;
        Tile tile;
        tile.start = __shfl_sync(0xffffffff, start, nth);
        tile.length = owner == 0 ? 0 : __shfl_sync(0xffffffff, length, nth);
        tile.first = (tile_index - __shfl_sync(0xffffffff, before, nth)) * ROWS;
        tile.head = index % HEADS;
        return tile;
    }

private:
    const int* __restrict__ cu_lens;
    unsigned int batch;
    unsigned int start, length, before;  // of this lane's sequence: tokens, and tiles before its own

    static __device__ __forceinline__ unsigned int tiles_of(unsigned int length) { return (length + ROWS - 1) / ROWS; }

    __device__ __forceinline__ void look_at(unsigned int sequence, unsigned int span) {
        const unsigned int lane = threadIdx.x % 32, own = min(sequence + lane, batch - 1);
        start = cu_lens[own];
        length = lane < span ? cu_lens[own + 1] - start : 0;
        before = start / ROWS + own;
    }

    // To 32 sequences, one of which has the tile.
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
        look_at(sequence, span);
    }
};
