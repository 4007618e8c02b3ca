struct Tile {
    unsigned int start;   // first token of the sequence
    unsigned int length;  // tokens of the sequence
    unsigned int first;   // first query of the tile, counted in the sequence
};

// Tile blockIdx.x, numbered as in partials/attention_tile.cu: sequence b has its first at
// start(b) / ROWS + b. At most 32 sequences take one trip to memory, 1024 take two.
__device__ __forceinline__ Tile find_tile(const int* __restrict__ cu_lens, unsigned int batch) {
    const unsigned int lane = threadIdx.x % 32;
    unsigned int sequence = 0, span = batch;
    while (span > 32) {
        const unsigned int step = (span + 31) / 32;
        const unsigned int probe = sequence + lane * step;
        const bool reached = lane * step < span &&
            static_cast<unsigned int>(cu_lens[probe]) / ROWS + probe <= blockIdx.x;
        const unsigned int steps = __popc(__ballot_sync(0xffffffffu, reached)) - 1;
        sequence += steps * step;
        span = min(step, span - steps * step);
    }
    const unsigned int own = min(sequence + lane, batch - 1);
    const unsigned int start = cu_lens[own], end = cu_lens[own + 1];
    const bool reached = lane < span && start / ROWS + own <= blockIdx.x;
    const unsigned int nth = __popc(__ballot_sync(0xffffffffu, reached)) - 1;
    Tile tile;
    tile.start = __shfl_sync(0xffffffffu, start, nth);
    tile.length = __shfl_sync(0xffffffffu, end, nth) - tile.start;
    tile.first = (blockIdx.x - (tile.start / ROWS + sequence + nth)) * ROWS;
    return tile;
}
