        // What this warpgroup knows of its rows, to all blocks of the cluster, and theirs to this one.
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Moments own = moments_of(sums[i], half);
                const int row = i * 64 + warp * 16 + half * 8 + lane / 4;
                const unsigned int to = shared_address(&parts[set][meeting][part][row]);
#pragma unroll 1
                for (int peer = lane % 4; peer < CLUSTER; peer += 4) {
                    store_remote(address_in(to, peer), own.mean, own.squares, address_in(met_barrier, peer));
                }
            }
        }
        // Not before the residual was used: an arrival does not wait for loads that are under way.
#pragma unroll
        for (int i = 0; i < LAST_STAGES; ++i) {
            release(stage);
            next_stage();
        }
        if (!TOGETHER) skip_tile();
        barrier_wait_for_cluster(met_barrier, met_parity);
        Normal normal[M_TILES][2];
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                normal[i][half] = normal_of(parts[set][meeting], i * 64 + warp * 16 + half * 8 + lane / 4, {{ eps }});
            }
        }
        meeting ^= 1;
        met_parity ^= meeting == 0;
