// Results straight from registers to memory, of products with the weight's rows as rows. They lie in shared memory in an
// order (RowOrder::Fours) by which a lane has 4 neighbouring columns of the result, 8 bytes, of 32 of a warp, and of each 8
// rows two: eight lanes write 64 bytes of a row.
constexpr unsigned int RESULT_BYTES = 0;
static_assert(!TOGETHER && BLOCK_N == 128, "four warps of 32 columns");

__device__ __forceinline__ void load_weight(unsigned int to, const TensorMap& weight, int column, int row,
                                            unsigned int barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, { %2, %3, %3, %4, %3 }], [%5];" ::"r"(to), "l"(&weight), "r"(column), "r"(0),
                 "r"(row / 32), "r"(barrier)
                 : "memory");
}

// The bias of a lane's columns, as it is: a conversion before the products would wait for it.
struct alignas(8) Shifts { T at[4]; };
__device__ __forceinline__ Shifts load_shifts(const T* bias, unsigned int column) {
    if (N % BLOCK_N != 0 && column >= N) return {};
    return *reinterpret_cast<const Shifts*>(bias + column + threadIdx.x % 32 / 4 * 4);
}

// The tile's rows from `row` on, of which this warp has 32 columns.
__device__ __forceinline__ void store_tile(const float (&sums)[M_TILES][SUMS], const Shifts& shifts, T* out,
                                           unsigned int row, unsigned int column, unsigned int rows) {
    if (N % BLOCK_N != 0 && column >= N) return;
    const int lane = threadIdx.x % 32;
    row += lane % 4 * 2;
    T* const first = out + static_cast<unsigned long long>(row) * N + column + lane / 4 * 4;
    const int below = static_cast<int>(rows - row);  // rows of the result from `row` on
    float shift[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) shift[c] = to_float(shifts.at[c]);
#pragma unroll
    for (int j = 0; j < BLOCK_M / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float* low = &sums[0][j * 4 + e];
            const float* high = &sums[1][j * 4 + e];
            const uint2 results = {pack_pair<T>(finished(low[0], shift[0]), finished(low[2], shift[1])),
                                   pack_pair<T>(finished(high[0], shift[2]), finished(high[2], shift[3]))};
            if (j * 8 + e < below) *reinterpret_cast<uint2*>(first + (j * 8 + e) * N) = results;
        }
    }
}
