// Programmatic dependent launch (PTX ISA 7.8, griddepcontrol). If the host requests it, the CTAs of a kernel start while the previous
// kernel still runs. Every CTA of every kernel executes griddepcontrol.wait before it writes, or reads data written by a kernel. The
// completion of a kernel therefore implies that all kernels before it are complete. Weights and batch data are written before the first
// kernel, and may be read before the wait.

// Triggers the launch of the dependent kernel, which starts once all CTAs of this kernel have triggered or exited. After a trigger that is
// too early, the CTAs of the dependent kernel crowd onto the few SMs with room for them. After the mainloop is a good place. If a CTA
// leaves no room for another CTA on its SM, triggering before its last load has no benefit.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // With at most this many CTAs, most SMs are idle, and the dependent kernel can prefetch its weights there.
    constexpr unsigned int FEW_CTAS = 32;
    if (gridDim.x * gridDim.y <= FEW_CTAS) griddepcontrol_launch_dependents();
#endif
}
