    // Mainloop over all steps of the CTA. The code uses variables of split_k_prologue.
    float acc[ACCUMULATORS];
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        barrier_wait(full + step * 8, 0);
        const unsigned long long weight_desc = matrix_descriptor(weights + step * WEIGHT_BYTES);
        const unsigned long long x_desc = matrix_descriptor(tokens + step * X_BYTES);
        warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < BLOCK_K / 16; ++k)
            warpgroup_mma(acc, weight_desc + k * 2, x_desc + k * 2, step > 0 || k > 0);
        warpgroup_commit();
    }
    if (SPLITS > 1) cluster_wait();
    warpgroup_wait<0>();
