// Hopper's TMA, mbarriers and warpgroup MMAs (PTX ISA 8: cp.async.bulk.tensor, mbarrier, wgmma).

// A tensor map encoded by the host. It contains the address, the extents, and the box that one copy transfers.
struct alignas(64) TensorMap { unsigned long long opaque[16]; };

// Prefetches a tensor map, so that the first copy does not wait for it.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ unsigned int shared_address(const void* pointer) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(pointer));
}

// Initializes an mbarrier. A phase completes after `arrivals` arrivals and all expected transaction bytes.
__device__ __forceinline__ void barrier_init(unsigned int barrier, unsigned int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned int barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expecting(unsigned int barrier, unsigned int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Waits until the phase with this parity is complete. The barrier may be at most one phase ahead of the waiting thread.
__device__ __forceinline__ void barrier_wait(unsigned int barrier, unsigned int parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier), "r"(parity)
                 : "memory");
}

// Makes initialized barriers visible to the async proxy and the cluster.
__device__ __forceinline__ void fence_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// TMA load of the box at (column, row) to shared memory; out-of-bounds elements become zero.
__device__ __forceinline__ void load_box(unsigned int to, const TensorMap& from, int column, int row,
                                         unsigned int barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, { %2, %3 }], [%4];" ::"r"(to), "l"(&from), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}

// TMA store of a box from shared memory to (column, row); out-of-bounds elements are not written.
__device__ __forceinline__ void store_box(const TensorMap& to, int column, int row, unsigned int from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, { %1, %2 }], [%3];" ::"l"(&to),
                 "r"(column), "r"(row), "r"(from)
                 : "memory");
}

__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's committed groups of stores, except the last PENDING groups, have read shared memory.
template <int PENDING> __device__ __forceinline__ void wait_for_stores() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Makes earlier generic-proxy writes to shared memory visible to the async proxy (TMA, wgmma).
__device__ __forceinline__ void fence_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Synchronizes a warpgroup on a named barrier. Barrier 0 is used by __syncthreads.
__device__ __forceinline__ void warpgroup_sync(int barrier) {
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}

template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// wgmma descriptor of a K-major operand: rows of 64 16-bit elements with the 128-byte swizzle. `address` is aligned to eight rows, which
// are 1024 bytes. A step of 16 elements along k adds 2 to the descriptor.
__device__ __forceinline__ unsigned long long matrix_descriptor(unsigned int address) {
    constexpr unsigned long long SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = 1024 >> 4;
    return SWIZZLE_128 | EIGHT_ROWS << 32 | 1ull << 16 | (address & 0x3ffff) >> 4;
}

// Stores four 8×8 matrices to shared memory. Lanes 8i .. 8i + 7 provide the addresses of the rows of matrix i.
__device__ __forceinline__ void store_matrices(unsigned int address, unsigned int a, unsigned int b,
                                               unsigned int c, unsigned int d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };" ::"r"(address), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}
