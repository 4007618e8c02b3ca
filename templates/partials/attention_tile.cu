{% include "partials/attention_smem_rows.cu" -%}
static_assert({{ q_aligned }} && {{ k_aligned }} && {{ v_aligned }}, "a row of a head starts at a multiple of 16 bytes");

struct Tile {
    unsigned int start;   // first token of the sequence
    unsigned int length;  // tokens of the sequence
    unsigned int first;   // first query of the tile, relative to the sequence
};

// Returns query tile blockIdx.x. The tiles of sequence b have the indices from start(b) / ROWS + b on, where start(b) is the sequence's
// first token. The indices of the next sequence begin at least ceil(length / ROWS) later. The indices of sequences therefore never overlap,
// each sequence leaves at most one index unused, and no prefix sum over tiles is needed. Every warp searches separately, 32 sequences at
// once (ByteTransformer, figure 7).
__device__ __forceinline__ Tile find_tile(const int* __restrict__ cu_lens, unsigned int batch) {
    const unsigned int lane = threadIdx.x % 32;
    unsigned int sequence = 0;
    for (unsigned int span = batch; span > 1;) {
        const unsigned int step = (span + 31) / 32;
        const unsigned int probe = sequence + lane * step;
        const bool reached = lane * step < span &&
            static_cast<unsigned int>(cu_lens[probe]) / ROWS + probe <= blockIdx.x;
        const unsigned int steps = __popc(__ballot_sync(0xffffffffu, reached)) - 1;
        sequence += steps * step;
        span = min(step, span - steps * step);
    }
    Tile tile;
    tile.start = cu_lens[sequence];
    tile.length = cu_lens[sequence + 1] - tile.start;
    tile.first = (blockIdx.x - (tile.start / ROWS + sequence)) * ROWS;
    return tile;
}

{% include "partials/attention_copy.cu" -%}
