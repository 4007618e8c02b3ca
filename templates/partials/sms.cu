// Returns the number of SM identifiers (PTX ISA: %nsmid), an upper bound of the number of SMs.
__device__ __forceinline__ unsigned int sm_count() {
    unsigned int count;
    asm("mov.u32 %0, %%nsmid;" : "=r"(count));
    return count;
}
