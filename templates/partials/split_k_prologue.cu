    extern __shared__ unsigned char shared[];
    __shared__ alignas(8) unsigned long long barriers[STEPS + 1];
    const unsigned int weights = (shared_address(shared) + 1023) / 1024 * 1024;
    const unsigned int tokens = weights + STEPS * WEIGHT_BYTES;
    const unsigned int partials = tokens + STEPS * X_BYTES;  // accumulators [OWNED][SPLITS] of the octets that this CTA finishes
    const unsigned int full = shared_address(barriers);      // one barrier per step; each step is loaded once
    const unsigned int arrived = full + STEPS * 8;           // barrier for the partials that the cluster sends

    const unsigned int rank = blockIdx.x % SPLITS, tile = blockIdx.x / SPLITS;
    const int row = tile % TILES_N * BLOCK_N, first_token = tile / TILES_N * TOKENS;  // first rows of the tile in the weight and in x
    const int n_tokens = min(static_cast<int>(rows) - first_token, TOKENS);
    const int octets = (n_tokens + 7) / 8;
    const int first = rank * K_STEPS / SPLITS, steps = (rank + 1) * K_STEPS / SPLITS - first;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

    // All of a CTA's weights are loaded at once, before griddepcontrol.wait.
    if (warp == 0) {
        if (lane == 0) prefetch_map(x);
        for (int step = lane; step < steps; step += 32) barrier_init(full + step * 8, 1);
        fence_barriers();
        __syncwarp();
        for (int step = lane; step < steps; step += 32) {
            barrier_arrive_expecting(full + step * 8, WEIGHT_BYTES + X_BYTES);
            load_box(weights + step * WEIGHT_BYTES, weight, (first + step) * BLOCK_K, row, full + step * 8);
        }
    } else if (SPLITS > 1 && warp == 1 && lane == 0) {
        barrier_init(arrived, 1);
        fence_barriers();
        const unsigned int owned = octets > static_cast<int>(rank) ? (octets - rank + SPLITS - 1) / SPLITS : 0;
        barrier_arrive_expecting(arrived, owned * SPLITS * PARTIAL_BYTES);
    }
    float lane_bias[2] = {};
    const int my_row = row + warp * 16 + lane / 4;  // this lane has weight rows my_row and my_row + 8
{% if bias %}
#pragma unroll
    for (int e = 0; e < 2; ++e) lane_bias[e] = my_row + e * 8 < N ? to_float(bias[my_row + e * 8]) : 0.0f;
{% endif %}
    // The dependent kernel can now prefetch its weights. With split-K, trigger after griddepcontrol.wait: in measurements, clusters were
    // slower if CTAs of two other kernels ran at the same time.
    if (SPLITS == 1) griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (SPLITS > 1) griddepcontrol_launch_dependents();
    if (warp == 0) {
        for (int step = lane; step < steps; step += 32)
            load_box(tokens + step * X_BYTES, x, (first + step) * BLOCK_K, first_token, full + step * 8);
    }
    __syncthreads();
    if (SPLITS > 1) cluster_arrive();
