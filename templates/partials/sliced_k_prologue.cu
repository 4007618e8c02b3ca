    // The code uses five variables of the including kernel: the first step `first`, the number of `steps`, and the shared-memory addresses
    // `weights`, `tokens` and `full`.
    const unsigned int tile = blockIdx.x / SPLITS % TILES_N;  // column tile
    const int row = tile * BLOCK_N;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const int thread = threadIdx.x % 128, quarter = warp % 4;  // thread and warp within a warpgroup
    const bool is_first = warp < 4;                            // whether this is the first consumer warpgroup
    const int first_steps = EVEN ? STEPS / 2 : (steps + 1) / 2;  // steps of the first warpgroup
    // Loads alternate between the two warpgroups. Each warpgroup's steps are loaded in the order in which it needs them.
    auto step_of = [&](int nth) { return nth % 2 * first_steps + nth / 2; };
    // All of a CTA's weights are loaded at once, before anything else and before griddepcontrol.wait. Each step has one barrier for its
    // weights and another barrier for its part of x. One lane issues all loads, because loads from several lanes would be serialized.
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
    // Octets (groups of 8 tokens) are distributed evenly over the tiles. Loading out-of-bounds rows is slow, so a partial tile loads rows
    // of the next tile instead, and does not store the accumulators of these rows.
    const int tiles = gridDim.x / (TILES_N * SPLITS), tokens_per_tile = ((static_cast<int>(rows) + tiles - 1) / tiles + 7) / 8 * 8;
    const int first_token = blockIdx.x / (TILES_N * SPLITS) * tokens_per_tile;
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
