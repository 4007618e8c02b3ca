// o += p · v for M_TILES times 16 queries, whose weights of 16 keys are `a`, and the rows of these
// keys from the shared address `values` on.
__device__ __forceinline__ void multiply_values(float (&o)[M_TILES][HEAD / 8][4], const unsigned int (&a)[M_TILES][4],
                                                unsigned int values) {
    const unsigned int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < ROW / 16; ++i) {
        unsigned int b[4];
        load_transposed(b, values + value_row(lane) + i * 32);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            multiply_add(o[m][i * 2], a[m], b[0], b[1]);
            if (i * 2 + 1 < HEAD / 8) multiply_add(o[m][i * 2 + 1], a[m], b[2], b[3]);
        }
    }
}
