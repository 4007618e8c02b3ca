            // One thread loads the stages of all tiles of the CTA.
            // Weights do not depend on earlier kernels, so the weights of the first stages are loaded before griddepcontrol.wait. Loading
            // more stages now would only delay the first stage of x.
            // TMA takes about twice as long to fill a row with zeros as to copy it, so the copies of the last row tile end at the last row
            // of x. The remaining rows in shared memory hold old data, and their products are not stored.
            const unsigned int absent_bytes = (tiles_m * BLOCK_M - rows) * 128;
            auto expect_stage = [&](TileIndex tile, unsigned int barrier) {
                const unsigned int bytes = STAGE_BYTES{% if of_groups %} + scale_bytes(tile.n * TILE_N){% endif %};
                if (tile.m + 1 < tiles_m) barrier_arrive_expecting(barrier, bytes);
                else barrier_arrive_expecting(barrier, bytes - absent_bytes);
            };
            constexpr int PREFETCHED = K_TILES < 2 ? K_TILES : 2;
            const TileIndex first = tile_of(blockIdx.x, tiles_m);
            for (int i = 0; i < PREFETCHED; ++i) {
                const unsigned int to = stages + i * STAGE_BYTES + X_BYTES;
                expect_stage(first, full + i * 8);
{% if quantized_rows %}                load_blocks(to, weight, i, first.n * TILE_N, full + i * 8);
{% if of_groups %}                load_scales(full + SCALES + i * BLOCK_N * 4, weight_bytes, i, first.n * TILE_N, full + i * 8);
{% endif %}{% else %}                load_weight(to, weight, i * BLOCK_K, first.n * TILE_N, full + i * 8);
{% endif %}            }
            griddepcontrol_wait();
            int stage = 0, prefetched = PREFETCHED;
            unsigned int parity = 1;  // a wait for parity 1 on a new barrier returns at once
            for (unsigned int index = blockIdx.x; index < tiles; index += gridDim.x) {
                const TileIndex tile = tile_of(index, tiles_m);
#pragma unroll 1
                for (int k_tile = 0; k_tile < K_TILES; ++k_tile) {
                    const unsigned int to = stages + stage * STAGE_BYTES;
                    if (--prefetched < 0) {
                        barrier_wait(empty + stage * 8, parity);
                        expect_stage(tile, full + stage * 8);
{% if quantized_rows %}                        load_blocks(to + X_BYTES, weight, k_tile, tile.n * TILE_N, full + stage * 8);
{% if of_groups %}                        load_scales(full + SCALES + stage * BLOCK_N * 4, weight_bytes, k_tile, tile.n * TILE_N, full + stage * 8);
{% endif %}{% else %}                        load_weight(to + X_BYTES, weight, k_tile * BLOCK_K, tile.n * TILE_N, full + stage * 8);
{% endif %}                    }
                    if (tile.m + 1 < tiles_m) load_box(to, x, k_tile * BLOCK_K, tile.m * BLOCK_M, full + stage * 8);
                    else load_box(to, x_last, k_tile * BLOCK_K, tile.m * BLOCK_M, full + stage * 8);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
            // A CTA fills its SM, so CTAs of the dependent kernel start only on SMs where a CTA has exited. The launch is therefore
            // triggered after the last load.
            griddepcontrol_launch_dependents();