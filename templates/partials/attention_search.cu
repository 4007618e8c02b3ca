struct Tile {
    unsigned int start;   // first token of the sequence
    unsigned int length;  // tokens of the sequence
    unsigned int first;   // first query of the tile, counted in the sequence
};

// Tile `index`; its first query is at or beyond the length where there is none. Of at most 32
// sequences the longest have the first numbers, so that what is left at the end is short: each lane
// counts the tiles before those of one sequence. Those of more are numbered in their order, as in
// partials/attention_tile.cu: sequence b has its first tile at start(b) / ROWS + b.
__device__ __forceinline__ Tile find_tile(const int* __restrict__ cu_lens, unsigned int batch, unsigned int index) {
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
    const unsigned int own = min(sequence + lane, batch - 1);
    const unsigned int start = cu_lens[own];
    const unsigned int length = lane < span ? cu_lens[own + 1] - start : 0;
    unsigned int before = start / ROWS + own;
    if (batch <= 32 && gridDim.x <= MOST_BLOCKS) {
        const unsigned int mine = (length + ROWS - 1) / ROWS;
        before = mine;
#pragma unroll
        for (unsigned int step = 1; step < 32; step *= 2) {
            const unsigned int lower = __shfl_up_sync(0xffffffff, before, step);
            if (lane >= step) before += lower;
        }
        before -= mine;
    } else if (batch <= 32) {
        // One comparison and no branch: the longer first, then the earlier.
        const unsigned int key = length * 32 + 31 - lane;
        before = 0;
#pragma unroll 4
        for (unsigned int other = 0; other < batch; ++other) {
            const unsigned int others = __shfl_sync(0xffffffff, key, other);
            before += (others / 32 + ROWS - 1) / ROWS * static_cast<unsigned int>(others > key);
        }
    }
    // In unsigned numbers, an index before the first is far beyond the last.
    const unsigned int owner = __ballot_sync(0xffffffff, index - before < (length + ROWS - 1) / ROWS);
    const unsigned int nth = owner == 0 ? 0 : __ffs(owner) - 1;
    Tile tile;
    tile.start = __shfl_sync(0xffffffff, start, nth);
    tile.length = owner == 0 ? 0 : __shfl_sync(0xffffffff, length, nth);
    tile.first = (index - __shfl_sync(0xffffffff, before, nth)) * ROWS;
    return tile;
}
