constexpr int BOXES = HEAD / COLUMNS;  // boxes of COLUMNS columns per head
constexpr unsigned int ROW_BYTES = COLUMNS * 2;
constexpr unsigned int Q_BYTES = BOXES * 64 * ROW_BYTES;  // 64 queries
constexpr unsigned int TILE_BYTES = BOXES * KEYS * ROW_BYTES;
constexpr int HEAD_STEPS = HEAD / 16, KEY_STEPS = KEYS / 16;  // steps along k of q · kᵀ and of p · v
constexpr int SCORES = KEYS / 2, ACC = {{ acc }};  // accumulators per thread: scores, and the output
// If a row of V fits in one box, the N extent of p · v is 8 columns larger than a row. The first additional column of V is all ones, so
// that the tensor cores also compute the row sums of P.
constexpr bool ONES = {{ ones }};
// Lazy rescaling of the weights P = 2^(scaled score − shift). A tile that raises the shift has weights of at most 2^-HEADROOM. Later tiles
// keep the shift, and the output is not rescaled, as long as all weights are below 2.
constexpr float HEADROOM = 3.0f;
static_assert(HEAD % COLUMNS == 0 && KEYS % 16 == 0 && STAGES >= 2, "whole boxes, and a stage to refill");
static_assert(ONES == (BOXES == 1), "the ones take the descriptor's stride between boxes");
