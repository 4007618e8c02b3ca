using T = {{ storage }};
constexpr int N = {{ n }};
constexpr int K = {{ k }};
constexpr int BLOCK_M = {{ block_m }}, BLOCK_N = {{ block_n }}, BLOCK_K = 64;  // 128 bytes of a row
constexpr int STAGES = {{ stages }};
constexpr bool TOGETHER = {{ together }};  // both computing warpgroups work on one tile
constexpr int CLUSTER = {{ cluster }};
static_assert(CLUSTER * BLOCK_N == N, "a cluster holds whole rows");

// Two warpgroups share a tile's rows or, where there are 64, its columns.
constexpr bool BY_COLUMNS = TOGETHER && BLOCK_M == 64;
constexpr int ROWS = TOGETHER && !BY_COLUMNS ? BLOCK_M / 2 : BLOCK_M;  // of a warpgroup
constexpr int COLUMNS = BY_COLUMNS ? BLOCK_N / 2 : BLOCK_N;           // of a warpgroup
constexpr int PARTS = N / COLUMNS;                                    // of a row
constexpr int M_TILES = ROWS / 64;
constexpr int SUMS = COLUMNS / 2;  // of a thread in a tile of 64 rows
constexpr int K_TILES = (K + BLOCK_K - 1) / BLOCK_K;
constexpr unsigned int X_BYTES = BLOCK_M * 128, STAGE_BYTES = X_BYTES + BLOCK_N * 128;
// The residual of a tile comes through the stages, behind the last step of k, as boxes of 32 columns, so many in each.
constexpr int BOXES = BLOCK_N / 32;
constexpr unsigned int BOX_BYTES = BLOCK_M * 64;
constexpr int IN_STAGE = STAGE_BYTES / BOX_BYTES < BOXES ? STAGE_BYTES / BOX_BYTES : BOXES;
constexpr int LAST_STAGES = (BOXES + IN_STAGE - 1) / IN_STAGE;
constexpr int STEPS = K_TILES + LAST_STAGES;
static_assert(ROWS % 64 == 0 && COLUMNS % 32 == 0 && COLUMNS <= 256, "whole products");
static_assert(LAST_STAGES < STAGES, "the residual is waited for while one stage is still in use");

// sums += x · weightᵀ. The weight's rows lie in shared memory in an order (RowOrder::Quads) by which lane l of warp w
// has 8 neighbouring columns of each 32: sums[16g + 4j + e] in row 16w + l / 4 + e / 2 · 8 and column 32g + l % 4 · 8 +
// 2j + e % 2.
__device__ __forceinline__ void multiply_add(float (&sums)[SUMS], unsigned long long x,
                                             unsigned long long weight, int add) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %{{ sums + 2 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ columns }}k16.f32.{{ storage }}.{{ storage }} "
                 "{ {{ sum_registers }} }, %{{ sums }}, %{{ sums + 1 }}, p, 1, 1, 0, 0;\n"
                 "}"
                 : {{ sum_operands }}
                 : "l"(x), "l"(weight), "r"(add));
}

{% include "partials/row_stats.cu" %}

__device__ __forceinline__ void load_weight(unsigned int to, const TensorMap& weight, int column, int row,
                                            unsigned int barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, { %2, %3, %3, %3, %4 }], [%5];" ::"r"(to), "l"(&weight), "r"(column), "r"(0),
                 "r"(row / 32), "r"(barrier)
                 : "memory");
}

// Where 8 columns of a row lie in a box of 32 columns, whose 16-byte chunks are swizzled by 64 bytes.
__device__ __forceinline__ unsigned int chunk_address(unsigned int box, int row, int chunk) {
    return box + row * 64 + (chunk ^ row / 2 % 4) * 16;
}

__device__ __forceinline__ Vector<T> load_chunk(unsigned int address) {
    uint4 bits;
    asm volatile("ld.shared.v4.u32 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w) : "r"(address));
    return *reinterpret_cast<const Vector<T>*>(&bits);
}

// Eight neighbouring constants of columns.
struct alignas(16) Eight { float at[8]; };
