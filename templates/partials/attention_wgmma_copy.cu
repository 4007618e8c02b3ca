// Copies by all threads of a block, for attention by warpgroup products (cp.async). The first rows are there
// 2000 cycles earlier than by the tensor memory accelerator, which looks up a map of each launch first, and rows
// beyond a sequence's end, which are zeros, are not read.
constexpr unsigned int CHUNKS = HEAD / 8;  // 16 bytes each, of a row of a head

// Starts copying N rows, `stride` elements apart, to swizzled rows in shared memory; those from `valid` on become zeros.
template <unsigned int N>
__device__ __forceinline__ void copy_rows(unsigned int to, const Element* from, unsigned int stride, unsigned int valid) {
#pragma unroll
    for (unsigned int step = 0; step < N * CHUNKS; step += 128) {
        const unsigned int i = step + threadIdx.x;
        if (N * CHUNKS % 128 != 0 && i >= N * CHUNKS) continue;
        const unsigned int row = i / CHUNKS, chunk = i % CHUNKS;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + swizzled<N>(row, chunk)),
                     "l"(from + row * stride + chunk * 8), "r"(row < valid ? 16 : 0)
                     : "memory");
    }
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All threads' copies but those of the last PENDING groups are there, for products to read.
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
    fence_for_copies();
    __syncthreads();
}

// Asks for a block's share of all operands, that they are on their way from memory while blocks look for their
// tiles. Nothing is read: where the kernel before still writes them, they are in L2 already.
__device__ __forceinline__ void prefetch_share(const Element* q, const Element* k, const Element* v, unsigned int batch) {
    constexpr unsigned int LINES = (HEADS * HEAD * 2 + 127) / 128;     // of a row
    const unsigned int tokens = (gridDim.x / HEADS - batch) * ROWS;    // at least so many
    for (unsigned int i = blockIdx.x * 128 + threadIdx.x; i < tokens * 3 * LINES; i += gridDim.x * 128) {
        const unsigned int token = i / (3 * LINES), operand = i / LINES % 3, line = i % LINES;
        const Element* row = operand == 0 ? q + token * Q_STRIDE + {{ q_column }}
            : operand == 1                ? k + token * K_STRIDE + {{ k_column }}
                                          : v + token * V_STRIDE + {{ v_column }};
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + line * 64) : "memory");
    }
}
