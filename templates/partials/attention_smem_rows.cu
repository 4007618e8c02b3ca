// Rows of a head in shared memory. A row has ROW_CHUNKS chunks of 16 bytes, plus one chunk of padding. The first HEAD_CHUNKS chunks are
// copied, and the others are zeros. PITCH is an odd number of chunks, so ldmatrix reads eight rows without bank conflicts.
constexpr unsigned int PER_CHUNK = 16 / sizeof(Element);
constexpr unsigned int HEAD_CHUNKS = HEAD / PER_CHUNK;
constexpr unsigned int ROW_CHUNKS = ROW / PER_CHUNK;
constexpr unsigned int PITCH = (ROW_CHUNKS + 1) * 16;
static_assert(HEAD % PER_CHUNK == 0, "rows are copied 16 bytes at a time");
static_assert(ROW_CHUNKS % 2 == 0, "an even number of chunks and one more is odd");
