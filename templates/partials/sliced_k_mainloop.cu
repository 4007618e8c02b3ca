    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < GROUP_STEPS; ++i) {
        if (!EVEN && i >= own) break;
        const int step = begin + i;
        barrier_wait(full + (STEPS + step) * 8, 0);
        const unsigned long long of_tokens = matrix_descriptor(tokens + step * X_BYTES);
        products_begin();
        if (i >= UNHELD) {
#pragma unroll
            for (int k = 0; k < BLOCK_K / 16; ++k) multiply_add(sums, held[i < UNHELD ? 0 : i - UNHELD][k], of_tokens + k * 2, i > 0 || k > 0);
        } else {
            barrier_wait(full + step * 8, 0);
            const unsigned long long of_weights = matrix_descriptor(weights + step * WEIGHT_BYTES);
#pragma unroll
            for (int k = 0; k < BLOCK_K / 16; ++k) multiply_add(sums, of_weights + k * 2, of_tokens + k * 2, i > 0 || k > 0);
        }
        products_commit();
    }
    products_wait<0>();
    // Each warpgroup finishes half of the eights of tokens, and passes on its sums of the others where its own weights were.
    warpgroup_sync(is_first ? 1 : 2);
    const unsigned int passes = weights + begin * WEIGHT_BYTES + thread * 16;
    const unsigned int receives = weights + (is_first ? of_first : 0) * WEIGHT_BYTES + thread * 16;
    // Of gamma and beta, where they come with the rows, both warpgroups need all.
    auto sum_of = [&](int eight, int e) { return eight * 4 + e < SUMS ? sums[eight * 4 + e] : 0.0f; };
    auto lower = [](int i) { return i < HALF ? i : EIGHTS + i - HALF; };
    auto upper = [](int i) { return i < HALF ? HALF + i : EIGHTS + i - HALF; };
    float mine[PASSED][4];
#pragma unroll
    for (int i = 0; i < PASSED; ++i) {
        float given[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float low = sum_of(lower(i), e), high = sum_of(upper(i), e);
            given[e] = is_first ? high : low;
            mine[i][e] = is_first ? low : high;
        }
        store_four(passes + i * PART_BYTES, given[0], given[1], given[2], given[3]);
    }
    sync_of<256>(3);
#pragma unroll
    for (int i = 0; i < PASSED; ++i) {
        float more[4];
        load_four(more, receives + i * PART_BYTES);
#pragma unroll
        for (int e = 0; e < 4; ++e) mine[i][e] += more[e];
    }
