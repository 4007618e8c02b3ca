constexpr int TOKENS = {{ tokens }};  // rows of x per tile
constexpr int SPLITS = {{ splits }};  // CTAs of a cluster, which share the work along K

constexpr int BLOCK_N = 64, BLOCK_K = 64;
constexpr int K_STEPS = (K + BLOCK_K - 1) / BLOCK_K;
constexpr int STEPS = (K_STEPS + SPLITS - 1) / SPLITS;  // max steps of a CTA
constexpr unsigned int TILES_N = (N + BLOCK_N - 1) / BLOCK_N;
constexpr unsigned int WEIGHT_BYTES = BLOCK_N * 128, X_BYTES = TOKENS * 128;
constexpr int ACCUMULATORS = TOKENS / 2;          // registers per thread
constexpr int OCTETS = TOKENS / 8;                // octets are groups of 8 tokens; a CTA of a cluster finishes every SPLITS-th octet
constexpr int OWNED = (OCTETS + SPLITS - 1) / SPLITS;
constexpr unsigned int PARTIAL_BYTES = 128 * 16;  // a CTA's accumulators of an octet, four per thread
static_assert(TOKENS % 8 == 0 && TOKENS <= 256 && SPLITS <= 8 && SPLITS <= K_STEPS, "whole MMAs, and at least one step for each CTA");

// acc += weight · xᵀ, an m64k16 MMA with N = TOKENS. If `accumulate` is 0, acc is overwritten. In lane l of warp w of the warpgroup,
// acc[4j + e] (octet j, e from 0 to 3) belongs to weight row 16w + l / 4 + e / 2 · 8 and token 8j + l % 4 · 2 + e % 2.
__device__ __forceinline__ void warpgroup_mma(float (&acc)[ACCUMULATORS], unsigned long long weight,
                                             unsigned long long x, int accumulate) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %{{ accumulators + 2 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ tokens }}k16.f32.{{ storage }}.{{ storage }} "
                 "{ {{ acc_registers }} }, %{{ accumulators }}, %{{ accumulators + 1 }}, p, 1, 1, 0, 0;\n"
                 "}"
                 : {{ acc_operands }}
                 : "l"(weight), "l"(x), "r"(accumulate));
}
