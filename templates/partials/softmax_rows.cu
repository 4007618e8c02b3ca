// Ragged rows of scores: where each lies, and 16 bytes of it at a time.
using T = {{ storage }};
constexpr int N = {{ vector }};  // elements of 16 bytes
constexpr bool MASKED = {{ masked }};
constexpr float SCALE_LOG2 = {{ scale_log2 }};  // scale · log2(e), not 0

// The scores of one query of one head.
struct Row {
    unsigned long long start;  // the first of them
    unsigned int length;       // 0 past the last query
    unsigned int valid;        // keys that count: the first ones
};

// The rows of queries first + x · TEAMS + team, x < X, of head blockIdx.y. `first` is one for the
// whole warp, which has TEAMS teams.
//
// Where all sequences are of one length, rows lie one after another and nothing is looked up. Else
// the warp narrows the sequences by 32 probes at once, until every lane holds one of a window that
// has all of the warp's rows: one round of loads for up to 32 sequences.
template <int X, int TEAMS>
__device__ __forceinline__ void find_rows(
    Row (&row)[X], unsigned int first, unsigned int team, const int* cu_lens, const long long* pair_offsets,
    const int* valid_lens, unsigned int batch, unsigned int tokens, unsigned int longest) {
    if (static_cast<unsigned long long>(batch) * longest == tokens) {
#pragma unroll
        for (int x = 0; x < X; ++x) {
            const unsigned int query = first + x * TEAMS + team;
            const bool exists = query < tokens;
            row[x].start = exists ? (static_cast<unsigned long long>(blockIdx.y) * tokens + query) * longest : 0;
            row[x].length = exists ? longest : 0;
            row[x].valid = MASKED && exists ? __ldg(valid_lens + query / longest) : row[x].length;
        }
        return;
    }
    constexpr unsigned int ROWS = X * TEAMS;
    const unsigned int lane = threadIdx.x % 32;
    // `first` is in one of the `span` sequences from `low` on. The other rows of the warp are at most
    // ROWS − 1 sequences later.
    unsigned int low = 0, span = batch;
    while (batch - low > 32 && span > 33 - ROWS) {
        const unsigned int stride = (span + 31) / 32, probe = lane * stride;
        const bool starts_before = probe < span && __ldg(cu_lens + low + probe) <= static_cast<int>(first);
        const unsigned int last = __popc(__ballot_sync(ALL_LANES, starts_before)) - 1;
        low += last * stride;
        span = min(stride, span - last * stride);
    }
    const unsigned int mine = min(low + lane, batch);
    const int start = __ldg(cu_lens + mine), end = __ldg(cu_lens + min(mine + 1, batch));
    const long long pairs = __ldg(pair_offsets + mine);
    const int valid = MASKED ? __ldg(valid_lens + min(mine, batch - 1)) : 0;
    const unsigned long long head = static_cast<unsigned long long>(blockIdx.y) * __ldg(pair_offsets + batch);
#pragma unroll
    for (int x = 0; x < X; ++x) {
        unsigned int owner = 0;
#pragma unroll
        for (int t = 0; t < TEAMS; ++t) {
            const int query = first + x * TEAMS + t;
            const unsigned int holders = __ballot_sync(ALL_LANES, start <= query);
            if (t == team) owner = __popc(holders) - 1;
        }
        const unsigned int query = first + x * TEAMS + team;
        const bool exists = query < tokens;
        const unsigned int from = __shfl_sync(ALL_LANES, start, owner);
        const unsigned int length = __shfl_sync(ALL_LANES, end, owner) - from;
        const unsigned long long offset = __shfl_sync(ALL_LANES, pairs, owner);
        const unsigned int keys = MASKED ? __shfl_sync(ALL_LANES, valid, owner) : length;
        row[x].start = exists ? head + offset + static_cast<unsigned long long>(query - from) * length : 0;
        row[x].length = exists ? length : 0;
        row[x].valid = exists ? keys : 0;
    }
}

// Elements of the row's first pack that belong to what lies before it.
__device__ __forceinline__ unsigned int before(const Row& row) { return row.start % N; }

// Packs that the first `n` elements of a row touch, from the one that it starts in.
__device__ __forceinline__ unsigned int packs(const Row& row, unsigned int n) { return (before(row) + n + N - 1) / N; }

// Whether all of a pack is among the first `n` elements of the row.
__device__ __forceinline__ bool inside(const Row& row, unsigned int pack, unsigned int n) {
    const unsigned int key = pack * N - before(row);  // of the pack's first element: wraps below 0
    return key < n && key + N <= n;
}

// The score of a key that does not count: scaled it is −∞, and its exponential 0.
__device__ __forceinline__ float no_score() { return __int_as_float(SCALE_LOG2 < 0 ? 0x7f800000 : 0xff800000); }

// The scores of a pack, `no_score` where it has none that count. Only a row's ends have such.
__device__ __forceinline__ void to_scores(float (&value)[N], const Pack<T, N>& raw, const Row& row, unsigned int pack) {
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = to_float(raw.at[j]);
    if (!inside(row, pack, row.valid)) {
        const unsigned int key = pack * N - before(row);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            if (key + j >= row.valid) value[j] = no_score();
        }
    }
}

// Combines the elements of a pack, in steps that do not wait for one another.
template <typename Op> __device__ __forceinline__ float of_pack(const float (&value)[N]) {
    float part[N];
#pragma unroll
    for (int j = 0; j < N; ++j) part[j] = value[j];
#pragma unroll
    for (int step = N / 2; step > 0; step /= 2) {
#pragma unroll
        for (int j = 0; j < step; ++j) part[j] = Op::of(part[j], part[j + step]);
    }
    return part[0];
}

// The largest scaled score of a pack, but for the factor |SCALE_LOG2|: so scaling joins the subtraction of
// the maximum in one operation. Its rounding is the same for a whole row, and cancels in the quotient.
__device__ __forceinline__ float largest(const float (&value)[N]) {
    float part[N];
#pragma unroll
    for (int j = 0; j < N; ++j) part[j] = SCALE_LOG2 < 0 ? -value[j] : value[j];
    return of_pack<Max>(part);
}

// What scaled scores are moved by, so that the largest becomes 0. Finite also where there are none.
__device__ __forceinline__ float shift_of(float largest) {
    return fminf(SCALE_LOG2 < 0 ? largest * SCALE_LOG2 : -largest * SCALE_LOG2, -Max::IDENTITY);
}

// 16 bytes in one store. Written in C++, the compiler cuts it in four: it does not see that the elements
// are neighbours once it has chosen between them and the branch for edges.
__device__ __forceinline__ void store_16_bytes(T* to, const Pack<T, N>& pack) {
    const unsigned int* word = reinterpret_cast<const unsigned int*>(&pack);
    asm volatile("st.global.v4.b32 [%0], { %1, %2, %3, %4 };"
                 :: "l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]));
}

// Writes what a pack has of the row, and nothing of its neighbours.
__device__ __forceinline__ void store_keys(T* out, const float (&value)[N], const Row& row, unsigned int pack) {
    T* to = out + row.start - before(row) + static_cast<unsigned long long>(pack) * N;
    if (inside(row, pack, row.length)) {
        store_16_bytes(to, to_pack<T>(value));
    } else {
        const unsigned int key = pack * N - before(row);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            if (key + j < row.length) to[j] = from_float<T>(value[j]);
        }
    }
}

// 2^x to 2 units in the last place; 0 below 2^−126, which is far below any probability that is stored.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x to 1 unit in the last place.
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
