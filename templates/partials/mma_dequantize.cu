    // The weight is stored as codes, which are its integers plus 128. A product is therefore too large by 128 times the sum of the row of
    // x. This amount is subtracted here. The difference is multiplied by the scales of the row of x and of the row of the weight.
    const float* const scales = reinterpret_cast<const float*>(weight + ALL_VALUES);
    float of_column[N_TILES][2];
#pragma unroll
    for (int j = 0; j < N_TILES; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int column = block_n + warp_n + j * 8 + lane % 4 * 2 + e;
            of_column[j][e] = column < N ? scales[column] : 0.0f;
        }
    }
    float c[M_TILES][N_TILES][4];
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned int row = block_m + warp_m + i * 16 + half * 8 + lane / 4;
            float2 of_row = {};  // scale of the row of x, and sum of its integers
            if (row < rows) of_row = reinterpret_cast<const float2*>(x_scale)[row];
            const int offset = static_cast<int>(of_row.y) * 128;
#pragma unroll
            for (int j = 0; j < N_TILES; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    c[i][j][half * 2 + e] = static_cast<float>(products[i][j][half * 2 + e] - offset) * of_row.x * of_column[j][e];
            }
        }
    }
