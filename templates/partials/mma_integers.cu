// Two 8-bit integers that are adjacent along k. Fragments are laid out as for 16-bit elements, with a pair in place of each element. An MMA
// covers 32 columns along k (PTX ISA: mma.m16n8k32).
struct alignas(2) Int8Pair { unsigned short bits; };

// c += a · bᵀ. Elements of a are signed, and those of b are unsigned.
template <typename T>
__device__ __forceinline__ void mma(int (&c)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1) {
    static_assert(sizeof(T) == 2, "fragments of pairs");
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 "
        "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
