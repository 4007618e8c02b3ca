// Starts copying (cp.async) the first `bytes` of 16 bytes. The remaining bytes become zeros and are not read. Both addresses are multiples
// of 16.
__device__ __forceinline__ void copy_bytes(unsigned int to, const Element* from, unsigned int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Starts copying 16 bytes. If not `inside`, writes zeros and reads nothing. `readable` is any readable address.
__device__ __forceinline__ void copy_chunk(unsigned int to, const Element* from, bool inside, const Element* readable) {
    copy_bytes(to, inside ? from : readable, inside ? 16 : 0);
}
