    // The weights of this warpgroup's steps go to registers as they come.
    const int begin = is_first ? 0 : of_first, own = is_first ? of_first : steps - of_first;
    unsigned int held[HELD][BLOCK_K / 16][4];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        if (!EVEN && UNHELD + i >= own) break;
        const int step = begin + UNHELD + i;
        barrier_wait(full + step * 8, 0);
        const int at = quarter * 16 + lane % 16;  // row
#pragma unroll
        for (int k = 0; k < BLOCK_K / 16; ++k)
            load_matrices(held[i][k], weights + step * WEIGHT_BYTES + at * 128 + ((k * 2 + lane / 16) ^ at % 8) * 16);
    }
    if (BEFORE_X < STEPS && !is_first) arrive_at<{{ threads }} - 128>(7);  // x may come where they were
