struct Tile {
    unsigned int start;   // first token of the sequence
    unsigned int length;  // tokens of the sequence; 0 where there is no such tile
    unsigned int first;   // first query of the tile, counted in the sequence
    unsigned int head;
};

// The tiles of a batch, as each warp finds them for itself. Of at most 32 · EACH sequences a lane has up to EACH,
// one after the other, and counts the tiles before them: no number is left out. Of at most 32, one a lane,
// the longest may come first. The tiles of more are numbered as in partials/attention_tile.cu: sequence b
// has its first at start(b) / ROWS + b, and at most one number of each is left unused.
//
// None of this waits for the kernel before. Offsets are batch data: a run's first kernel begins when their
// upload is done, and a later one's blocks when all blocks of the one before it have begun, so after that.
// The next run's upload begins when this run's last kernel is done, which waited for all before it.
class Tiles {
public:
    __device__ __forceinline__ Tiles(const int* __restrict__ cu_lens, unsigned int batch)
        : cu_lens(cu_lens), batch(batch) {
        if (batch <= 32 * EACH) look_at(0, batch, (batch + 31) / 32);
    }

    // In the order of the sequences.
    __device__ __forceinline__ void in_order() {
        if (batch > 32 * EACH) return;
        const unsigned int lane = threadIdx.x % 32;
        unsigned int own = 0;
#pragma unroll
        for (unsigned int i = 0; i < EACH; ++i) own += tiles_of(length[i]);
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
        if (batch > 32) return in_order();
        // One comparison and no branch: the longer first, then the earlier.
        const unsigned int key = length[0] * 32 + 31 - threadIdx.x % 32;
        before = 0;
#pragma unroll 4
        for (unsigned int other = 0; other < batch; ++other) {
            const unsigned int others = __shfl_sync(0xffffffff, key, other);
            before += tiles_of(others / 32) * static_cast<unsigned int>(others > key);
        }
    }

    // Tile `index / HEADS` for head `index % HEADS`.
    __device__ __forceinline__ Tile at(unsigned int index) {
        if (batch > 32 * EACH) narrow(index / HEADS);
        // In unsigned numbers, an index before the first is far beyond the last.
        unsigned int from = start, first = index / HEADS - before, found = 0;
#pragma unroll
        for (unsigned int i = 0; i < EACH; ++i) {
            const unsigned int tiles = tiles_of(length[i]);
            if (found == 0 && first < tiles) found = length[i];
            if (found == 0) from += length[i], first -= tiles;
        }
        const unsigned int owner = __ballot_sync(0xffffffff, found != 0);
        const unsigned int nth = owner == 0 ? 0 : __ffs(owner) - 1;
        Tile tile;
        tile.start = __shfl_sync(0xffffffff, from, nth);
        tile.length = __shfl_sync(0xffffffff, found, nth);
        tile.first = __shfl_sync(0xffffffff, first, nth) * ROWS;
        tile.head = index % HEADS;
        return tile;
    }

private:
    const int* __restrict__ cu_lens;
    unsigned int batch;
    // Of this lane's sequences: where they begin, their lengths, and the tiles before them.
    unsigned int start, length[EACH], before;

    static __device__ __forceinline__ unsigned int tiles_of(unsigned int length) { return (length + ROWS - 1) / ROWS; }

    // `each` a lane of the `span` sequences from `sequence` on.
    __device__ __forceinline__ void look_at(unsigned int sequence, unsigned int span, unsigned int each) {
        const unsigned int end = sequence + span, own = min(sequence + threadIdx.x % 32 * each, end);
        start = cu_lens[own];
        unsigned int last = start;
#pragma unroll
        for (unsigned int i = 0; i < EACH; ++i) {
            const unsigned int next = i < each ? cu_lens[min(own + i + 1, end)] : last;
            length[i] = next - last;
            last = next;
        }
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
        look_at(sequence, span, 1);
    }
};
