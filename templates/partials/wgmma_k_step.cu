{% if quantized_rows %}
            const unsigned long long of_x = matrix_descriptor(from + (COOPERATIVE ? warpgroup * ROWS * 128 : 0));
            const unsigned long long of_weight = matrix_descriptor(from + X_BYTES);
{% if of_groups %}            float part[M_TILES][ACCUMULATORS];  // sums of this group
{% endif %}            warpgroup_arrive();
#pragma unroll
            for (int step = 0; step < BLOCK_K / {{ mma_k }}; ++step) {
                const unsigned long long x_step = of_x + step * 2;
                const unsigned long long weight_step = of_weight + step / 2 * (BLOCK_BYTES >> 4) + step % 2 * 2;
{% if swap_ab %}
#pragma unroll
                for (int of_pair = 0; of_pair < 2; ++of_pair) {
                    warpgroup_mma({% if int8 %}products{% else %}acc{% endif %}, weight_step + of_pair * (64 >> 4), x_step, k_tile > 0 || step > 0, of_pair);
                }
{% else %}
#pragma unroll
                for (int i = 0; i < M_TILES * 2; ++i) {
                    warpgroup_mma({% if of_groups %}part{% elif int8 %}products{% else %}acc{% endif %}[i / 2], x_step + i / 2 * (64 * 128 >> 4), weight_step + i % 2 * (64 >> 4),
                                 {% if not of_groups %}k_tile > 0 || {% endif %}step > 0, i % 2);
                }
{% endif %}
            }
{% if of_groups %}            warpgroup_commit();
            const float* const scales = reinterpret_cast<const float*>(shared + BARRIER_OFFSET + SCALES) + stage * BLOCK_N;
            SumScale by;
            if (EARLY_SCALES) {
                by = sum_scale(scales, row_scale);
                pin(by.at);
            }
            // Load the next scales while the MMAs run. The last group loads its own scales again.
            const RowScale next_scale = load_row_scale(x_scale, k_tile + 1 < K_TILES ? k_tile + 1 : k_tile, first_row, rows);
            warpgroup_wait<0>();
            pin(part[0]);
            if (!EARLY_SCALES) by = sum_scale(scales, row_scale);
            add_group(acc, part, by);
            row_scale = next_scale;
{% endif %}{% else %}
            const unsigned long long a =
                matrix_descriptor(from + (SWAP_AB ? X_BYTES : 0) + (COOPERATIVE ? warpgroup * ROWS * 128 : 0));
            const unsigned long long b = matrix_descriptor(from + (SWAP_AB ? 0 : X_BYTES));
            warpgroup_arrive();
#pragma unroll
            for (int step = 0; step < BLOCK_K / {{ mma_k }}; ++step) {
#pragma unroll
                for (int i = 0; i < M_TILES; ++i) {
                    warpgroup_mma(acc[i], a + i * (64 * 128 >> 4) + step * 2, b + step * 2,
                                 k_tile > 0 || step > 0);
                }
            }
{% endif %}
