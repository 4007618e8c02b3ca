        float s[M_TILES][KEYS / 8][4] = {};
#pragma unroll
        for (int k_step = 0; k_step < K_STEPS; ++k_step) {
            unsigned int(&q_fragment)[M_TILES][4] = a[Q_IN_REGS ? k_step : 0];
#pragma unroll
            for (int m = 0; !Q_IN_REGS && m < M_TILES; ++m) {
                ldmatrix(q_fragment[m], queries + m * 16 * PITCH + k_step * 32);
            }
#pragma unroll
            for (int i = 0; i < KEYS / 16; ++i) {
                unsigned int b[4];
                ldmatrix(b, keys + i * 16 * PITCH + k_step * 32);
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    mma(s[m][i * 2], q_fragment[m], b[0], b[1]);
                    mma(s[m][i * 2 + 1], q_fragment[m], b[2], b[3]);
                }
            }
        }
