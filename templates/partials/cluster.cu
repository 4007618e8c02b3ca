// Blocks of a cluster and each other's shared memory (PTX ISA 8: mapa, st.async, barrier.cluster).

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ unsigned int rank_in_cluster() {
    unsigned int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The same place in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ unsigned int address_in(unsigned int address, unsigned int rank) {
    unsigned int remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// Stores 16 bytes in a block of the cluster and counts them on a barrier of that block.
__device__ __forceinline__ void store_remote(unsigned int to, float a, float b, float c, float d, unsigned int barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], { %1, %2, %3, %4 }, [%5];" ::"r"(to),
                 "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
                 : "memory");
}

// As store_remote, 8 bytes.
__device__ __forceinline__ void store_remote(unsigned int to, float a, float b, unsigned int barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], { %1, %2 }, [%3];" ::"r"(to),
                 "f"(a), "f"(b), "r"(barrier)
                 : "memory");
}

// As barrier_wait, for what other blocks of the cluster have stored.
__device__ __forceinline__ void barrier_wait_for_cluster(unsigned int barrier, unsigned int parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier), "r"(parity)
                 : "memory");
}

// Arrives at a barrier of another block of the cluster. It publishes nothing: `.release.cluster` would be a fence of the
// whole device.
__device__ __forceinline__ void barrier_arrive_in(unsigned int barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// As load_box, to the same place in every block whose bit is set, each of which counts the bytes on its own barrier.
__device__ __forceinline__ void load_box_for_all(unsigned int to, const TensorMap& from, int column, int row,
                                                 unsigned int barrier, unsigned short blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, { %2, %3 }], [%4], %5;" ::"r"(to), "l"(&from), "r"(column), "r"(row), "r"(barrier),
                 "h"(blocks)
                 : "memory");
}
