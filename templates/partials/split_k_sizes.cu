constexpr int TOKENS = {{ tokens }};  // of a tile
constexpr int SPLITS = {{ splits }};  // blocks of a cluster

constexpr int BLOCK_N = 64, BLOCK_K = 64;
constexpr int K_STEPS = (K + BLOCK_K - 1) / BLOCK_K;
constexpr int STEPS = (K_STEPS + SPLITS - 1) / SPLITS;  // of a block, at most
constexpr unsigned int TILES_N = (N + BLOCK_N - 1) / BLOCK_N;
constexpr unsigned int WEIGHT_BYTES = BLOCK_N * 128, X_BYTES = TOKENS * 128;
constexpr int SUMS = TOKENS / 2;               // of a thread
constexpr int GROUPS = TOKENS / 8;             // of eight tokens; a block finishes every SPLITS-th
constexpr int OWNED = (GROUPS + SPLITS - 1) / SPLITS;
constexpr unsigned int PART_BYTES = 128 * 16;  // a block's sums of a group: a thread's four lie together
static_assert(TOKENS % 8 == 0 && TOKENS <= 256 && SPLITS <= 8 && SPLITS <= K_STEPS, "whole products, something to add");

// sums += weight · xᵀ, 64 weight rows by TOKENS and 16 deep; `add` is 0 to begin with zeros. Warp w has
// weight rows 16w ..; lane l has sums[4j + e] of weight row l / 4 + e / 2 · 8, token 8j + l % 4 · 2 + e % 2.
__device__ __forceinline__ void multiply_add(float (&sums)[SUMS], unsigned long long weight,
                                             unsigned long long x, int add) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %{{ sums + 2 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ tokens }}k16.f32.{{ storage }}.{{ storage }} "
                 "{ {{ sum_registers }} }, %{{ sums }}, %{{ sums + 1 }}, p, 1, 1, 0, 0;\n"
                 "}"
                 : {{ sum_operands }}
                 : "l"(weight), "l"(x), "r"(add));
}
