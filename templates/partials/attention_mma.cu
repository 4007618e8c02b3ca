// Fragments and MMAs (mma.m16n8k16) of 16-bit tiles in shared memory. In a 16 × 8 accumulator, lane l holds columns 2·(l mod 4) and
// 2·(l mod 4) + 1 of row l / 4 (elements 0, 1) and of row l / 4 + 8 (elements 2, 3).

// Loads four 8 × 8 matrices. Lane l provides the address of row l mod 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix(unsigned int (&to)[4], unsigned int row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_trans(unsigned int (&to)[4], unsigned int row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// c += a · b, with a of 16 × 16 and b of 16 × 8 elements.
__device__ __forceinline__ void mma(float (&c)[4], const unsigned int (&a)[4], unsigned int b0,
                                    unsigned int b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.{{ storage }}.{{ storage }}.f32 "
        "{ %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Byte offset, within a tile, of the row that a lane passes to ldmatrix for 16 queries × 16 columns. The four matrices are (queries 0-7,
// columns 0-7), (8-15, 0-7), (0-7, 8-15) and (8-15, 8-15).
__device__ __forceinline__ unsigned int query_row(unsigned int lane) {
    return lane % 16 * PITCH + lane / 16 * 16;
}
// Like query_row, but for 16 keys × 16 columns. The four matrices are (keys 0-7, columns 0-7), (0-7, 8-15), (8-15, 0-7) and (8-15, 8-15).
__device__ __forceinline__ unsigned int key_row(unsigned int lane) {
    return (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 16;
}
// Like query_row, but for the values of 16 keys × 16 columns, which ldmatrix transposes. The four matrices are (keys 0-7, columns 0-7),
// (8-15, 0-7), (0-7, 8-15) and (8-15, 8-15).
__device__ __forceinline__ unsigned int value_row(unsigned int lane) {
    return lane % 16 * PITCH + lane / 16 * 16;
}

// Maximum over the four lanes that hold a row of an accumulator.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Sum over the four lanes that hold a row of an accumulator.
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
