// Starts copying 16 bytes, both addresses multiples of 16; zeros, and nothing read, where not
// `inside`. `readable` is any address that may be read.
__device__ __forceinline__ void copy_chunk(unsigned int to, const Element* from, bool inside, const Element* readable) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(inside ? from : readable),
                 "r"(inside ? 16 : 0)
                 : "memory");
}
