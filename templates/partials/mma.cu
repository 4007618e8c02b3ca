// Warp-wide matrix fragments (PTX ISA: ldmatrix, mma.m16n8k16). Lane l has g = l / 4 and t = l % 4. Positions are (row, first column).
//   A [16, 16]: a0 (g, 2t), a1 (g + 8, 2t), a2 (g, 2t + 8), a3 (g + 8, 2t + 8), two columns each
//   B [8, 16], one row per output column: b0 (g, 2t), b1 (g, 2t + 8), two columns each
//   C [16, 8]: c0, c1 (g, 2t), c2, c3 (g + 8, 2t), one column each

// Loads four 8×8 matrices of 16-bit elements. Lanes 8i .. 8i + 7 provide the addresses of the rows of matrix i. Each lane gets the
// pair (g, 2t) of matrix i in to[i].
__device__ __forceinline__ void load_matrices(unsigned int (&to)[4], unsigned int address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address));
}

// c += a · bᵀ
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const unsigned int (&a)[4],
                                    unsigned int b0, unsigned int b1);
template <>
__device__ __forceinline__ void mma<f16>(float (&c)[4], const unsigned int (&a)[4],
                                         unsigned int b0, unsigned int b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<bf16>(float (&c)[4], const unsigned int (&a)[4],
                                          unsigned int b0, unsigned int b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
