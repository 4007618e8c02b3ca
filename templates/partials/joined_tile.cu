using T = {{ storage }};
constexpr int N = {{ n }};
constexpr int K = {{ k }};
constexpr int BLOCK_M = {{ block_m }}, BLOCK_N = {{ block_n }}, BLOCK_K = 64;  // 128 bytes of a row
constexpr int STAGES = {{ stages }};
constexpr bool TOGETHER = {{ together }};  // both computing warpgroups work on one tile
constexpr int CLUSTER = {{ cluster }};
static_assert(CLUSTER * BLOCK_N == N, "a cluster holds whole rows");

constexpr int ROWS = TOGETHER ? BLOCK_M / 2 : BLOCK_M;  // of a warpgroup
constexpr int M_TILES = ROWS / 64;
constexpr int SUMS = BLOCK_N / 2;  // of a thread in a tile of 64 rows
constexpr int K_TILES = (K + BLOCK_K - 1) / BLOCK_K;
constexpr unsigned int X_BYTES = BLOCK_M * 128, STAGE_BYTES = X_BYTES + BLOCK_N * 128;
constexpr int PIECES = BLOCK_N / 64;             // of a tile's columns, stored one after the other
constexpr unsigned int PIECE_BYTES = ROWS * 128;
constexpr int BUFFERS = {{ buffers }};           // pieces on their way to memory
// The residual of a tile comes through the stages, behind the last step of k, so many pieces in each.
constexpr int IN_STAGE = STAGE_BYTES / X_BYTES < PIECES ? STAGE_BYTES / X_BYTES : PIECES;
constexpr int LAST_STAGES = (PIECES + IN_STAGE - 1) / IN_STAGE;
constexpr int STEPS = K_TILES + LAST_STAGES;
static_assert(ROWS % 64 == 0 && BLOCK_N % 64 == 0 && BLOCK_N <= 256, "whole products");
static_assert(LAST_STAGES < STAGES, "the residual is waited for while one stage is still in use");

// sums += x · weightᵀ, as in gemm_wgmma: lane l of warp w has sums[4j + e] in row 16w + l / 4 +
// e / 2 · 8 and column 8j + l % 4 · 2 + e % 2.
__device__ __forceinline__ void multiply_add(float (&sums)[SUMS], unsigned long long x,
                                             unsigned long long weight, int add) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %{{ sums + 2 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ block_n }}k16.f32.{{ storage }}.{{ storage }} "
                 "{ {{ sum_registers }} }, %{{ sums }}, %{{ sums + 1 }}, p, 1, 1, 0, 0;\n"
                 "}"
                 : {{ sum_operands }}
                 : "l"(x), "l"(weight), "r"(add));
}

{% include "partials/moments.cu" %}

// Where a lane's eight columns of matrices j and j + 1 lie in a piece of 64 columns, for the 16 rows
// from `row` on: rows 0-7 and 8-15 of matrix j, then of j + 1.
__device__ __forceinline__ unsigned int piece_address(unsigned int piece, int row, int j, int lane) {
    const int at_row = row + lane % 16, chunk = j + lane / 16;
    return piece + at_row * 128 + (chunk ^ at_row % 8) * 16;
}

// What is read together of two neighbouring columns.
struct alignas(16) ColumnPair { float gamma[2], beta[2]; };
