// Whether the variance is computed from the mean, in a second reduction.
constexpr bool TWO_PASS = {{ two_pass }};

// Takes `origin` from the values of each row, and gives the sums of what is left and of its squares.
__device__ __forceinline__ void sums_from(
    float (&value)[X][HELD][N], const float (&origin)[X], float (&sums)[X], float (&squares)[X]) {
#pragma unroll
    for (int i = 0; i < X; ++i) {
        sums[i] = squares[i] = 0.0f;
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float d = held(h) ? value[i][h][j] - origin[i] : 0.0f;
                value[i][h][j] = d;
                sums[i] += d;
                squares[i] = fmaf(d, d, squares[i]);
            }
        }
    }
}

// Takes the mean from the values of each row, or most of it: what is left of it goes to `mean`.
__device__ __forceinline__ void moments(
    float (&value)[X][HELD][N], const float (&first_element)[X], float (&mean)[X], float (&variance)[X]) {
    float sums[X], squares[X];
    if constexpr (TWO_PASS) {
        const float zero[X] = {};
        sums_from(value, zero, sums, squares);
        team_all_reduce_xelem<Sum, WARPS>(sums);
#pragma unroll
        for (int i = 0; i < X; ++i) {
            sums[i] *= 1.0f / WIDTH;
            mean[i] = 0.0f;
        }
        float rest[X];
        sums_from(value, sums, rest, squares);
        team_all_reduce_xelem<Sum, WARPS>(squares);
#pragma unroll
        for (int i = 0; i < X; ++i) variance[i] = squares[i] * (1.0f / WIDTH);
    } else {
        // One reduction of x − s and (x − s)², with s the row's first element: the variance does not
        // depend on s, and unlike E(x²) − E(x)² nothing cancels where the mean is large. A warp by itself has it.
        float origin[X];
#pragma unroll
        for (int i = 0; i < X; ++i) {
            origin[i] = WARPS > 1 ? first_element[i] : __shfl_sync(ALL_LANES, value[i][0][0], 0);
        }
        sums_from(value, origin, sums, squares);
        float both[2 * X];
#pragma unroll
        for (int i = 0; i < X; ++i) {
            both[2 * i] = sums[i];
            both[2 * i + 1] = squares[i];
        }
        team_all_reduce_xelem<Sum, WARPS>(both);
#pragma unroll
        for (int i = 0; i < X; ++i) {
            mean[i] = both[2 * i] * (1.0f / WIDTH);
            variance[i] = fmaxf(fmaf(both[2 * i + 1], 1.0f / WIDTH, -mean[i] * mean[i]), 0.0f);
        }
    }
}

// Writes LayerNorm of the X rows from `first` on. What is not `kept` leaves L2 before other things do.
__device__ __forceinline__ void store_layernorm(
    float (&value)[X][HELD][N], const float (&first_element)[X], const T* gamma, const T* beta, float eps, T* out,
    unsigned int first, unsigned int rows, bool kept = true) {
    // Before the reduction, so that they arrive behind it.
    Pack<T, N> scale[HELD], shift[HELD];
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        scale[h] = load_pack<N>(gamma + held_column(h));
        shift[h] = load_pack<N>(beta + held_column(h));
    }
    float mean[X], variance[X];
    moments(value, first_element, mean, variance);
#pragma unroll
    for (int i = 0; i < X; ++i) {
        const float rstd = rsqrtf(variance[i] + eps);
#pragma unroll
        for (int h = 0; h < HELD; ++h) {
            float y[N];
#pragma unroll
            for (int j = 0; j < N; ++j) {
                y[j] = fmaf((value[i][h][j] - mean[i]) * rstd, to_float(scale[h].at[j]), to_float(shift[h].at[j]));
            }
            if (!held(h) || first + i >= rows) continue;
            T* to = out + row_start(first + i, rows) + held_column(h);
            if (kept) {
                store_pack(to, to_pack<T>(y));
            } else {
                store_pack_once(to, to_pack<T>(y));
            }
        }
    }
}
