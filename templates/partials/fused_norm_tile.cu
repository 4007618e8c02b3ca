using T = {{ storage }};
constexpr int N = {{ n }};
constexpr int K = {{ k }};
constexpr int BLOCK_M = {{ block_m }}, BLOCK_N = {{ block_n }}, BLOCK_K = 64;  // BLOCK_K elements are a 128-byte swizzle span
constexpr int STAGES = {{ stages }};
constexpr bool COOPERATIVE = {{ cooperative }};  // else ping-pong
constexpr int CLUSTER = {{ cluster }};
static_assert(CLUSTER * BLOCK_N == N, "a cluster holds whole rows");

// Cooperative warpgroups split the rows of a tile, or the columns if a tile has only 64 rows.
constexpr bool SPLIT_COLUMNS = COOPERATIVE && BLOCK_M == 64;
constexpr int ROWS = COOPERATIVE && !SPLIT_COLUMNS ? BLOCK_M / 2 : BLOCK_M;  // rows per warpgroup
constexpr int COLUMNS = SPLIT_COLUMNS ? BLOCK_N / 2 : BLOCK_N;               // columns per warpgroup
constexpr int PARTIALS = N / COLUMNS;                                        // partial statistics per row
constexpr int M_TILES = ROWS / 64;
constexpr int ACCUMULATORS = COLUMNS / 2;  // registers per thread for one m64 MMA
constexpr int K_TILES = (K + BLOCK_K - 1) / BLOCK_K;
constexpr unsigned int X_BYTES = BLOCK_M * 128, WEIGHT_BYTES = BLOCK_N * 128, STAGE_BYTES = X_BYTES + WEIGHT_BYTES;
// The residual of a tile follows the last k tile through the pipeline, in boxes of 32 columns.
constexpr int BOXES = BLOCK_N / 32;
constexpr unsigned int BOX_BYTES = BLOCK_M * 64;
constexpr int BOXES_PER_STAGE = STAGE_BYTES / BOX_BYTES < BOXES ? STAGE_BYTES / BOX_BYTES : BOXES;
constexpr int RESIDUAL_STAGES = (BOXES + BOXES_PER_STAGE - 1) / BOXES_PER_STAGE;
constexpr int STEPS = K_TILES + RESIDUAL_STAGES;
static_assert(ROWS % 64 == 0 && COLUMNS % 32 == 0 && COLUMNS <= 256, "a warpgroup's tile is a whole number of MMAs");
static_assert(RESIDUAL_STAGES < STAGES, "all of the residual is resident while the last MMAs still read one stage");

// acc += x · weightᵀ. If `accumulate` is 0, acc is overwritten. The host's tensor map permutes the weight's rows in shared memory
// (RowOrder::Quads), so that lane l of warp w of the warpgroup holds 8 neighboring columns in each group g of 32 columns: for j and e from
// 0 to 3, acc[16g + 4j + e] is in row 16w + l / 4 + e / 2 · 8 and column 32g + l % 4 · 8 + 2j + e % 2.
__device__ __forceinline__ void warpgroup_mma(float (&acc)[ACCUMULATORS], unsigned long long x,
                                             unsigned long long weight, int accumulate) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %{{ accumulators + 2 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ columns }}k16.f32.{{ storage }}.{{ storage }} "
                 "{ {{ acc_registers }} }, %{{ accumulators }}, %{{ accumulators + 1 }}, p, 1, 1, 0, 0;\n"
                 "}"
                 : {{ acc_operands }}
                 : "l"(x), "l"(weight), "r"(accumulate));
}

{% include "partials/row_stats.cu" %}

__device__ __forceinline__ void load_weight(unsigned int to, const TensorMap& weight, int column, int row,
                                            unsigned int barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, { %2, %3, %3, %3, %4 }], [%5];" ::"r"(to), "l"(&weight), "r"(column), "r"(0),
                 "r"(row / 32), "r"(barrier)
                 : "memory");
}

// Address of 8 columns of a row in a box of 32 columns, whose 16-byte chunks have the 64-byte swizzle.
__device__ __forceinline__ unsigned int chunk_address(unsigned int box, int row, int chunk) {
    return box + row * 64 + (chunk ^ row / 2 % 4) * 16;
}

__device__ __forceinline__ Vector<T> load_chunk(unsigned int address) {
    uint4 bits;
    asm volatile("ld.shared.v4.u32 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w) : "r"(address));
    return *reinterpret_cast<const Vector<T>*>(&bits);
}

// Eight neighboring per-column constants.
struct alignas(16) Float8 { float at[8]; };
