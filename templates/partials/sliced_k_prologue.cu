    const unsigned int tile = blockIdx.x / SPLITS % TILES_N;  // of the weight
    const int row = tile * BLOCK_N;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const int thread = threadIdx.x % 128, quarter = warp % 4;  // in a warpgroup
    const bool is_first = warp < 4;                            // of the two that multiply
    const int first_steps = EVEN ? STEPS / 2 : (steps + 1) / 2;   // its steps
    // What both warpgroups need first comes first.
    auto step_of = [&](int nth) { return nth % 2 * first_steps + nth / 2; };
    // All of a block's weights are asked for at once, before anything else, and before the kernel that makes x is done.
    // One barrier a step for weights, then one a step for x. By one lane: of several, tokens_per_tile is a turn of a loop.
    if (warp == PRODUCER_WARP && lane == 0) {
#pragma unroll
        for (int step = 0; step < 2 * STEPS; ++step) barrier_init(full + step * 8, 1);
        fence_barriers();
#pragma unroll
        for (int nth = 0; nth < STEPS; ++nth) {
            if (!EVEN && nth >= steps) break;
            const int step = step_of(nth);
            const unsigned int barrier = full + step * 8;
            barrier_arrive_expecting(barrier, WEIGHT_BYTES);
            load_box(weights + step * WEIGHT_BYTES, weight, (first + step) * BLOCK_K, row, barrier);
        }
    }
    __syncwarp();
    // Tokens are shared out evenly among the tiles, in octets: rows past the last take longer to copy than others, and
    // a tile that is not full copies some of the next one's instead. What they accumulate to is not stored.
    const int tiles = gridDim.x / (TILES_N * SPLITS), tokens_per_tile = ((static_cast<int>(rows) + tiles - 1) / tiles + 7) / 8 * 8;
    const int first_token = blockIdx.x / (TILES_N * SPLITS) * tokens_per_tile;  // of x
    const int n_tokens = min(static_cast<int>(rows) - first_token, tokens_per_tile);
    auto load_tokens = [&](const TensorMap& of) {
        if (lane == 0) {
#pragma unroll
            for (int nth = 0; nth < STEPS; ++nth) {
                if (!EVEN && nth >= steps) break;
                const int step = step_of(nth);
                const unsigned int barrier = full + (STEPS + step) * 8;
                barrier_arrive_expecting(barrier, ROWS * 128);
                load_box(tokens + step * X_BYTES, of, (first + step) * BLOCK_K, first_token, barrier);
            }
        }
        __syncwarp();
    };
