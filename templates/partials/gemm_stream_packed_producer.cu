    if (warp == CONSUMERS / 32) {
        // Next places to load, of the weight and of x. x follows the weight. The whole warp runs the loops, so that the arguments of
        // copies are in uniform registers: see warp_load_box.
        struct Place { int tile, step; };
        Place at = {first_tile, 0}, of_x = at;
        const auto advance = [&](Place& place) {
            if (++place.step == steps) place.step = 0, place.tile += clusters;
        };
        const auto load_weight = [&](int stage) {
            const unsigned int to = ring + stage * STAGE_BYTES + X_BYTES, barrier = full + stage * 8;
            const int k_stage = first + at.step, row = at.tile / row_tiles * TILE_COLUMNS;
            const int n = min(TILE_COLUMNS, PADDED_ROWS{% if gated %} / 2{% endif %} - row);
            if (lane == 0) barrier_arrive_expecting(barrier, X_BYTES + n * {% if gated %}2 * {% endif %}(2 * ROW_BYTES + SCALES * 4));
#pragma unroll
            for (int part = 0; part < {% if gated %}2{% else %}1{% endif %}; ++part) {
#pragma unroll
                for (int block = 0; block < 2; ++block)
                    warp_copy_bulk(to + (block * BLOCK_N + part * TILE_COLUMNS) * ROW_BYTES,
                                   weight + (static_cast<size_t>(k_stage * 2 + block) * PADDED_ROWS + part * N + row) * ROW_BYTES, n * ROW_BYTES, barrier);
#pragma unroll
                for (int group = 0; group < SCALES; ++group)
                    warp_copy_bulk(to + VALUE_BYTES + (group * BLOCK_N + part * TILE_COLUMNS) * 4,
                                   weight + ALL_VALUES + (static_cast<size_t>(k_stage * SCALES + group) * PADDED_ROWS + part * N + row) * 4, n * 4, barrier);
            }
            advance(at);
        };
        const auto load_x = [&](int stage) {
#pragma unroll
            for (int block = 0; block < 2; ++block)
                warp_load_box(ring + stage * STAGE_BYTES + block * (X_BYTES / 2), x, ((first + of_x.step) * 2 + block) * BLOCK_K,
                         of_x.tile % row_tiles * ROWS, full + stage * 8);
            advance(of_x);
        };
        if (lane == 0) {
            prefetch_map(x);
#pragma unroll
            for (int stage = 0; stage < STAGES; ++stage) {
                barrier_init(full + stage * 8, 1);
                barrier_init(empty + stage * 8, CONSUMERS / 32);
            }
            if (SPLITS > 1) barrier_init(arrived, 1);
            fence_barriers();
            if (SPLITS > 1) {
                const int octets = (min(static_cast<int>(rows) - first_tile % row_tiles * ROWS, ROWS) + 7) / 8;
                const unsigned int owned = octets > static_cast<int>(rank) ? (octets - rank + SPLITS - 1) / SPLITS : 0;
                barrier_arrive_expecting(arrived, owned * SPLITS * PARTIAL_BYTES{% if centred %} + SPLITS * (PARTIAL_BYTES / 4){% endif %});
            }
        }
        __syncwarp();
        // The ring's first weights do not depend on the previous kernel.
#pragma unroll 1
        for (int stage = 0; stage < STAGES; ++stage)
            if (at.tile < tiles) load_weight(stage);
        __syncthreads();
        if (SPLITS > 1 && !ALIASED) cluster_arrive_relaxed();
        if (EARLY) griddepcontrol_launch_dependents();
        griddepcontrol_wait();
        if (!EARLY) griddepcontrol_launch_dependents();
#pragma unroll 1
        for (int stage = 0; stage < STAGES; ++stage)
            if (of_x.tile < tiles) load_x(stage);
        int stage = 0;
        unsigned int parity = 0;
        while (at.tile < tiles) {
            barrier_wait(empty + stage * 8, parity);
            load_weight(stage);
            load_x(stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        __syncwarp();
        if (SPLITS > 1 && ALIASED) cluster_arrive_relaxed();
        if (SPLITS > 1) cluster_wait();
        return;
    }
