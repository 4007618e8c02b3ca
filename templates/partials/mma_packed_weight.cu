
// The packed weight is stored in blocks of 64 columns, with 64 bytes for each row of the weight. A byte is a code, which is the integer
// plus 128. The scales of the weight's rows follow the last block. The columns of x have the same order within a block.
constexpr int PADDED_ROWS = (N + 7) / 8 * 8;  // rows of the packed weight
constexpr size_t ALL_VALUES = static_cast<size_t>(K / 32) * PADDED_ROWS * 64;  // bytes before the scales
constexpr size_t TILE_BYTES = static_cast<size_t>(BLOCK_K / 32) * PADDED_ROWS * 64;
static_assert(K % BLOCK_K == 0 && BLOCK_K % 32 == 0, "a tile has whole blocks");

// Returns the address of a pair of bytes in row `row` of the weight. `column` is the index of the pair in the row, in the stored order.
__device__ __forceinline__ const unsigned char* weight_of(const unsigned char* weight, int row, int column) {
    return weight + (static_cast<size_t>(column / 32) * PADDED_ROWS + row) * 64 + column % 32 * 2;
}

// Copies the weight's rows of one k tile. `from` is this thread's first element. Out-of-bounds rows become zero.
__device__ __forceinline__ void copy_blocks(unsigned int to, const unsigned char* from, int rows_left) {
    constexpr int ROWS_PER_PASS = THREADS / COPIES_PER_ROW;
    static_assert(BLOCK_N % ROWS_PER_PASS == 0 && COPY_BYTES == 16, "every pass is full");
    const int row = threadIdx.x / COPIES_PER_ROW, column = threadIdx.x % COPIES_PER_ROW * COPY_ELEMENTS;
#pragma unroll 8
    for (int at = 0; at < BLOCK_N; at += ROWS_PER_PASS) {
        copy_async<16>(to + swizzled(row + at, column), from + at * 64, row + at < rows_left);
    }
}
