    float sums[SUMS];
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        barrier_wait(full + step * 8, 0);
        const unsigned long long of_weights = matrix_descriptor(weights + step * WEIGHT_BYTES);
        const unsigned long long of_tokens = matrix_descriptor(tokens + step * X_BYTES);
        products_begin();
#pragma unroll
        for (int k = 0; k < BLOCK_K / 16; ++k)
            multiply_add(sums, of_weights + k * 2, of_tokens + k * 2, step > 0 || k > 0);
        products_commit();
    }
    if (SPLITS > 1) cluster_wait();
    products_wait<0>();
