constexpr unsigned int ROWS = GROUPS * 64;
constexpr int BOXES = HEAD / COLUMNS;  // side by side in a head
constexpr unsigned int ROW_BYTES = COLUMNS * 2;
constexpr unsigned int Q_BYTES = BOXES * 64 * ROW_BYTES;  // of a warpgroup
constexpr unsigned int TILE_BYTES = BOXES * KEYS * ROW_BYTES;
constexpr int HEAD_STEPS = HEAD / 16, KEY_STEPS = KEYS / 16;
constexpr int SCORES = KEYS / 2, SUMS = {{ sums }};  // of a thread
// Where values are one box wide, a column of ones after them sums the weights.
constexpr bool ONES = {{ ones }};
constexpr unsigned int LAG = GROUPS > 1;  // tiles that a warpgroup may be ahead before it waits for the others
// The largest weight of the tile that set the maximum is 2^-3: those of later tiles may grow to 2.
constexpr float HEADROOM = 3.0f;
static_assert(HEAD % COLUMNS == 0 && KEYS % 16 == 0 && STAGES >= 2 + LAG, "whole boxes, and room to refill");
static_assert(ONES == (BOXES == 1), "boxes of values are one distance apart, and the ones are elsewhere");
constexpr unsigned int MOST_BLOCKS = {{ most_blocks }};  // that run at once
