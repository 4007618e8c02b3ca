{% if swap_ab %}// Stores this warp's 32 columns of the tile in E4M3, from (row, column) on. Each result is multiplied by `factor`.
__device__ __forceinline__ void store_tile(const float (&acc)[M_TILES][ACCUMULATORS], const TileBias& tile_bias, unsigned char* out,
                                           float factor, unsigned int row, unsigned int column, unsigned int rows) {
    if (N % BLOCK_N != 0 && column >= N) return;
    const int lane = threadIdx.x % 32;
    row += lane % 4 * 2;
    unsigned char* const first = out + static_cast<unsigned long long>(row) * N + column + lane / 4 * 4;
    const int below = static_cast<int>(rows - row);  // rows of out from `row` on
    float lane_bias[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) lane_bias[c] = to_float(tile_bias.at[c]);
    const auto result = [&](float sum, int c) { return epilogue(sum, lane_bias[c]) * factor; };
#pragma unroll
    for (int j = 0; j < BLOCK_M / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float* low = &acc[0][j * 4 + e];
            const float* high = &acc[1][j * 4 + e];
            const unsigned int results = pack_e4m3(result(low[0], 0), result(low[2], 1), result(high[0], 2), result(high[2], 3));
            if (j * 8 + e < below) *reinterpret_cast<unsigned int*>(first + (j * 8 + e) * N) = results;
        }
    }
}
{% else %}// Stores this warp's rows, which are 16 of each 64 rows of the tile, in E4M3, from (row, column) on. Each result is multiplied by
// `factor`. tile_bias is read only if BIAS.
__device__ __forceinline__ void store_tile(const float (&acc)[M_TILES][ACCUMULATORS], const float* tile_bias, unsigned char* out,
                                           float factor, unsigned int row, unsigned int column, unsigned int rows) {
    const int lane = threadIdx.x % 32;
    row += lane / 4;
    unsigned char* const first = out + static_cast<unsigned long long>(row) * N + column + lane % 4 * 8;
#pragma unroll
    for (int group = 0; group < TILE_N / 32; ++group) {
        const float* bias = tile_bias + group * 32 + lane % 4 * 8;
        const bool inside = N % TILE_N == 0 || column + group * 32 < N;
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
            float result[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float* sum = &acc[i / 2][(group * 4 + j / 2) * 4 + i % 2 * 2 + j % 2];
                result[j] = epilogue(*sum, BIAS ? bias[j] : 0.0f) * factor;
{%- if gated %}
                const float up = sum[TILE_N / 2];
                result[j] *= BIAS ? up + bias[TILE_N + j] : up;
{%- endif %}
            }
            const uint2 results = {pack_e4m3(result[0], result[1], result[2], result[3]), pack_e4m3(result[4], result[5], result[6], result[7])};
            const int down = i / 2 * 64 + i % 2 * 8;
            if (inside && row + down < rows) *reinterpret_cast<uint2*>(first + down * N + group * 32) = results;
        }
    }
}
{% endif %}