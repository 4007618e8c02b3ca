    // Moves the weights of this warpgroup's last RESIDENT steps to registers as they arrive. The code uses variables of sliced_k_prologue.
    const int begin = is_first ? 0 : first_steps, own = is_first ? first_steps : steps - first_steps;
    unsigned int resident[RESIDENT][BLOCK_K / 16][4];
#pragma unroll
    for (int i = 0; i < RESIDENT; ++i) {
        if (!EVEN && FROM_SHARED + i >= own) break;
        const int step = begin + FROM_SHARED + i;
        barrier_wait(full + step * 8, 0);
        const int at = quarter * 16 + lane % 16;  // weight row
#pragma unroll
        for (int k = 0; k < BLOCK_K / 16; ++k)
            load_matrices(resident[i][k], weights + step * WEIGHT_BYTES + at * 128 + ((k * 2 + lane / 16) ^ at % 8) * 16);
    }
    if (UNALIASED_STEPS < STEPS && !is_first) named_barrier_arrive<{{ threads }} - 128>(7);  // from now on, x may overwrite these weights
