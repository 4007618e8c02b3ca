            // One thread loads the stages of all tiles of the CTA.
            // Weights do not depend on earlier kernels, so the first stages' weights are loaded before the wait. Loading more stages now would
            // only delay the first stage of x.
            constexpr int PREFETCHED = K_TILES < 2 ? K_TILES : 2;
            const TileIndex first = tile_of(blockIdx.x, tiles_m);
            for (int i = 0; i < PREFETCHED; ++i) {
                const unsigned int to = stages + i * STAGE_BYTES + X_BYTES;
                barrier_arrive_expecting(full + i * 8, STAGE_BYTES{% if of_groups %} + scale_bytes(first.n * TILE_N){% endif %});
{% if quantized_rows %}                load_blocks(to, weight, i, first.n * TILE_N, full + i * 8);
{% if of_groups %}                load_scales(full + SCALES + i * BLOCK_N * 4, weight_bytes, i, first.n * TILE_N, full + i * 8);
{% endif %}{% else %}                load_weight(to, weight, i * BLOCK_K, first.n * TILE_N, full + i * 8);
{% endif %}            }
            griddepcontrol_wait();
            int stage = 0, prefetched = PREFETCHED;
            unsigned int parity = 1;  // empty barriers start with the preceding phase complete
            for (unsigned int index = blockIdx.x; index < tiles; index += gridDim.x) {
                const TileIndex tile = tile_of(index, tiles_m);
#pragma unroll 1
                for (int k_tile = 0; k_tile < K_TILES; ++k_tile) {
                    const unsigned int to = stages + stage * STAGE_BYTES;
                    if (--prefetched < 0) {
                        barrier_wait(empty + stage * 8, parity);
                        barrier_arrive_expecting(full + stage * 8, STAGE_BYTES{% if of_groups %} + scale_bytes(tile.n * TILE_N){% endif %});
{% if quantized_rows %}                        load_blocks(to + X_BYTES, weight, k_tile, tile.n * TILE_N, full + stage * 8);
{% if of_groups %}                        load_scales(full + SCALES + stage * BLOCK_N * 4, weight_bytes, k_tile, tile.n * TILE_N, full + stage * 8);
{% endif %}{% else %}                        load_weight(to + X_BYTES, weight, k_tile * BLOCK_K, tile.n * TILE_N, full + stage * 8);
{% endif %}                    }
                    load_box(to, x, k_tile * BLOCK_K, tile.m * BLOCK_M, full + stage * 8);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
            // A CTA fills its SM, so CTAs of the dependent kernel start only on SMs where a CTA has exited. The launch is therefore
            // triggered after the last load.
            griddepcontrol_launch_dependents();