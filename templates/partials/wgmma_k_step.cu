{% if quantized_rows %}
            const unsigned long long of_x = matrix_descriptor(from + (COOPERATIVE ? warpgroup * ROWS * 128 : 0));
            const unsigned long long of_weight = block_descriptor(from + X_BYTES);
            warpgroup_arrive();
#pragma unroll
            for (int step = 0; step < BLOCK_K / {{ mma_k }}; ++step) {
                const unsigned long long x_step = of_x + step * 2;
                const unsigned long long weight_step = of_weight + step / 2 * (BLOCK_BYTES >> 4) + step % 2 * 2;
#pragma unroll
                for (int i = 0; i < M_TILES; ++i) {
                    warpgroup_mma({% if int8 %}products{% else %}acc{% endif %}[i], {% if swap_ab %}weight_step + i * (64 * 64 >> 4), x_step{% else %}x_step + i * (64 * 128 >> 4), weight_step{% endif %},
                                 k_tile > 0 || step > 0);
                }
            }
{% else %}
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
