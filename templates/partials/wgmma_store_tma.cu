// Results through shared memory, where the rows of `out` or of a tile are no multiple of 32 columns. A warp's
// leave in pieces of 16 rows, each as so many boxes, one after the other.
constexpr int PIECE = {{ piece }}, BOXES = {{ boxes }}, BOX = PIECE / BOXES;  // columns
constexpr int PIECES = BLOCK_N / PIECE;
constexpr unsigned int PIECE_BYTES = 16 * PIECE * 2, BOX_BYTES = PIECE_BYTES / BOXES;
constexpr int BUFFERS = {{ buffers }};  // a warp's pieces on their way to memory
constexpr unsigned int RESULT_BYTES = 8 * BUFFERS * PIECE_BYTES;
static_assert(BLOCK_N % PIECE == 0 && PIECE % 16 == 0, "whole pieces");

// Where a lane stores its row of column tiles j and j + 1 of a piece: lanes 0 to 15 have rows 0 to 15
// of j, lanes 16 to 31 those of j + 1. One box of 64 columns is swizzled; a row of one of two is an
// odd number of 16 bytes, so that eight rows fall into different banks as they are.
__device__ __forceinline__ unsigned int place(int lane, int j) {
    const int row = lane % 16;
    if constexpr (BOXES == 1) return row * 128 + ((j + lane / 16) ^ row % 8) * 16;
    constexpr int TILES = BOX / 8;
    const int at = j / TILES * BOX_BYTES + j % TILES * 16;
    const int next = (j + 1) / TILES * BOX_BYTES + (j + 1) % TILES * 16;
    return row * BOX * 2 + at + lane / 16 * (next - at);
}

__device__ __forceinline__ void load_weight(unsigned int to, const TensorMap& weight, int column, int row,
                                            unsigned int barrier) {
    load_box(to, weight, column, row, barrier);
}

// The tile at (row, column), of which this warp has 16 rows of each 64, through its pieces at `mine`; shifts is the
// bias of its columns, if there is one.
__device__ __forceinline__ void store_tile(const float (&sums)[M_TILES][SUMS], const float* shifts,
                                           const TensorMap& out, unsigned int row, unsigned int column,
                                           unsigned int mine, int& buffer) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            unsigned int pair[PIECE / 8][2];  // of rows 0-7 and of rows 8-15
#pragma unroll
            for (int j = 0; j < PIECE / 8; ++j) {
                float2 add = {};
                if (BIAS) add = *reinterpret_cast<const float2*>(shifts + piece * PIECE + j * 8 + lane % 4 * 2);
                const float* sum = &sums[i][(piece * (PIECE / 8) + j) * 4];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    pair[j][e] = pack_pair<T>(finished(sum[e * 2], add.x), finished(sum[e * 2 + 1], add.y));
                }
            }
            const unsigned int to = mine + buffer * PIECE_BYTES;
            buffer = (buffer + 1) % BUFFERS;
            if (lane == 0) wait_for_stores<BUFFERS - 1>();
            __syncwarp();
#pragma unroll
            for (int j = 0; j < PIECE / 8; j += 2) {
                store_matrices(to + place(lane, j), pair[j][0], pair[j][1], pair[j + 1][0], pair[j + 1][1]);
            }
            fence_for_copies();
            __syncwarp();
            if (lane == 0) {
#pragma unroll
                for (int box = 0; box < BOXES; ++box) {
                    const unsigned int first = column + piece * PIECE + box * BOX;
                    if (first < N) store_box(out, first, row + i * 64, to + box * BOX_BYTES);
                }
                commit_stores();
            }
        }
    }
}
