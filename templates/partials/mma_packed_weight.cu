
// The packed weight. Its values are stored in blocks of 64 columns, with 64 bytes for each row of the weight, and the scales of rows follow.
// Values are codes, which are the integers plus 128. Rows of x have the column order of a block.
constexpr int PADDED_ROWS = (N + 7) / 8 * 8;  // of the packed weight
constexpr size_t ALL_VALUES = static_cast<size_t>(K / 32) * PADDED_ROWS * 64;  // bytes before the scales
constexpr size_t TILE_BYTES = static_cast<size_t>(BLOCK_K / 32) * PADDED_ROWS * 64;
static_assert(K % BLOCK_K == 0 && BLOCK_K % 32 == 0, "a tile has whole blocks");

// The address of a row of the first tile. `column` is a pair.
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
