// The tile of queries of a block, and 16-byte copies of a head's rows into shared memory. A row
// takes ROW_CHUNKS chunks of 16 bytes, of which the first HEAD_CHUNKS come from memory and the rest
// are zeros, plus one that is never touched: with an odd number of chunks in PITCH, the same chunk
// of eight neighbouring rows lies in eight different groups of banks.
constexpr unsigned int PER_CHUNK = 16 / sizeof(Element);
constexpr unsigned int HEAD_CHUNKS = HEAD / PER_CHUNK;
constexpr unsigned int ROW_CHUNKS = ROW / PER_CHUNK;
constexpr unsigned int PITCH = (ROW_CHUNKS + 1) * 16;
static_assert(HEAD % PER_CHUNK == 0, "rows are copied 16 bytes at a time");
static_assert(ROW_CHUNKS % 2 == 0, "an even number of chunks and one more is odd");
static_assert({{ q_aligned }} && {{ k_aligned }} && {{ v_aligned }}, "a row of a head starts at a multiple of 16 bytes");

struct Tile {
    unsigned int start;   // first token of the sequence
    unsigned int length;  // tokens of the sequence
    unsigned int first;   // first query of the tile, counted in the sequence
};

// Tile blockIdx.x. The tiles of sequence b are numbered from start(b) / ROWS + b on. From there to
// the next sequence's number are at least ceil(length / ROWS) numbers, so sequences never overlap,
// at most one number of each is left unused, and no prefix sum over tiles is needed. All warps
// search for themselves, 32 sequences at once (ByteTransformer, figure 7).
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

__device__ __forceinline__ unsigned int shared_address(const void* pointer) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(pointer));
}

// Starts copying rows first .. first + rows of a sequence whose row 0 is at `source`; rows from
// `length` on become zeros. `source` itself is always readable.
template <unsigned long long STRIDE>
__device__ __forceinline__ void copy_rows(unsigned int to, const Element* source,
                                          unsigned int first, unsigned int rows,
                                          unsigned int length) {
#pragma unroll 4
    for (unsigned int i = threadIdx.x; i < rows * ROW_CHUNKS; i += THREADS) {
        const unsigned int row = i / ROW_CHUNKS;
        const unsigned int chunk = i % ROW_CHUNKS;
        const bool inside = first + row < length && chunk < HEAD_CHUNKS;
        const Element* from = inside ? source + (first + row) * STRIDE + chunk * PER_CHUNK : source;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + row * PITCH + chunk * 16),
                     "l"(from), "r"(inside ? 16 : 0)
                     : "memory");
    }
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most PENDING of this thread's committed groups are still under way.
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
