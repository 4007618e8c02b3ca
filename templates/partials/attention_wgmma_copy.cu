// Copies by all threads of a block, for attention by warpgroup products (cp.async). Against boxes that one thread
// asks the tensor memory accelerator for, rows beyond a sequence's end are zeros and not read, so that no values are to
// be cleared, and no map has to be looked up before a block's first copy.

// Starts copying N rows, `stride` elements apart, to swizzled rows in shared memory; those from `valid` on become zeros.
// A thread has one chunk of some rows, of every box: all its addresses are one and constants.
template <unsigned int N>
__device__ __forceinline__ void copy_rows(unsigned int to, const Element* from, unsigned int stride, unsigned int valid) {
    constexpr unsigned int CHUNKS = ROW_BYTES / 16;  // of a row of a box
#pragma unroll
    for (unsigned int step = 0; step < N * CHUNKS; step += 128) {
        const unsigned int i = step + threadIdx.x, row = i / CHUNKS, chunk = i % CHUNKS;
        if (N * CHUNKS % 128 != 0 && i >= N * CHUNKS) continue;
#pragma unroll
        for (unsigned int box = 0; box < BOXES; ++box) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + swizzled<N>(row, box * CHUNKS + chunk)),
                         "l"(from + row * stride + box * COLUMNS + chunk * 8), "r"(row < valid ? 16 : 0)
                         : "memory");
        }
    }
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All threads' copies but those of the last PENDING groups are there, for products to read.
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
    fence_for_copies();
    __syncthreads();
}
