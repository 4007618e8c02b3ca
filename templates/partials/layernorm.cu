// Writes LayerNorm of the X rows from `first` on. Mean and variance come from one reduction of
// x − s and (x − s)², with s the row's first element: the variance does not depend on s, and unlike
// E(x²) − E(x)² nothing cancels where the mean is large beside the deviation.
__device__ __forceinline__ void store_layernorm(
    float (&value)[X][HELD][N], const T* gamma, const T* beta, float eps, T* out, unsigned int first,
    unsigned int rows) {
    // Loaded before the reduction, so that they arrive behind it.
    Pack<T, N> scale[HELD], shift[HELD];
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        scale[h] = load_pack<N>(gamma + held_column(h));
        shift[h] = load_pack<N>(beta + held_column(h));
    }
    float origin[X];
#pragma unroll
    for (int i = 0; i < X; ++i) origin[i] = value[i][0][0];
    team_broadcast<WARPS>(origin);
    float sums[2 * X];
#pragma unroll
    for (int i = 0; i < X; ++i) {
        float sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float d = held(h) ? value[i][h][j] - origin[i] : 0.0f;
                value[i][h][j] = d;
                sum += d;
                squares = fmaf(d, d, squares);
            }
        }
        sums[2 * i] = sum;
        sums[2 * i + 1] = squares;
    }
    team_all_reduce_xelem<Sum, WARPS>(sums);
#pragma unroll
    for (int i = 0; i < X; ++i) {
        const float mean = sums[2 * i] * (1.0f / WIDTH);
        const float variance = fmaxf(fmaf(sums[2 * i + 1], 1.0f / WIDTH, -mean * mean), 0.0f);
        const float rstd = rsqrtf(variance + eps);
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            float y[N];
#pragma unroll
            for (int j = 0; j < N; ++j) {
                y[j] = fmaf((value[i][h][j] - mean) * rstd, to_float(scale[h].at[j]), to_float(shift[h].at[j]));
            }
            if (held(h) && first + i < rows) store_pack(out + row_start(first + i, rows) + held_column(h), to_pack<T>(y));
        }
    }
}
