    // Tokens are shared out evenly among the tiles, in eights: rows past the last take longer to copy than others, and
    // a tile that is not full copies some of the next one's instead. What they add to is not stored.
    const unsigned int tile = blockIdx.x / SPLITS % TILES_N;  // of the weight
    const int tiles = gridDim.x / (TILES_N * SPLITS), each = ((static_cast<int>(rows) + tiles - 1) / tiles + 7) / 8 * 8;
    const int row = tile * BLOCK_N, first_token = blockIdx.x / (TILES_N * SPLITS) * each;  // of weight and of x
    const int here = min(static_cast<int>(rows) - first_token, each);
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    auto ask_for_weights = [&](int first, int steps) {
        for (int step = lane; step < steps; step += 32) barrier_init(full + step * 8, 1);
        fence_barriers();
        __syncwarp();
        for (int step = lane; step < steps; step += 32) {
            barrier_arrive_expecting(full + step * 8, WEIGHT_BYTES + ROWS * 128);
            load_box(weights + step * WEIGHT_BYTES, weight, (first + step) * BLOCK_K, row, full + step * 8);
        }
    };
    auto ask_for_tokens = [&](const TensorMap& of, int first, int steps) {
        for (int step = lane; step < steps; step += 32)
            load_box(tokens + step * X_BYTES, of, (first + step) * BLOCK_K, first_token, full + step * 8);
    };
