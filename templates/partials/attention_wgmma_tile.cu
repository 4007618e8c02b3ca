constexpr int BOXES = HEAD / COLUMNS;  // boxes side by side in a head
constexpr unsigned int ROW_BYTES = COLUMNS * 2;
constexpr unsigned int Q_BYTES = BOXES * 64 * ROW_BYTES;  // 64 queries
constexpr unsigned int TILE_BYTES = BOXES * KEYS * ROW_BYTES;
constexpr int HEAD_STEPS = HEAD / 16, KEY_STEPS = KEYS / 16;  // k-steps of q · kᵀ and of p · v
constexpr int SCORES = KEYS / 2, ACC = {{ acc }};  // accumulators of a thread: scores, and the output
// Where a tile of V is one box wide, an N-extent of 8 more appends a column of ones to V, so that the tensor cores
// sum the rows of P.
constexpr bool ONES = {{ ones }};
// Lazy rescaling: the tile that sets the shift has weights up to 2^-3, so those of later tiles may grow to 2
// before the output has to be rescaled.
constexpr float HEADROOM = 3.0f;
static_assert(HEAD % COLUMNS == 0 && KEYS % 16 == 0 && STAGES >= 2, "whole boxes, and a stage to refill");
static_assert(ONES == (BOXES == 1), "the ones take the descriptor's stride between boxes");
