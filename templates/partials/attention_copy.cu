__device__ __forceinline__ unsigned int shared_address(const void* pointer) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(pointer));
}

// Starts copying (cp.async) rows first .. first + rows of a sequence whose row 0 is at `source`. Rows from `length` on become zeros. For
// these rows, the copy reads nothing, but needs a valid address, which is `source`.
template <unsigned long long STRIDE>
__device__ __forceinline__ void copy_rows(unsigned int to, const Element* source,
                                          unsigned int first, unsigned int rows,
                                          unsigned int length) {
#pragma unroll 4
    for (unsigned int i = threadIdx.x; i < rows * ROW_CHUNKS; i += THREADS) {
        const unsigned int row = i / ROW_CHUNKS;
        const unsigned int chunk = i % ROW_CHUNKS;
        const bool inside = first + row < length && chunk < HEAD_CHUNKS;
        const Element* from = inside ? source + (first + row) * STRIDE + chunk * PER_CHUNK : source;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + row * PITCH + chunk * 16),
                     "l"(from), "r"(inside ? 16 : 0)
                     : "memory");
    }
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the last PENDING committed groups of this thread are in flight.
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
