// Programmatic dependent launch (PTX ISA 7.8, griddepcontrol): if the host requests it, a kernel's CTAs start while the previous
// kernel still runs. Every CTA of every kernel executes griddepcontrol.wait before it writes, or reads data written by a kernel, so
// a completed kernel implies that all kernels before it are complete. Weights and batch data are written before the first kernel and
// may be read before the wait.

// Triggers the launch of the dependent kernel, which starts once all CTAs of this one have triggered or exited. If triggered too
// early, its CTAs crowd onto the few SMs with room for them; after the mainloop is a good place. If a CTA leaves no room for
// another one on its SM, a trigger before its last load has no benefit.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // So few CTAs leave most SMs idle, where the dependent kernel can prefetch its weights.
    constexpr unsigned int FEW_CTAS = 32;
    if (gridDim.x * gridDim.y <= FEW_CTAS) griddepcontrol_launch_dependents();
#endif
}
