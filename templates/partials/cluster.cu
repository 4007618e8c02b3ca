// Blocks of a cluster and each other's shared memory (PTX ISA 8: mapa, st.async, barrier.cluster).

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

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
