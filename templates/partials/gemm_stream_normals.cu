    // These warps compute the scale and shift that normalize each row (`normals`), once per CTA. All tiles of a CTA have the same rows:
    // either the CTA computes one tile, or the number of CTAs is a multiple of the number of row tiles.
    if (warp > CONSUMERS / 32) {
        __syncthreads();
        if (SPLITS > 1 && !ALIASED) cluster_arrive_relaxed();
        if (EARLY) griddepcontrol_launch_dependents();
        griddepcontrol_wait();
        if (!EARLY) griddepcontrol_launch_dependents();
        // Use four lanes per row, so that all loads of a warp are in flight at once.
        constexpr int LANES = 4, PARTS = (K_STEPS + LANES - 1) / LANES;
#pragma unroll 2
        for (int from = (warp - CONSUMERS / 32 - 1) * 8; from < ROWS; from += STATS_WARPS * 8) {
            const int row = from + lane / LANES, token = first_tile % row_tiles * ROWS + row;
            float sum = 0.0f, square_sum = 0.0f;
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                const int part = i * LANES + lane % LANES;
                float2 partial = {};
                if (token < static_cast<int>(rows) && part < K_STEPS) partial = load_row_stats(row_stats + (static_cast<size_t>(token) * K_STEPS + part) * 2);
                sum += partial.x, square_sum += partial.y;
            }
#pragma unroll
            for (int offset = 1; offset < LANES; offset *= 2) {
                sum += __shfl_xor_sync(0xffffffff, sum, offset);
                square_sum += __shfl_xor_sync(0xffffffff, square_sum, offset);
            }
{%- if centered %}
            // The cancellation in mean(s²) − mean² costs less precision than the rounding of the rows to 16 bits.
{%- endif %}
            const float mean = {% if centered %}sum * (1.0f / K){% else %}0.0f{% endif %};
            const float variance = fmaxf(fmaf(square_sum, 1.0f / K, -mean * mean), 0.0f);
            const float rstd = rsqrtf(variance + {{ eps }});
            if (lane % LANES == 0 && row < ROWS) normals[row] = {rstd * {{ unscale }}, -mean * rstd};
        }
        asm volatile("bar.arrive 2, %0;" ::"n"(CONSUMERS + STATS_WARPS * 32) : "memory");
        if (SPLITS > 1 && ALIASED) cluster_arrive_relaxed();
        if (SPLITS > 1) cluster_wait();
        return;
    }
