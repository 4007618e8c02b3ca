// Operands with a scale for each group of 128 columns. A stage has the columns of one group, and its MMAs compute sums over these columns.
// Each sum is multiplied by the scales of its row and column, and added to the sum over all groups. The scales of x are [K_TILES, rows].
// The scales of the weight are [K_TILES, WEIGHT_ROWS], after its values.
constexpr unsigned int SCALES = (2 * STAGES + 2) * 8 + 2 * BLOCK_N * 4;  // byte offset of the stages' scales from the first barrier
// Whether registers can hold the products of scales. If so, the products are computed while the MMAs of the group run.
constexpr bool EARLY_SCALES = ACCUMULATORS <= 64;
static_assert(COOPERATIVE && M_TILES == 1 && BLOCK_K == 128, "both warpgroups use the tensor cores by turns");

// Number of columns of the tile at `column` that are inside the matrix.
__device__ __forceinline__ unsigned int scaled_columns(unsigned int column) { return min(static_cast<unsigned int>(TILE_N), N - column); }

// Bytes of the scales of a tile in one group.
__device__ __forceinline__ unsigned int scale_bytes(unsigned int column) { return scaled_columns(column) * (BLOCK_N / TILE_N) * 4; }

__device__ __forceinline__ void copy_scales(unsigned int to, const float* from, unsigned int columns, unsigned int barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(columns * 4), "r"(barrier)
                 : "memory");
}

// Loads the scales of a group for the columns of a tile{% if gated %}, first those of the first half of the weight{% endif %}.
__device__ __forceinline__ void load_scales(unsigned int to, const unsigned char* weight, int group, unsigned int column,
                                            unsigned int barrier) {
    const float* from = reinterpret_cast<const float*>(weight + ALL_VALUES) + static_cast<size_t>(group) * WEIGHT_ROWS + column;
    copy_scales(to, from, scaled_columns(column), barrier);
{%- if gated %}
    copy_scales(to + TILE_N * 4, from + N, scaled_columns(column), barrier);
{%- endif %}
}

__device__ __forceinline__ void clear_sums(float (&sum)[M_TILES][ACCUMULATORS]) {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
        for (int j = 0; j < ACCUMULATORS; ++j) sum[i][j] = 0.0f;
    }
}

// Scales of a lane's two rows in one group. Rows past the end of x get the scale of the last row, because their results are not stored.
struct RowScale { float at[2]; };
__device__ __forceinline__ RowScale load_row_scale(const float* x_scale, unsigned int group, unsigned int row, unsigned int rows) {
    row += threadIdx.x % 32 / 4;
    x_scale += static_cast<size_t>(group) * rows;
    return {x_scale[min(row, rows - 1)], x_scale[min(row + 8, rows - 1)]};
}

// Products of the scales of a lane's rows and columns. `scale` has the scales of the tile's columns.
struct SumScale { float at[ACCUMULATORS]; };
__device__ __forceinline__ SumScale sum_scale(const float* scale, const RowScale& of_row) {
    const int lane = threadIdx.x % 32;
    SumScale of;
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; j += 4) {
        const int column = {% if direct_store %}j / 16 * 32 + lane % 4 * 8 + j / 4 % 4 * 2{% else %}j * 2 + lane % 4 * 2{% endif %};
        const float2 by = *reinterpret_cast<const float2*>(scale + column);
        of.at[j] = of_row.at[0] * by.x, of.at[j + 1] = of_row.at[0] * by.y;
        of.at[j + 2] = of_row.at[1] * by.x, of.at[j + 3] = of_row.at[1] * by.y;
    }
    return of;
}

// Keeps the compiler from moving the computation of these registers past this point, and their uses before it.
__device__ __forceinline__ void pin(float (&registers)[ACCUMULATORS]) {
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; ++j) asm volatile("" : "+f"(registers[j])::"memory");
}

// Adds the sums of a group (`part`), multiplied by their scales, to `sum`.
__device__ __forceinline__ void add_group(float (&sum)[M_TILES][ACCUMULATORS], const float (&part)[M_TILES][ACCUMULATORS],
                                          const SumScale& by) {
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; ++j) sum[0][j] += part[0][j] * by.at[j];
}
