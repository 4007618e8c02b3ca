// Programmatic dependent launch (PTX ISA 7.8, griddepcontrol). If the host requests it, the CTAs of a kernel start while the previous
// kernel still runs. Every CTA of every kernel executes griddepcontrol.wait before it writes anything and before it reads data that another
// kernel has written. If a kernel is complete, all kernels before it are therefore complete, too. Weights and batch data are written before
// the first kernel, and may be read before the wait.

// Triggers the launch of the dependent kernel, which starts once all CTAs of this kernel have triggered or exited. If the trigger is too
// early, the CTAs of the dependent kernel crowd onto the few SMs with room for them. A good place for the trigger is after the mainloop. If
// a CTA leaves no room for another CTA on its SM, a trigger before its last load has no benefit.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // With at most this number of CTAs, most SMs are idle, and the dependent kernel can prefetch its weights there.
    constexpr unsigned int FEW_CTAS = 32;
    if (gridDim.x * gridDim.y <= FEW_CTAS) griddepcontrol_launch_dependents();
#endif
}
