// o += p · v over 16 keys for M_TILES · 16 queries. The rows of V begin at shared address `values`; `p` holds A fragments.
__device__ __forceinline__ void mma_pv(float (&o)[M_TILES][HEAD / 8][4], const unsigned int (&p)[M_TILES][4],
                                       unsigned int values) {
    const unsigned int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < ROW / 16; ++i) {
        unsigned int b[4];
        ldmatrix_trans(b, values + value_row(lane) + i * 32);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            mma(o[m][i * 2], p[m], b[0], b[1]);
            if (i * 2 + 1 < HEAD / 8) mma(o[m][i * 2 + 1], p[m], b[2], b[3]);
        }
    }
}
