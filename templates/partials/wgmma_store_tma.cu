// Epilogue that stores through shared memory with TMA, used if N or BLOCK_N is not a multiple of 32. A warp stages subtiles of 16 rows by
// SUBTILE_N columns, and stores each subtile as BOXES boxes.
constexpr int SUBTILE_N = {{ subtile }}, BOXES = {{ boxes }}, BOX = SUBTILE_N / BOXES;  // columns
constexpr int SUBTILES = BLOCK_N / SUBTILE_N;
constexpr unsigned int SUBTILE_BYTES = 16 * SUBTILE_N * 2, BOX_BYTES = SUBTILE_BYTES / BOXES;
constexpr int BUFFERS = {{ buffers }};  // staging buffers per warp, each for one subtile
constexpr unsigned int EPILOGUE_BYTES = 8 * BUFFERS * SUBTILE_BYTES;
static_assert(BLOCK_N % SUBTILE_N == 0 && SUBTILE_N % 16 == 0, "a tile is a whole number of subtiles");

// Byte offset, within a subtile, of a lane's row for stmatrix. Lanes 0 to 15 have rows 0 to 15 of column group j, which has 8 columns.
// Lanes 16 to 31 have rows 0 to 15 of group j + 1. A single box of 64 columns has the 128-byte swizzle. If there are two boxes, a row of a
// box is an odd number of 16-byte chunks, so eight rows are free of bank conflicts without a swizzle.
__device__ __forceinline__ unsigned int stmatrix_offset(int lane, int j) {
    const int row = lane % 16;
    if constexpr (BOXES == 1) return row * 128 + ((j + lane / 16) ^ row % 8) * 16;
    constexpr int TILES = BOX / 8;
    const int at = j / TILES * BOX_BYTES + j % TILES * 16;
    const int next = (j + 1) / TILES * BOX_BYTES + (j + 1) % TILES * 16;
    return row * BOX * 2 + at + lane / 16 * (next - at);
}

__device__ __forceinline__ void load_weight(unsigned int to, const TensorMap& weight, int column, int row,
                                            unsigned int barrier) {
{% if quantized_rows %}
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, { %2, %3, %3, %4 }], [%5];" ::"r"(to), "l"(&weight), "r"(column), "r"(0), "r"(row / 16), "r"(barrier)
                 : "memory");
{% else %}
    load_box(to, weight, column, row, barrier);
{% endif %}
}

// Stores this warp's rows, which are 16 of each 64 rows of the tile at (row, column), through the warp's buffers at `staging`. tile_bias is
// read only if BIAS.
__device__ __forceinline__ void store_tile(const float (&acc)[M_TILES][ACCUMULATORS], const float* tile_bias,
                                           const TensorMap& out, unsigned int row, unsigned int column,
{%- if residual %}
                                           const T* residual, unsigned int rows,
{%- endif %}
                                           unsigned int staging, int& buffer) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
        for (int subtile = 0; subtile < SUBTILES; ++subtile) {
            unsigned int pair[SUBTILE_N / 8][2];  // for rows 0 to 7 and 8 to 15
#pragma unroll
            for (int j = 0; j < SUBTILE_N / 8; ++j) {
                float2 accumulate = {};
                if (BIAS) accumulate = *reinterpret_cast<const float2*>(tile_bias + subtile * SUBTILE_N + j * 8 + lane % 4 * 2);
                const float* sum = &acc[i][(subtile * (SUBTILE_N / 8) + j) * 4];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
{%- if residual %}
                    const unsigned int at = row + i * 64 + e * 8 + lane / 4;
                    const unsigned int from = column + subtile * SUBTILE_N + j * 8 + lane % 4 * 2;
                    unsigned int add = 0;
                    if (at < rows && from < N) {
                        add = load_pair(residual + static_cast<unsigned long long>(at) * N + from);
                    }
                    float more[2];
                    unpack_pair<T>(add, more[0], more[1]);
                    pair[j][e] = pack_pair<T>(epilogue(sum[e * 2], accumulate.x) + more[0],
                                              epilogue(sum[e * 2 + 1], accumulate.y) + more[1]);
{%- else %}
                    pair[j][e] = pack_pair<T>(epilogue(sum[e * 2], accumulate.x), epilogue(sum[e * 2 + 1], accumulate.y));
{%- endif %}
                }
            }
            const unsigned int to = staging + buffer * SUBTILE_BYTES;
            buffer = (buffer + 1) % BUFFERS;
            if (lane == 0) wait_for_stores<BUFFERS - 1>();
            __syncwarp();
#pragma unroll
            for (int j = 0; j < SUBTILE_N / 8; j += 2) {
                store_matrices(to + stmatrix_offset(lane, j), pair[j][0], pair[j][1], pair[j + 1][0], pair[j + 1][1]);
            }
            fence_for_copies();
            __syncwarp();
            if (lane == 0) {
#pragma unroll
                for (int box = 0; box < BOXES; ++box) {
                    const unsigned int first = column + subtile * SUBTILE_N + box * BOX;
                    if (first < N) store_box(out, first, row + i * 64, to + box * BOX_BYTES);
                }
                commit_stores();
            }
        }
    }
}
