constexpr int BOXES = HEAD / COLUMNS;  // boxes side by side in a head
constexpr unsigned int ROW_BYTES = COLUMNS * 2;
constexpr unsigned int Q_BYTES = BOXES * 64 * ROW_BYTES;  // 64 queries
constexpr unsigned int TILE_BYTES = BOXES * KEYS * ROW_BYTES;
constexpr int HEAD_STEPS = HEAD / 16, KEY_STEPS = KEYS / 16;  // k-steps of q · kᵀ and of p · v
constexpr int SCORES = KEYS / 2, ACC = {{ acc }};  // accumulators per thread: scores, and the output
// If a tile of V is one box wide, 8 more columns in the N extent append a column of ones to V, so that the tensor cores sum the
// rows of P.
constexpr bool ONES = {{ ones }};
// Lazy rescaling: in the tile that sets the shift, weights are at most 2^-3. In later tiles they may grow to 2 before the output has
// to be rescaled.
constexpr float HEADROOM = 3.0f;
static_assert(HEAD % COLUMNS == 0 && KEYS % 16 == 0 && STAGES >= 2, "whole boxes, and a stage to refill");
static_assert(ONES == (BOXES == 1), "the ones take the descriptor's stride between boxes");
