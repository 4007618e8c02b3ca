// Blocks of a cluster that exchange values through each other's shared memory (PTX ISA 8).

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ unsigned int rank_in_cluster() {
    unsigned int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The address, in the shared memory of the block of this rank, of what lies at `address` here.
__device__ __forceinline__ unsigned int address_at(unsigned int rank, unsigned int address) {
    unsigned int mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// Sends two values to a block of the cluster; eight bytes of those that its barrier expects.
__device__ __forceinline__ void send_pair(unsigned int to, float a, float b, unsigned int barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], { %1, %2 }, [%3];" ::"r"(to),
                 "f"(a), "f"(b), "r"(barrier)
                 : "memory");
}

// As barrier_wait, for what other blocks of the cluster have sent.
__device__ __forceinline__ void barrier_wait_for_cluster(unsigned int barrier, unsigned int parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier), "r"(parity)
                 : "memory");
}

// Four 8×8 matrices from shared memory, as store_matrices writes them.
__device__ __forceinline__ void load_matrices(unsigned int address, unsigned int (&pair)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(pair[0]), "=r"(pair[1]), "=r"(pair[2]), "=r"(pair[3])
                 : "r"(address)
                 : "memory");
}
