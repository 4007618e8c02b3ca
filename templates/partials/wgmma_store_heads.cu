constexpr unsigned int HEADS = {{ heads }}, KV_HEADS = {{ kv_heads }};
constexpr int HEAD = {{ head }}, PAIRS = {{ pairs }};  // columns of a head, and pairs of columns that are turned
constexpr unsigned int Q_FROM = {{ q_from }}, K_FROM = {{ k_from }};  // first columns
{%- if cached %}
constexpr unsigned int V_FROM = {{ v_from }}, BLOCK = {{ block }};  // positions of a block of the cache
{%- endif %}
{%- if turned %}
__constant__ float FREQUENCIES[PAIRS] = { {{ frequencies }} };

// Sine and cosine of a turn of so many radians, as exactly as f32 has that number: whole turns are taken out in two steps, of which
// the second takes what f32 cuts off 2π. Of what is left, the hardware's approximations are off by 2^-20 at most.
__device__ __forceinline__ void sine_cosine(float radians, float& sine, float& cosine) {
    const float turns = rintf(radians * 0.15915494f);
    const float rest = fmaf(turns, 1.7484556e-7f, fmaf(turns, -6.2831855f, radians));
    sine = __sinf(rest) * {{ factor }}, cosine = __cosf(rest) * {{ factor }};
}
{%- endif %}

__device__ __forceinline__ bool is_query(unsigned int column) { return column - Q_FROM < HEADS * HEAD; }
__device__ __forceinline__ bool is_key(unsigned int column) { return column - K_FROM < KV_HEADS * HEAD; }

// Stores this warp's 16 rows of each 64 of the tile, from (row, column) on; tile_bias is read where BIAS. Heads of queries and of keys
// are {% if norm %}normalised{% if turned %} and {% endif %}{% endif %}{% if turned %}turned by their row's position{% endif %}: a lane has the 8 columns from lane % 4 · 8 on of each 32, so that both columns
// of a pair are its own.
__device__ __forceinline__ void store_tile(const float (&acc)[M_TILES][ACCUMULATORS], const float* tile_bias,
{%- if norm %}
                                           const T* q_gamma, const T* k_gamma,
{%- endif %}
{%- if turned %}
                                           const int* positions,
{%- endif %}
{%- if cached %}
                                           const int* token_slots, T* queries, T* cache,
{%- else %}
                                           T* out, T* queries, T* keys,
{%- endif %}
                                           unsigned int row, unsigned int column, unsigned int rows) {
    const int lane = threadIdx.x % 32, mine = lane % 4 * 8;
    row += lane / 4;
{%- if turned %}
    bool turns = false;
#pragma unroll
    for (int h = 0; h < TILE_N / HEAD; ++h) turns |= is_query(column + h * HEAD) || is_key(column + h * HEAD);
{%- endif %}
#pragma unroll
    for (int i = 0; i < M_TILES * 2; ++i) {
        const unsigned int at = row + i / 2 * 64 + i % 2 * 8;
        const bool inside = at < rows;
        const unsigned long long token = at;
{%- if turned %}
        float sines[PAIRS / 4], cosines[PAIRS / 4];
        if (turns) {
            const float position = static_cast<float>(inside ? positions[at] : 0);
#pragma unroll
            for (int c = 0; c < PAIRS / 4; ++c) {
                sine_cosine(__fmul_rn(position, FREQUENCIES[c / 8 * 32 + mine + c % 8]), sines[c], cosines[c]);
            }
        }
{%- endif %}
{%- if cached %}
        const unsigned int slot = inside ? token_slots[at] : 0;
        T* const of_slot = cache + slot / BLOCK * {{ stride }}ull + slot % BLOCK * HEAD;
{%- endif %}
#pragma unroll
        for (int h = 0; h < TILE_N / HEAD; ++h) {
            const unsigned int from = column + h * HEAD;
            if (N % TILE_N != 0 && from >= N) continue;
            float value[HEAD / 4];
#pragma unroll
            for (int c = 0; c < HEAD / 4; ++c) {
                const int group = h * (HEAD / 32) + c / 8;
                value[c] = acc[i / 2][(group * 4 + c % 8 / 2) * 4 + i % 2 * 2 + c % 2];
                if (BIAS) value[c] += tile_bias[group * 32 + mine + c % 8];
            }
            if (is_query(from) || is_key(from)) {
{%- if norm %}
                float squares = 0.0f;
#pragma unroll
                for (int c = 0; c < HEAD / 4; ++c) squares = fmaf(value[c], value[c], squares);
                squares += __shfl_xor_sync(0xffffffff, squares, 1);
                squares += __shfl_xor_sync(0xffffffff, squares, 2);
                const float factor = rsqrtf(squares * (1.0f / HEAD) + {{ eps }});
                const T* gammas = (is_query(from) ? q_gamma : k_gamma) + mine;
#pragma unroll
                for (int group = 0; group < HEAD / 32; ++group) {
                    const uint4 word = __ldg(reinterpret_cast<const uint4*>(gammas + group * 32));
                    const Vector<T> gamma = *reinterpret_cast<const Vector<T>*>(&word);
#pragma unroll
                    for (int j = 0; j < 8; ++j) value[group * 8 + j] *= factor * to_float(gamma.at[j]);
                }
{%- endif %}
{%- if turned %}
#pragma unroll
                for (int c = 0; c < PAIRS / 4; ++c) {
                    float &a = value[c], &b = value[c + PAIRS / 4];
                    const float was = a;
                    a = a * cosines[c] - b * sines[c];
                    b = b * cosines[c] + was * sines[c];
                }
{%- endif %}
            }
            T* to = queries + token * (HEADS * HEAD) + (from - Q_FROM);
{%- if cached %}
            if (!is_query(from)) to = of_slot + (is_key(from) ? from - K_FROM : from - V_FROM + KV_HEADS * HEAD) * BLOCK;
{%- else %}
            if (!is_query(from)) to = is_key(from) ? keys + token * (KV_HEADS * HEAD) + (from - K_FROM) : out + token * N + from;
{%- endif %}
#pragma unroll
            for (int group = 0; group < HEAD / 32; ++group) {
                uint4 word;
                word.x = pack_pair<T>(value[group * 8], value[group * 8 + 1]), word.y = pack_pair<T>(value[group * 8 + 2], value[group * 8 + 3]);
                word.z = pack_pair<T>(value[group * 8 + 4], value[group * 8 + 5]), word.w = pack_pair<T>(value[group * 8 + 6], value[group * 8 + 7]);
                if (inside) *reinterpret_cast<uint4*>(to + group * 32 + mine) = word;
            }
        }
    }
}
