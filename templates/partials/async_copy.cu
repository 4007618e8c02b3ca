// Asynchronous copies from global to shared memory (cp.async, sm_80 and later).
__device__ __forceinline__ unsigned int shared_address(const void* pointer) {
    unsigned int address;
    asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }"
        : "=r"(address) : "l"(pointer));
    return address;
}

// Copies BYTES bytes. Both addresses are aligned to BYTES. If not `inside`, writes zeros and reads nothing. cp.async copies at least 4
// bytes, so 2 bytes are copied synchronously.
template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned int to, const void* from, bool inside) {
    static_assert(BYTES == 2 || BYTES == 4 || BYTES == 8 || BYTES == 16, "widths of a copy");
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
    } else if constexpr (BYTES == 2) {
        const unsigned short value = inside ? *static_cast<const unsigned short*>(from) : 0;
        asm volatile("st.shared.u16 [%0], %1;" :: "r"(to), "h"(value) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     :: "r"(to), "l"(from), "n"(BYTES), "r"(inside ? BYTES : 0) : "memory");
    }
}

// Commits this thread's copies as a group. The group may be empty.
__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the last PENDING groups of this thread are in flight.
template <int PENDING> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}
