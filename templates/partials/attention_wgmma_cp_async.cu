// Loads by all 128 threads of a CTA (cp.async). Unlike TMA, these loads write zeros for rows past the sequence's end, so the tail of V does
// not have to be cleared. The first load does not have to wait for a tensor map.

// Copies N rows, `stride` elements apart, to swizzled rows in shared memory. Rows from `valid` on become zeros. In this loop order, a
// thread copies the same chunk of each of its rows, so that its addresses differ by constants.
template <unsigned int N>
__device__ __forceinline__ void copy_rows(unsigned int to, const Element* from, unsigned int stride, unsigned int valid) {
    constexpr unsigned int CHUNKS = ROW_BYTES / 16;  // 16-byte chunks of a row in a box
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

// Waits for the CTA's copies except the last PENDING groups, and makes them visible to WGMMA.
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
    fence_for_copies();
    __syncthreads();
}
