        const auto load_weight = [&](int stage) {
            const unsigned int to = ring + stage * STAGE_BYTES + X_BYTES, barrier = full + stage * 8;
            const int k_stage = first + at.step, row = at.tile / row_tiles * TILE_COLUMNS;
            const int n = min(TILE_COLUMNS, PADDED_ROWS{% if gated %} / 2{% endif %} - row);
            if (lane == 0) barrier_arrive_expecting(barrier, X_BYTES + n * {% if gated %}2 * {% endif %}(2 * ROW_BYTES + SCALES * {{ scale_bytes }}));
#pragma unroll
            for (int part = 0; part < {% if gated %}2{% else %}1{% endif %}; ++part) {
#pragma unroll
                for (int block = 0; block < 2; ++block)
                    warp_copy_bulk(to + (block * BLOCK_N + part * TILE_COLUMNS) * ROW_BYTES,
                                   weight + (static_cast<size_t>(k_stage * 2 + block) * PADDED_ROWS + part * N + row) * ROW_BYTES, n * ROW_BYTES, barrier);
#pragma unroll
                for (int group = 0; group < SCALES; ++group)
                    warp_copy_bulk(to + VALUE_BYTES + (group * BLOCK_N + part * TILE_COLUMNS) * {{ scale_bytes }},
                                   weight + ALL_VALUES + (static_cast<size_t>(k_stage * SCALES + group) * PADDED_ROWS + part * N + row) * {{ scale_bytes }}, n * {{ scale_bytes }}, barrier);
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
