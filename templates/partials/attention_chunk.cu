// Starts copying the first `bytes` of 16, both addresses multiples of 16; the others become zeros,
// and are not read.
__device__ __forceinline__ void copy_bytes(unsigned int to, const Element* from, unsigned int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Starts copying 16 bytes; zeros, and nothing read, where not `inside`. `readable` is any address
// that may be read.
__device__ __forceinline__ void copy_chunk(unsigned int to, const Element* from, bool inside, const Element* readable) {
    copy_bytes(to, inside ? from : readable, inside ? 16 : 0);
}
