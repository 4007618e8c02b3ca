// CTAs of a cluster and distributed shared memory (PTX ISA 8: mapa, st.async, barrier.cluster).

{% include "partials/cluster_barrier.cu" %}
// Stores 16 bytes in the shared memory of a CTA of the cluster. `barrier` is in the same CTA and counts them as transaction bytes.
__device__ __forceinline__ void store_remote(unsigned int to, float a, float b, float c, float d, unsigned int barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], { %1, %2, %3, %4 }, [%5];" ::"r"(to),
                 "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
                 : "memory");
}

// Like the overload above, but stores 8 bytes.
__device__ __forceinline__ void store_remote(unsigned int to, float a, float b, unsigned int barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], { %1, %2 }, [%3];" ::"r"(to),
                 "f"(a), "f"(b), "r"(barrier)
                 : "memory");
}

// Like barrier_wait, but with acquire semantics for the stores of other CTAs of the cluster.
__device__ __forceinline__ void barrier_wait_for_cluster(unsigned int barrier, unsigned int parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier), "r"(parity)
                 : "memory");
}

// Arrives at a barrier of another CTA of the cluster. The instruction has no explicit `.release.cluster`, which would compile to a
// device-wide fence. A release is not needed, because no writes have to become visible.
__device__ __forceinline__ void barrier_arrive_remote(unsigned int barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// TMA multicast: like load_box, but to the same address in every CTA of `cta_mask`. The barrier of each CTA counts the bytes.
__device__ __forceinline__ void load_box_multicast(unsigned int to, const TensorMap& from, int column, int row,
                                                 unsigned int barrier, unsigned short cta_mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, { %2, %3 }], [%4], %5;" ::"r"(to), "l"(&from), "r"(column), "r"(row), "r"(barrier),
                 "h"(cta_mask)
                 : "memory");
}
