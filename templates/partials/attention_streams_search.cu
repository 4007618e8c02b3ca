struct Tile {
    unsigned int start;   // first token of the sequence
    unsigned int length;  // tokens of the sequence; 0 after the last tile
    unsigned int first;   // first query of the tile, counted in the sequence
    unsigned int head;
};

// The tiles of a warp's stream: every so many-th of the heads of all tiles, in turns forwards and
// backwards through the streams, so that none has the longer one every time. Of at most 32 sequences
// the longest have the first numbers where streams have several tiles: then all are done at about the
// same time. Those of more are numbered in their order, as in partials/attention_tile.cu: sequence b has
// its first tile at start(b) / ROWS + b.
class Tiles {
public:
    __device__ __forceinline__ Tiles(const int* __restrict__ cu_lens, unsigned int batch, unsigned int stream)
        : cu_lens(cu_lens), batch(batch), stream(stream * gridDim.x + blockIdx.x), streams(STREAMS * gridDim.x) {
        const unsigned int lane = threadIdx.x % 32;
        all = (cu_lens[batch] / ROWS + batch) * HEADS;
        if (batch > 32) return;
        look_at(0, batch);
        const unsigned int mine = (length + ROWS - 1) / ROWS;
        if (all <= streams) {
            before = mine;
#pragma unroll
            for (unsigned int step = 1; step < 32; step *= 2) {
                const unsigned int lower = __shfl_up_sync(0xffffffff, before, step);
                if (lane >= step) before += lower;
            }
            before -= mine;
            return;
        }
        // One comparison and no branch: the longer first, then the earlier.
        const unsigned int key = length * 32 + 31 - lane;
        before = 0;
#pragma unroll 4
        for (unsigned int other = 0; other < batch; ++other) {
            const unsigned int others = __shfl_sync(0xffffffff, key, other);
            before += (others / 32 + ROWS - 1) / ROWS * static_cast<unsigned int>(others > key);
        }
    }

    __device__ __forceinline__ Tile next() {
        Tile tile;
        tile.length = 0;
        while (from < all && tile.length == 0) {
            const unsigned int index = from + (backwards ? streams - 1 - stream : stream);
            find(tile, index / HEADS);
            tile.head = index % HEADS;
            from += streams, backwards = !backwards;
        }
        return tile;
    }

private:
    const int* __restrict__ cu_lens;
    unsigned int batch, stream, streams, all;
    unsigned int from = 0;
    bool backwards = false;
    unsigned int start, length, before;  // of this lane's sequence: tokens, and tiles before its own

    __device__ __forceinline__ void look_at(unsigned int sequence, unsigned int span) {
        const unsigned int lane = threadIdx.x % 32, own = min(sequence + lane, batch - 1);
        start = cu_lens[own];
        length = lane < span ? cu_lens[own + 1] - start : 0;
        before = start / ROWS + own;
    }

    __device__ __forceinline__ void find(Tile& tile, unsigned int index) {
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
        if (batch > 32) look_at(sequence, span);
        // In unsigned numbers, an index before the first is far beyond the last.
        const unsigned int owner = __ballot_sync(0xffffffff, index - before < (length + ROWS - 1) / ROWS);
        const unsigned int nth = owner == 0 ? 0 : __ffs(owner) - 1;
        tile.start = __shfl_sync(0xffffffff, start, nth);
        tile.length = owner == 0 ? 0 : __shfl_sync(0xffffffff, length, nth);
        tile.first = (index - __shfl_sync(0xffffffff, before, nth)) * ROWS;
    }
};
