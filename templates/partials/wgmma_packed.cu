// A packed weight and x, both with 8-bit values. Their columns have the same order. In device memory, a block of the weight has 64 columns
// of all rows. A stage has 128 columns, so it is loaded as two blocks. In shared memory, two adjacent rows of a block (a pair) are one row
// of 128 bytes with the 128-byte swizzle.
constexpr unsigned int WEIGHT_ROWS = {{ weight_rows }};
constexpr unsigned int BLOCK_BYTES = BLOCK_N * 64;
constexpr size_t ALL_VALUES = static_cast<size_t>(K_TILES) * 2 * WEIGHT_ROWS * 64;  // bytes before the scales
static_assert(WEIGHT_ROWS % 16 == 0, "a block is a whole number of groups of eight pairs");

// Loads the rows of a tile from both blocks of a k tile. After the last row of the weight, the copy continues with rows of the next block.
// The products of these additional rows are not stored.
__device__ __forceinline__ void load_blocks(unsigned int to, const TensorMap& weight, int k_tile, int row, unsigned int barrier) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        load_weight(to + i * BLOCK_BYTES, weight, 0, (k_tile * 2 + i) * static_cast<int>(WEIGHT_ROWS) + row, barrier);
    }
}

{% if int8 %}{% include "partials/wgmma_dequantize.cu" %}{% else %}{% if swap_ab %}// Multiplies the accumulators by the scales of their rows. `row` is the first row of the tile. For each j, a lane has the tile's rows
// j · 8 + lane % 4 · 2 + e, with e = 0 and 1.
__device__ __forceinline__ void scale_rows(float (&acc)[M_TILES][ACCUMULATORS], const float* x_scale, unsigned int row, unsigned int rows) {
    row += threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < BLOCK_M / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float by = row + j * 8 + e < rows ? x_scale[row + j * 8 + e] : 0.0f;
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) acc[i][j * 4 + e] *= by, acc[i][j * 4 + 2 + e] *= by;
        }
    }
}
{% elif of_groups %}{% include "partials/wgmma_groups.cu" %}{% else %}// Scales of a lane's rows, which are two of each 64 rows of the tile.
struct RowScale { float at[M_TILES * 2]; };

// Loads the scales of a lane's rows. `row` is the first row of the warp.
__device__ __forceinline__ RowScale load_row_scale(const float* x_scale, unsigned int row, unsigned int rows) {
    RowScale of;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; ++i) {
        const unsigned int at = row + threadIdx.x % 32 / 4 + i / 2 * 64 + i % 2 * 8;
        of.at[i] = at < rows ? x_scale[at] : 0.0f;
    }
    return of;
}

// Multiplies the accumulators by the scales of their rows.
__device__ __forceinline__ void scale_rows(float (&acc)[M_TILES][ACCUMULATORS], const RowScale& by) {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
        for (int j = 0; j < ACCUMULATORS; ++j) acc[i][j] *= by.at[i * 2 + j / 2 % 2];
    }
}
{% endif %}{% endif %}
