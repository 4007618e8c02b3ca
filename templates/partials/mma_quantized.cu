// Two E4M3 elements that are adjacent along k. Fragments are laid out as for 16-bit elements, with a pair in place of each element. An MMA
// covers 32 columns along k (PTX ISA 8.4: mma.m16n8k32, sm_89 and later).
struct alignas(2) E4m3Pair { unsigned short bits; };

template <>
__device__ __forceinline__ void mma<E4m3Pair>(float (&c)[4], const unsigned int (&a)[4],
                                              unsigned int b0, unsigned int b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
        "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
