// Programmatic dependent launch (PTX ISA 7.8, griddepcontrol): where the host asks for it, a kernel's
// blocks begin while the kernel before still runs. Every block of every kernel comes by here before it
// reads what a kernel made, and before it writes: so a kernel that is done stands for all before it.
// Weights are there from the start, and batch data before the first step: these may be read earlier.

// Lets the next kernel's blocks begin, as soon as all blocks of this one came by here or have ended.
// Too early and they crowd onto the few multiprocessors that are free by then; after the products is
// a good place, and none at all where a block leaves no room beside it.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // So few blocks leave most multiprocessors to the next kernel, whose weights are then on their way.
    constexpr unsigned int FEW_BLOCKS = 32;
    if (gridDim.x * gridDim.y <= FEW_BLOCKS) let_next_kernel_begin();
#endif
}
