        // Reduces row statistics over the cluster. Each CTA sends its partials to all CTAs. The code uses local variables of the including
        // tile loop.
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const RowStats own = row_stats_of(acc[i], half);
                const int row = i * 64 + warp * 16 + half * 8 + lane / 4;
                const unsigned int to = shared_address(&partials[set][stats_buffer][partial][row]);
#pragma unroll 1
                for (int cta = lane % 4; cta < CLUSTER; cta += 4) {
                    store_remote(address_in(to, cta), own.mean, own.m2, address_in(stats_barrier, cta));
                }
            }
        }
        // Release the residual's stages only after the residual has been used, because an arrival does not wait for loads.
#pragma unroll
        for (int i = 0; i < RESIDUAL_STAGES; ++i) {
            release(stage);
            next_stage();
        }
        if (!COOPERATIVE) skip_tile();
        barrier_wait_for_cluster(stats_barrier, stats_parity);
        Normal normal[M_TILES][2];
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                normal[i][half] = normal_of(partials[set][stats_buffer], i * 64 + warp * 16 + half * 8 + lane / 4, {{ eps }});
            }
        }
        stats_buffer ^= 1;
        stats_parity ^= stats_buffer == 0;
