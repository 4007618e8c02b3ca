constexpr unsigned int HEADS = {{ heads }}, KV_HEADS = {{ kv_heads }};
constexpr int HEAD = {{ head }}, PAIRS = {{ pairs }};  // columns per head, and rotated pairs of columns per head
constexpr unsigned int Q_FROM = {{ q_from }}, K_FROM = {{ k_from }};  // first columns of the queries and of the keys
__constant__ float FREQUENCIES[PAIRS] = { {{ frequencies }} };

// Sine and cosine of an angle in radians. The angle's f32 value is treated as exact. Whole turns, of which there are fewer than 2^22, are
// subtracted in two steps. The second step corrects the rounding of 2π to f32. For the remainder, the hardware's approximations have an
// error of at most 2^-20.
__device__ __forceinline__ void sine_cosine(float radians, float& sine, float& cosine) {
    constexpr float WHOLE = 12582912.0f;  // adding and subtracting it rounds to the nearest integer
    const float turns = __fadd_rn(fmaf(radians, 0.15915494f, WHOLE), -WHOLE);
    const float rest = fmaf(turns, 1.7484556e-7f, fmaf(turns, -6.2831855f, radians));
    sine = __sinf(rest) * {{ factor }}, cosine = __cosf(rest) * {{ factor }};
}

__device__ __forceinline__ bool is_query(unsigned int column) { return column - Q_FROM < HEADS * HEAD; }
__device__ __forceinline__ bool is_key(unsigned int column) { return column - K_FROM < KV_HEADS * HEAD; }

// Positions of a thread's rows, from `row` on. They are loaded before the mainloop, and used after it.
struct RowData { int position[M_TILES * 2]; };
__device__ __forceinline__ RowData load_row_data(const int* positions, unsigned int row, unsigned int rows) {
    RowData data = {};
#pragma unroll
    for (int i = 0; i < M_TILES * 2; ++i) {
        const unsigned int at = row + threadIdx.x % 32 / 4 + i / 2 * 64 + i % 2 * 8;
        if (at < rows) data.position[i] = __ldg(positions + at);
    }
    return data;
}

// Stores this warp's rows, which are 16 of each 64 rows of the tile at (row, column). tile_bias is read only if BIAS. Heads of queries and
// keys are rotated according to the position of their row: columns c and c + PAIRS of a head are rotated together. PAIRS is a multiple of
// 32, so a lane, which holds 8 of each 32 columns (from column lane % 4 · 8 on), has both columns of such a pair.
__device__ __forceinline__ void store_tile(const float (&acc)[M_TILES][ACCUMULATORS], const float* tile_bias, const RowData& data, T* out, T* queries,
                                           T* keys, unsigned int row, unsigned int column, unsigned int rows) {
    constexpr int TILE_HEADS = TILE_N / HEAD;
    const int lane = threadIdx.x % 32, mine = lane % 4 * 8;
    row += lane / 4;
    bool turns = false;
#pragma unroll
    for (int h = 0; h < TILE_HEADS; ++h) turns |= is_query(column + h * HEAD) || is_key(column + h * HEAD);
#pragma unroll
    for (int i = 0; i < M_TILES * 2; ++i) {
        const unsigned int at = row + i / 2 * 64 + i % 2 * 8;
        const unsigned long long token = at;
        // Reads this lane's 8 columns of the `group`-th 32 columns of head h, and adds the bias.
        const auto load = [&](int h, int group, float (&value)[8]) {
            const int of_tile = h * (HEAD / 32) + group;
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                value[c] = acc[i / 2][(of_tile * 4 + c / 2) * 4 + i % 2 * 2 + c % 2];
                if (BIAS) value[c] += tile_bias[of_tile * 32 + mine + c];
            }
        };
        const auto store = [&](int h, int group, const float (&value)[8]) {
            const unsigned int from = column + h * HEAD;
            T* to = queries + token * (HEADS * HEAD) + (from - Q_FROM);
            if (!is_query(from)) to = is_key(from) ? keys + token * (KV_HEADS * HEAD) + (from - K_FROM) : out + token * N + from;
            uint4 word;
            word.x = pack_pair<T>(value[0], value[1]), word.y = pack_pair<T>(value[2], value[3]);
            word.z = pack_pair<T>(value[4], value[5]), word.w = pack_pair<T>(value[6], value[7]);
            if (at < rows && (N % TILE_N == 0 || from < N)) *reinterpret_cast<uint4*>(to + group * 32 + mine) = word;
        };
#pragma unroll
        for (int pair = 0; pair < PAIRS / 32; ++pair) {
            float sine[8], cosine[8];
            if (turns) {
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    const float radians = __fmul_rn(static_cast<float>(data.position[i]), FREQUENCIES[pair * 32 + mine + c]);
                    sine_cosine(radians, sine[c], cosine[c]);
                }
            }
#pragma unroll
            for (int h = 0; h < TILE_HEADS; ++h) {
                float a[8], b[8];
                load(h, pair, a), load(h, pair + PAIRS / 32, b);
                if (is_query(column + h * HEAD) || is_key(column + h * HEAD)) {
#pragma unroll
                    for (int c = 0; c < 8; ++c) {
                        const float was = a[c];
                        a[c] = a[c] * cosine[c] - b[c] * sine[c];
                        b[c] = b[c] * cosine[c] + was * sine[c];
                    }
                }
                store(h, pair, a), store(h, pair + PAIRS / 32, b);
            }
        }
#pragma unroll
        for (int group = PAIRS / 16; group < HEAD / 32; ++group) {
#pragma unroll
            for (int h = 0; h < TILE_HEADS; ++h) {
                float value[8];
                load(h, group, value), store(h, group, value);
            }
        }
    }
}
