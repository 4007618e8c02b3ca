// Loads, scaling and stores of a row of scores, in packs of 16 bytes.
constexpr float SCALE_LOG2 = {{ scale_log2 }};  // scale · log2(e), not 0

// Number of elements in the row's first pack that precede the row.
__device__ __forceinline__ unsigned int before(const Row& row) { return row.start % N; }

// Number of packs that contain any of the first `n` elements of a row.
__device__ __forceinline__ unsigned int packs(const Row& row, unsigned int n) { return (before(row) + n + N - 1) / N; }

// Whether a whole pack is within the first `n` elements of the row.
__device__ __forceinline__ bool inside(const Row& row, unsigned int pack, unsigned int n) {
    const unsigned int key = pack * N - before(row);  // key of the pack's first element; wraps if it would be negative
    return key < n && key + N <= n;
}

// Score of a masked key. Its scaled value is −∞, whose exponential is 0.
__device__ __forceinline__ float masked_score() { return __int_as_float(SCALE_LOG2 < 0 ? 0x7f800000 : 0xff800000); }

// Returns the scores of a pack, with `masked_score` outside the row's valid keys. Only packs at the ends of the row contain such elements.
__device__ __forceinline__ void to_scores(float (&value)[N], const Pack<T, N>& raw, const Row& row, unsigned int pack) {
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = to_float(raw.at[j]);
    if (!inside(row, pack, row.valid)) {
        const unsigned int key = pack * N - before(row);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            if (key + j >= row.valid) value[j] = masked_score();
        }
    }
}

// Tree reduction of a pack. Operations on the same level are independent of each other.
template <typename Op> __device__ __forceinline__ float reduce_pack(const float (&value)[N]) {
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

// Maximum of the scaled scores of a pack, divided by |SCALE_LOG2|. A single fma then scales a score and subtracts the maximum. The rounding
// error of the shift is the same for a whole row, and cancels when exponentials are divided by their sum.
__device__ __forceinline__ float pack_max(const float (&value)[N]) {
    float part[N];
#pragma unroll
    for (int j = 0; j < N; ++j) part[j] = SCALE_LOG2 < 0 ? -value[j] : value[j];
    return reduce_pack<Max>(part);
}

// Shift that is added to scaled scores, so that the largest score becomes 0. It is finite even for a row without valid keys.
__device__ __forceinline__ float shift_of(float row_max) {
    return fminf(SCALE_LOG2 < 0 ? row_max * SCALE_LOG2 : -row_max * SCALE_LOG2, -Max::IDENTITY);
}

// Stores 16 bytes in one instruction. For a C++ assignment, the compiler would generate four stores: because of the branch for the ends of
// a row, it does not recognize that the elements are adjacent.
__device__ __forceinline__ void store_16_bytes(T* to, const Pack<T, N>& pack) {
    const unsigned int* word = reinterpret_cast<const unsigned int*>(&pack);
    asm volatile("st.global.v4.b32 [%0], { %1, %2, %3, %4 };"
                 :: "l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]));
}

// Stores only those elements of a pack that belong to the row.
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

// 2^x with an error of at most 2 ulp. Results below 2^−126 become 0. They are negligible, because a row sum is at least 1.
__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x with an error of at most 1 ulp.
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
