// Mean and variance of rows of N columns that lie in the registers of PARTS warpgroups of a cluster's blocks, COLUMNS
// in each. ROWS rows in a warpgroup.

// The sum over the four lanes that share a row.
__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(0xffffffff, value, 1);
    return value + __shfl_xor_sync(0xffffffff, value, 2);
}

struct Moments { float mean, squares; };  // `squares`: the sum of (value − mean)²

// Of row `half` of a thread's two in a tile of 64: of this warpgroup's columns. In two passes, since
// the sums are in registers anyway.
__device__ __forceinline__ Moments moments_of(const float (&sums)[SUMS], int half) {
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int j = 0; j < SUMS / 2; ++j) sum += sums[j / 2 * 4 + half * 2 + j % 2];
    const float mean = quad_sum(sum) * (1.0f / COLUMNS);
#pragma unroll
    for (int j = 0; j < SUMS / 2; ++j) {
        const float d = sums[j / 2 * 4 + half * 2 + j % 2] - mean;
        squares = fmaf(d, d, squares);
    }
    return {mean, quad_sum(squares)};
}

// value · scale + shift takes the mean and divides by the deviation, once all parts are there.
struct Normal { float scale, shift; };
__device__ __forceinline__ Normal normal_of(const Moments (&parts)[PARTS][ROWS], int row, float eps) {
    float mean = 0.0f, squares = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) mean += parts[part][row].mean * (1.0f / PARTS);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const float d = parts[part][row].mean - mean;
        squares += fmaf(d * d, static_cast<float>(COLUMNS), parts[part][row].squares);
    }
    const float scale = rsqrtf(fmaf(squares, 1.0f / N, eps));
    return {scale, -mean * scale};
}
