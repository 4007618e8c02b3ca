// s += q · kᵀ for 16 queries and KEYS keys. The rows of queries and keys begin at the given shared-memory addresses.
__device__ __forceinline__ void mma_qk(float (&s)[KEYS / 8][4], unsigned int queries, unsigned int keys) {
    const unsigned int lane = threadIdx.x % 32;
#pragma unroll
    for (int k_step = 0; k_step < ROW / 16; ++k_step) {
        unsigned int a[4];
        ldmatrix(a, queries + query_row(lane) + k_step * 32);
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) {
            unsigned int b[4];
            ldmatrix(b, keys + i * 16 * PITCH + key_row(lane) + k_step * 32);
            mma(s[i * 2], a, b[0], b[1]);
            mma(s[i * 2 + 1], a, b[2], b[3]);
        }
    }
}
