// Transposes an 8 × 8 matrix of 16-bit elements over a warp. Each lane holds two neighboring elements of a row.
__device__ __forceinline__ unsigned int transposed(unsigned int pair) {
    unsigned int to;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(pair));
    return to;
}
