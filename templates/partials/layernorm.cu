// Whether the variance is computed by a second reduction, over the deviations from the mean.
constexpr bool TWO_PASS = {{ two_pass }};

// Subtracts `origin` from each row, and returns this thread's partial sums of the differences and of their squares.
__device__ __forceinline__ void subtract_and_sum(
    float (&value)[X][PACKS_PER_THREAD][N], const float (&origin)[X], float (&sums)[X], float (&squares)[X]) {
#pragma unroll
    for (int i = 0; i < X; ++i) {
        sums[i] = squares[i] = 0.0f;
#pragma unroll
        for (int h = 0; h < PACKS_PER_THREAD; ++h) {
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const float d = has_pack(h) ? value[i][h][j] - origin[i] : 0.0f;
                value[i][h][j] = d;
                sums[i] += d;
                squares[i] = fmaf(d, d, squares[i]);
            }
        }
    }
}

// Subtracts an origin from each row, and computes mean and variance of the differences. `mean` is 0 if the origin is the row's mean.
__device__ __forceinline__ void row_statistics(
    float (&value)[X][PACKS_PER_THREAD][N], const float (&first_element)[X], float (&mean)[X], float (&variance)[X]) {
    float sums[X], squares[X];
    if constexpr (TWO_PASS) {
        const float zero[X] = {};
        subtract_and_sum(value, zero, sums, squares);
        team_all_reduce_xelem<Sum, WARPS>(sums);
#pragma unroll
        for (int i = 0; i < X; ++i) {
            sums[i] *= 1.0f / WIDTH;
            mean[i] = 0.0f;
        }
        float rest[X];
        subtract_and_sum(value, sums, rest, squares);
        team_all_reduce_xelem<Sum, WARPS>(squares);
#pragma unroll
        for (int i = 0; i < X; ++i) variance[i] = squares[i] * (1.0f / WIDTH);
    } else {
        // A single reduction of x − s and (x − s)², where s is the first element of the row. The variance does not depend on s. Unlike
        // E(x²) − E(x)², this form avoids cancellation if the mean is large. In a team of one warp, lane 0 holds s.
        float origin[X];
#pragma unroll
        for (int i = 0; i < X; ++i) {
            origin[i] = WARPS > 1 ? first_element[i] : __shfl_sync(ALL_LANES, value[i][0][0], 0);
        }
        subtract_and_sum(value, origin, sums, squares);
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

// Writes LayerNorm of the X rows from `first` on{% if to_e4m3 %}, and `factor` times the result in E4M3{% endif %}. If `kept` is
// false, the results are the first data to be evicted from L2.
__device__ __forceinline__ void store_layernorm(
    float (&value)[X][PACKS_PER_THREAD][N], const float (&first_element)[X], const T* gamma, const T* beta, float eps, {% if to_e4m3 %}unsigned char* converted, float factor, {% endif %}{% if keeps %}T* out,{% endif %}
    unsigned int first, unsigned int rows, bool kept = true) {
    // Load gamma and beta before the reduction, which hides the latency of the loads.
    Pack<T, N> scale[PACKS_PER_THREAD], shift[PACKS_PER_THREAD];
#pragma unroll
    for (int h = 0; h < PACKS_PER_THREAD; ++h) {
        scale[h] = load_pack<N>(gamma + pack_column(h));
        shift[h] = load_pack<N>(beta + pack_column(h));
    }
    float mean[X], variance[X];
    row_statistics(value, first_element, mean, variance);
#pragma unroll
    for (int i = 0; i < X; ++i) {
        const float rstd = rsqrtf(variance[i] + eps);
#pragma unroll
        for (int h = 0; h < PACKS_PER_THREAD; ++h) {
            float y[N];
#pragma unroll
            for (int j = 0; j < N; ++j) {
                y[j] = fmaf((value[i][h][j] - mean[i]) * rstd, to_float(scale[h].at[j]), to_float(shift[h].at[j]));
            }
            if (!has_pack(h) || first + i >= rows) continue;
{%- if to_e4m3 %}
            store_pack(converted + row_start(first + i, rows) + pack_column(h), to_e4m3_pack(y, factor));
{%- endif %}
{%- if keeps %}
            T* to = out + row_start(first + i, rows) + pack_column(h);
            if (kept) {
                store_pack(to, to_pack<T>(y));
            } else {
                store_pack_once(to, to_pack<T>(y));
            }
{%- endif %}
        }
    }
}
