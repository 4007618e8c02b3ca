// SMs of the card that runs, as the number of their identifiers (PTX ISA: %nsmid), which is never below it.
__device__ __forceinline__ unsigned int sm_count() {
    unsigned int count;
    asm("mov.u32 %0, %%nsmid;" : "=r"(count));
    return count;
}
