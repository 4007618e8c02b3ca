        unsigned int p[M_TILES][KEYS / 16][4];
#pragma unroll
        for (int half = 0; half < 2 * M_TILES; ++half) {
            const int m = half / 2;
            const int r = half % 2;
            float new_max = row_max[m][r];
#pragma unroll
            for (int i = 0; i < KEYS / 8; ++i) new_max = fmaxf(new_max, fmaxf(s[m][i][r * 2], s[m][i][r * 2 + 1]));
            new_max = quad_max(new_max);  // finite: a tile has at least one key
{% if windowed %}            // The shift is finite even if the row attends to no key of the tile.
            const float shift = fmaxf(new_max, __int_as_float(0xff7fffff)) * SCALE_LOG2;
{% else %}            const float shift = new_max * SCALE_LOG2;
{% endif %}            const float rescale = exp2_approximate(fmaf(row_max[m][r], SCALE_LOG2, -shift));
            row_max[m][r] = new_max;
            row_sum[m][r] *= rescale;
#pragma unroll
            for (int i = 0; i < HEAD / 8; ++i) {
                o[m][i][r * 2] *= rescale;
                o[m][i][r * 2 + 1] *= rescale;
            }
#pragma unroll
            for (int i = 0; i < KEYS / 8; ++i) {
                const float low = exp2_approximate(fmaf(s[m][i][r * 2], SCALE_LOG2, -shift));
                const float high = exp2_approximate(fmaf(s[m][i][r * 2 + 1], SCALE_LOG2, -shift));
                row_sum[m][r] += low + high;
                p[m][i / 2][i % 2 * 2 + r] = pack_pair<Element>(low, high);
            }
        }

        const unsigned int values = kv_rows + (stage * 2 + 1) * KEYS * PITCH + value_row(lane);
#pragma unroll
        for (int i = 0; i < KEYS / 16 * K_STEPS; ++i) {
            const int column = i % K_STEPS;
            unsigned int b[4];
            ldmatrix_trans(b, values + i / K_STEPS * 16 * PITCH + column * 32);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                mma(o[m][column * 2], p[m][i / K_STEPS], b[0], b[1]);
                if (column * 2 + 1 < HEAD / 8) mma(o[m][column * 2 + 1], p[m][i / K_STEPS], b[2], b[3]);
            }
        }
