constexpr int BOXES = HEAD / COLUMNS;  // side by side in a head
constexpr unsigned int ROW_BYTES = COLUMNS * 2;
constexpr unsigned int Q_BYTES = BOXES * 64 * ROW_BYTES;  // of 64 queries
constexpr unsigned int TILE_BYTES = BOXES * KEYS * ROW_BYTES;
constexpr int HEAD_STEPS = HEAD / 16, KEY_STEPS = KEYS / 16;
constexpr int SCORES = KEYS / 2, SUMS = {{ sums }};  // of a thread
// Where values are one box wide, a column of ones after them sums the weights.
constexpr bool ONES = {{ ones }};
