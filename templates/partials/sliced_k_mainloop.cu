    // Mainloop of a warpgroup, followed by the sum over both warpgroups in `reduced`. The code uses variables of the other sliced_k
    // partials.
    float acc[ACCUMULATORS];
#pragma unroll
    for (int i = 0; i < WARPGROUP_STEPS; ++i) {
        if (!EVEN && i >= own) break;
        const int step = begin + i;
        barrier_wait(full + (STEPS + step) * 8, 0);
        const unsigned long long x_desc = matrix_descriptor(tokens + step * X_BYTES);
        warpgroup_arrive();
        if (i >= FROM_SHARED) {
#pragma unroll
            for (int k = 0; k < BLOCK_K / 16; ++k) warpgroup_mma(acc, resident[i < FROM_SHARED ? 0 : i - FROM_SHARED][k], x_desc + k * 2, i > 0 || k > 0);
        } else {
            barrier_wait(full + step * 8, 0);
            const unsigned long long weight_desc = matrix_descriptor(weights + step * WEIGHT_BYTES);
#pragma unroll
            for (int k = 0; k < BLOCK_K / 16; ++k) warpgroup_mma(acc, weight_desc + k * 2, x_desc + k * 2, i > 0 || k > 0);
        }
        warpgroup_commit();
    }
    warpgroup_wait<0>();
    // Each warpgroup finishes half of the octets (groups of 8 tokens). It sends its accumulators of the remaining octets to the other
    // warpgroup, through the shared memory that held the sender's weights.
    warpgroup_sync(is_first ? 1 : 2);
    const unsigned int send_to = weights + begin * WEIGHT_BYTES + thread * 16;
    const unsigned int receive_from = weights + (is_first ? first_steps : 0) * WEIGHT_BYTES + thread * 16;
    // In some kernels, gamma and beta follow the tokens as one more octet. Both warpgroups need the sums of this octet.
    auto acc_at = [&](int octet, int e) { return octet * 4 + e < ACCUMULATORS ? acc[octet * 4 + e] : 0.0f; };
    auto lower = [](int i) { return i < HALF ? i : ROW_OCTETS + i - HALF; };
    auto upper = [](int i) { return i < HALF ? HALF + i : ROW_OCTETS + i - HALF; };
    float reduced[EXCHANGED][4];
#pragma unroll
    for (int i = 0; i < EXCHANGED; ++i) {
        float sent[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float low = acc_at(lower(i), e), high = acc_at(upper(i), e);
            sent[e] = is_first ? high : low;
            reduced[i][e] = is_first ? low : high;
        }
        store_four(send_to + i * PARTIAL_BYTES, sent[0], sent[1], sent[2], sent[3]);
    }
    named_barrier_sync<256>(3);
#pragma unroll
    for (int i = 0; i < EXCHANGED; ++i) {
        float more[4];
        load_four(more, receive_from + i * PARTIAL_BYTES);
#pragma unroll
        for (int e = 0; e < 4; ++e) reduced[i][e] += more[e];
    }
