// A row of scores by 16 bytes: reading, scaling, writing.
constexpr float SCALE_LOG2 = {{ scale_log2 }};  // scale · log2(e), not 0

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
