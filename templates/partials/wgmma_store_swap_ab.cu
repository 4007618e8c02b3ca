// Epilogue of swap-AB that stores from registers directly to global memory. A warp has 32 columns of out. The tensor map permutes the
// weight's rows in shared memory (RowOrder::Fours, or RowOrder::PairsOfFours for a packed weight), so that a lane holds 4 neighboring
// columns (8 bytes) in two of each 8 rows. Eight lanes write 64 bytes of a row.
constexpr unsigned int EPILOGUE_BYTES = 0;
static_assert(!COOPERATIVE && BLOCK_N == 128, "one consumer warpgroup has four warps of 32 columns");

__device__ __forceinline__ void load_weight(unsigned int to, const TensorMap& weight, int column, int row,
                                            unsigned int barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, { %2, %3, %3, %4, %3 }], [%5];" ::"r"(to), "l"(&weight), "r"(column), "r"(0),
                 "r"(row / 32), "r"(barrier)
                 : "memory");
}

// Bias of a lane's columns in the storage type. A conversion before the mainloop would wait for the load.
struct alignas(8) TileBias { T at[4]; };
__device__ __forceinline__ TileBias load_tile_bias(const T* bias, unsigned int column) {
    if (N % BLOCK_N != 0 && column >= N) return {};
    return *reinterpret_cast<const TileBias*>(bias + column + threadIdx.x % 32 / 4 * 4);
}

{% if to_e4m3 %}{% include "partials/wgmma_store_quantized.cu" %}{% else %}// Stores this warp's 32 columns of the tile, from (row, column) on.
__device__ __forceinline__ void store_tile(const float (&acc)[M_TILES][ACCUMULATORS], const TileBias& tile_bias, T* out,
{%- if residual %}
                                           const T* residual,
{%- endif %}
                                           unsigned int row, unsigned int column, unsigned int rows) {
    if (N % BLOCK_N != 0 && column >= N) return;
    const int lane = threadIdx.x % 32;
    row += lane % 4 * 2;
    T* const first = out + static_cast<unsigned long long>(row) * N + column + lane / 4 * 4;
    const int below = static_cast<int>(rows - row);  // rows of out from `row` on
    float lane_bias[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) lane_bias[c] = to_float(tile_bias.at[c]);
#pragma unroll
    for (int j = 0; j < BLOCK_M / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float* low = &acc[0][j * 4 + e];
            const float* high = &acc[1][j * 4 + e];
{%- if residual %}
            uint2 add = {};
            if (j * 8 + e < below) {
                const T* from = residual + static_cast<unsigned long long>(row) * N + column + lane / 4 * 4;
                add = *reinterpret_cast<const uint2*>(from + (j * 8 + e) * N);
            }
            float more[4];
            unpack_pair<T>(add.x, more[0], more[1]);
            unpack_pair<T>(add.y, more[2], more[3]);
            const uint2 results = {
                pack_pair<T>(epilogue(low[0], lane_bias[0]) + more[0], epilogue(low[2], lane_bias[1]) + more[1]),
                pack_pair<T>(epilogue(high[0], lane_bias[2]) + more[2], epilogue(high[2], lane_bias[3]) + more[3])};
{%- else %}
            const uint2 results = {pack_pair<T>(epilogue(low[0], lane_bias[0]), epilogue(low[2], lane_bias[1])),
                                   pack_pair<T>(epilogue(high[0], lane_bias[2]), epilogue(high[2], lane_bias[3]))};
{%- endif %}
            if (j * 8 + e < below) *reinterpret_cast<uint2*>(first + (j * 8 + e) * N) = results;
        }
    }
}
{% endif %}