    if (warp == CONSUMERS / 32) {
        // Next tile and step to load: `at` for the weight, and `of_x` for x. x is loaded later, because it depends on the previous kernel.
        struct Place { int tile, step; };
        Place at = {first_tile, 0}, of_x = at;
        const auto advance = [&](Place& place) {
            if (++place.step == steps) place.step = 0, place.tile += clusters;
        };
        // The whole warp runs the loops, so that the arguments of copies are in uniform registers: see warp_load_box.
{%- if packed %}
{% include "partials/gemm_stream_packed_loads.cu" -%}
{%- else %}
        const auto load_weight = [&](int stage) {
            const unsigned int to = ring + stage * STAGE_BYTES, barrier = full + stage * 8;
            const int column = (first + at.step) * BLOCK_K, tile = at.tile / row_tiles;
            if (lane == 0) barrier_arrive_expecting(barrier, STAGE_BYTES);
{%- if gated %}
            warp_load_halves(to, weight, column, tile * (BLOCK_N / 16), barrier);
{%- else %}
            warp_load_box(to, weight, column, tile * BLOCK_N, barrier);
{%- endif %}
            advance(at);
        };
        const auto load_x = [&](int stage) {
            warp_load_box(ring + stage * STAGE_BYTES + WEIGHT_BYTES, x, (first + of_x.step) * BLOCK_K, of_x.tile % row_tiles * ROWS, full + stage * 8);
            advance(of_x);
        };
{%- endif %}
        if (lane == 0) {
            prefetch_map(x);
#pragma unroll
            for (int stage = 0; stage < STAGES; ++stage) {
                barrier_init(full + stage * 8, 1);
                barrier_init(empty + stage * 8, {% if packed %}CONSUMERS{% else %}CONSUMERS / 32{% endif %});
            }
            if (SPLITS > 1) barrier_init(arrived, 1);
            fence_barriers();
            if (SPLITS > 1) {
                const int octets = (min(static_cast<int>(rows) - first_tile % row_tiles * ROWS, ROWS) + 7) / 8;
                const unsigned int owned = octets > static_cast<int>(rank) ? (octets - rank + SPLITS - 1) / SPLITS : 0;
                barrier_arrive_expecting(arrived, owned * SPLITS * PARTIAL_BYTES{% if centered %} + SPLITS * (PARTIAL_BYTES / 4){% endif %});
            }
        }
        __syncwarp();
        // Weights do not depend on the previous kernel, so the ring is filled with weights before griddepcontrol.wait.
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
