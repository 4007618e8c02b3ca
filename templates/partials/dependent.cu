// Programmatic dependent launch (PTX ISA 7.8, griddepcontrol): where the host asks for it, a kernel's
// blocks begin while the kernel before still runs. Every block of every kernel comes by here before it
// reads what a kernel made, and before it writes: so a kernel that is done stands for all before it.
// Weights are there from the start, and batch data before the first step: these may be read earlier.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // From here on the next kernel's blocks may take the place that this one's leave.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
