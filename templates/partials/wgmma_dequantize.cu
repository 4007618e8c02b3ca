// Scale of a row of x, and 128 times the sum of the row's integers. The weight's codes are its integers plus 128, so each product exceeds
// the product of the integers by this offset.
struct ScaleAndOffset { float scale; int offset; };

__device__ __forceinline__ ScaleAndOffset load_scale_and_offset(const float* x_scale, unsigned int row, unsigned int rows) {
    // The scale of the row, and the sum of its integers.
    float2 of = {};
    if (row < rows) of = reinterpret_cast<const float2*>(x_scale)[row];
    return {of.x, static_cast<int>(of.y) * 128};
}

__device__ __forceinline__ float dequantized(int product, const ScaleAndOffset& by) {
    return static_cast<float>(product - by.offset) * by.scale;
}

{% if swap_ab %}// Subtracts the offsets from the products, and multiplies by the scales of the rows of x. `row` is the first row of the tile. For each j, a
// lane has the tile's rows j · 8 + lane % 4 · 2 + e, with e = 0 and 1.
__device__ __forceinline__ void dequantize_rows(float (&acc)[M_TILES][ACCUMULATORS], const int (&products)[M_TILES][ACCUMULATORS],
                                                const float* x_scale, unsigned int row, unsigned int rows) {
    row += threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < BLOCK_M / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const ScaleAndOffset by = load_scale_and_offset(x_scale, row + j * 8 + e, rows);
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
                for (int at = j * 4 + e; at < j * 4 + 4; at += 2) acc[i][at] = dequantized(products[i][at], by);
            }
        }
    }
}
{% else %}// Scales and offsets of a lane's rows, which are two of each 64 rows of the tile.
struct RowScale { ScaleAndOffset at[M_TILES * 2]; };

// Loads the scales and offsets of a lane's rows. `row` is the first row of the warp.
__device__ __forceinline__ RowScale load_row_scale(const float* x_scale, unsigned int row, unsigned int rows) {
    RowScale of;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; ++i) {
        of.at[i] = load_scale_and_offset(x_scale, row + threadIdx.x % 32 / 4 + i / 2 * 64 + i % 2 * 8, rows);
    }
    return of;
}

// Subtracts the offsets from the products, and multiplies by the scales of their rows.
__device__ __forceinline__ void dequantize_rows(float (&acc)[M_TILES][ACCUMULATORS], const int (&products)[M_TILES][ACCUMULATORS],
                                                const RowScale& by) {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
        for (int j = 0; j < ACCUMULATORS; ++j) acc[i][j] = dequantized(products[i][j], by.at[i * 2 + j / 2 % 2]);
    }
}
{% endif %}