constexpr unsigned int HEADS = {{ heads }};
constexpr int HEAD = {{ head }};
constexpr int COLUMNS = {{ columns }};         // of a box: a swizzled row of 128 or 64 bytes
constexpr int KEYS = {{ keys }};               // of a tile
constexpr unsigned int GROUPS = {{ groups }};  // warpgroups that share tiles of keys, 64 queries each
constexpr unsigned int STREAMS = {{ streams }};  // of tiles in a block, each with its warpgroups
constexpr unsigned int STAGES = {{ stages }};    // tiles of k and v of a stream in shared memory
constexpr float SCALE_LOG2 = {{ scale_log2 }};  // scale · log2(e)
constexpr unsigned long long OUT_STRIDE = {{ out_stride }};

constexpr unsigned int ROWS = GROUPS * 64;
constexpr int BOXES = HEAD / COLUMNS;  // side by side in a head
constexpr unsigned int ROW_BYTES = COLUMNS * 2;
constexpr unsigned int Q_BYTES = BOXES * 64 * ROW_BYTES;  // of a warpgroup
constexpr unsigned int TILE_BYTES = BOXES * KEYS * ROW_BYTES;
constexpr int HEAD_STEPS = HEAD / 16, KEY_STEPS = KEYS / 16;
constexpr int SCORES = KEYS / 2, SUMS = {{ sums }};  // of a thread
// Where values are one box wide, a column of ones after them sums the weights.
constexpr bool ONES = {{ ones }};
constexpr unsigned int ONES_BYTES = ONES ? 16 * ROW_BYTES : 0;
// The largest weight of the tile that set the maximum is 2^-3: those of later tiles may grow to 2.
constexpr float HEADROOM = 3.0f;
static_assert(HEAD % COLUMNS == 0 && KEYS % 16 == 0 && STAGES >= 2, "whole boxes, and room to refill");
static_assert(ONES == (BOXES == 1), "boxes of values are one distance apart, and the ones are elsewhere");
