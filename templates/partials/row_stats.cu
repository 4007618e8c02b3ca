// Mean and variance of rows of N columns. A row is distributed over the registers of PARTIALS warpgroups of a cluster, with COLUMNS columns
// per warpgroup. Statistics are combined as in Chan, Golub and LeVeque (1979). Uses the size constants of the including kernel.

// Sum over the four lanes that share a row of accumulators.
__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(0xffffffff, value, 1);
    return value + __shfl_xor_sync(0xffffffff, value, 2);
}

struct RowStats { float mean, m2; };  // m2 = Σ (value − mean)²

// Statistics over this warpgroup's columns for row `half` of the two rows that a thread has in an m64 MMA. Two passes are cheap, because
// the values are in registers.
__device__ __forceinline__ RowStats row_stats_of(const float (&acc)[ACCUMULATORS], int half) {
    float sum = 0.0f, m2 = 0.0f;
#pragma unroll
    for (int j = 0; j < ACCUMULATORS / 2; ++j) sum += acc[j / 2 * 4 + half * 2 + j % 2];
    const float mean = quad_sum(sum) * (1.0f / COLUMNS);
#pragma unroll
    for (int j = 0; j < ACCUMULATORS / 2; ++j) {
        const float d = acc[j / 2 * 4 + half * 2 + j % 2] - mean;
        m2 = fmaf(d, d, m2);
    }
    return {mean, quad_sum(m2)};
}

// The normalized value is value · scale{% if centered %} + shift, with scale = 1 / √(variance + eps) and shift = −mean · scale{% else %}.
// scale = 1 / √(mean(value²) + eps), and shift is 0{% endif %}.
struct Normal { float scale, shift; };
__device__ __forceinline__ Normal normal_of(const RowStats (&partials)[PARTIALS][ROWS], int row, float eps) {
    float mean = 0.0f, m2 = 0.0f;
#pragma unroll
    for (int partial = 0; partial < PARTIALS; ++partial) mean += partials[partial][row].mean * (1.0f / PARTIALS);
#pragma unroll
    for (int partial = 0; partial < PARTIALS; ++partial) {
        const float d = partials[partial][row].mean - mean;
        m2 += fmaf(d * d, static_cast<float>(COLUMNS), partials[partial][row].m2);
    }
{%- if not centered %}
    return {rsqrtf(fmaf(mean, mean, fmaf(m2, 1.0f / N, eps))), 0.0f};
{%- else %}
    const float scale = rsqrtf(fmaf(m2, 1.0f / N, eps));
    return {scale, -mean * scale};
{%- endif %}
}
