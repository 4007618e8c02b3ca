    // Weights times gamma. What does not depend on rows are two rows of products: of ones with these, of beta
    // with the weights as they were.
    const unsigned int one = pack_pair<T>(1.0f, 1.0f), one_row = group == 0 ? one : 0, one_column = one_row;
    float constants[N_TILES][4] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int step = 0; step < 4; step += 2) {
            const unsigned int of_ones[4] = {one_row, 0, one_row, 0};
            const unsigned int of_offset[4] = {group == 1 ? offset[c][step] : 0, 0, group == 1 ? offset[c][step + 1] : 0, 0};
#pragma unroll
            for (int j = 0; j < N_TILES; ++j) {
                mma<T>(constants[j], of_offset, weights[c][j][step], weights[c][j][step + 1]);
#pragma unroll
                for (int e = step; e < step + 2; ++e) weights[c][j][e] = multiply_pair(weights[c][j][e], scale[c][e]);
                mma<T>(constants[j], of_ones, weights[c][j][step], weights[c][j][step + 1]);
            }
        }
    }
    if (group < 2) {
#pragma unroll
        for (int e = 0; e < N_TILES * 2; ++e)
            parts_of_columns[group][e / 2 * 8 + quad * 2 + e % 2][warp] = constants[e / 2][e % 2];
    }
#pragma unroll 1
    for (int at = threadIdx.x; at < M_TILES * 16 * 2; at += WARPS * 32) {
#pragma unroll
        for (int none = WARPS; none < PARTS; ++none) of_rows[at / 2][at % 2][none] = 0.0f;
    }
    __syncthreads();
#pragma unroll 1
    for (int at = threadIdx.x; at < 2 * COLUMNS; at += WARPS * 32) {
        const int kind = at / COLUMNS, mine = at % COLUMNS;
        float sum = 0.0f;
{% if bias %}
        if (kind == 1 && column + mine < N) sum = to_float(bias[column + mine]);
{% endif %}
#pragma unroll
        for (int from = 0; from < WARPS; ++from) sum += parts_of_columns[kind][mine][from];
        of_columns[kind][mine] = sum;
    }
