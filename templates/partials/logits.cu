// Logits as sortable integers, and reductions over a CTA.
using T = {{ storage }};
using Mass = unsigned long long;
constexpr unsigned int THREADS = {{ threads }};
constexpr unsigned int WARPS = THREADS / 32;
constexpr unsigned int VOCABULARY = {{ vocabulary }};
constexpr unsigned int N = {{ vector }};                            // logits per access
constexpr unsigned int WORDS = (VOCABULARY + 31) / 32;              // 32-bit words of a bitmap of the vocabulary
constexpr unsigned int MOST_GROUPS = {{ most_groups }};
constexpr unsigned int PACKS = {{ packs }};                          // accesses per group
// A warp reads one piece of the row of logits at a time, in accesses of N tokens. The tokens of a piece form 32 groups, one per lane: group
// l consists of accesses l, l + 32, l + 64, … of the piece.
constexpr unsigned int PIECE = 32 * N * PACKS, PIECES = (VOCABULARY + PIECE - 1) / PIECE, GROUPS = 32 * PIECES;
constexpr unsigned int MOST_CANDIDATES = {{ most_candidates }};
constexpr unsigned int MOST_K = MOST_GROUPS / 2;                    // max k of top-k for which the group maxima are used
constexpr unsigned int ALL_LANES = 0xffffffffu;

// Maps floats to integers in the same order. -0 is mapped like 0.
__device__ __forceinline__ unsigned int key_of(float x) {
    const unsigned int bits = __float_as_uint(x + 0.0f);
    return bits ^ (static_cast<unsigned int>(static_cast<int>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float of_key(unsigned int key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}
constexpr unsigned int KEY_OF_NOTHING = 0x007fffffu;  // -∞
constexpr unsigned int KEY_OF_WRONG = 0xffffffffu;    // NaN or +∞

struct Larger {
    static __device__ __forceinline__ Mass of(Mass a, Mass b) { return a > b ? a : b; }
};
struct Added {
    static __device__ __forceinline__ Mass of(Mass a, Mass b) { return a + b; }
};

// Reduces over the CTA. Every thread receives the result.
template <typename Op> __device__ __forceinline__ Mass all_reduce(Mass value, Mass* parts) {
    for (int offset = 16; offset > 0; offset /= 2) value = Op::of(value, __shfl_xor_sync(ALL_LANES, value, offset));
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    value = parts[threadIdx.x % WARPS];
    for (unsigned int offset = WARPS / 2; offset > 0; offset /= 2) value = Op::of(value, __shfl_xor_sync(ALL_LANES, value, offset));
    __syncthreads();  // the next reduction may overwrite `parts`
    return value;
}

// Inclusive prefix sum over the lanes.
__device__ __forceinline__ Mass sum_up_to_lane(Mass value) {
    for (int offset = 1; offset < 32; offset *= 2) {
        const Mass other = __shfl_up_sync(ALL_LANES, value, offset);
        if (threadIdx.x % 32 >= offset) value += other;
    }
    return value;
}

// Calls `visit(id, logit)` for each token that this thread handles.
template <typename Visit> __device__ __forceinline__ void each(const T* row, Visit visit) {
#pragma unroll 4
    for (unsigned int i = threadIdx.x * N; i < VOCABULARY; i += THREADS * N) {
        const Pack<T, N> pack = load_pack<N>(row + i);
#pragma unroll
        for (int j = 0; j < N; ++j) visit(i + j, to_float(pack.at[j]));
    }
}

// Returns the largest key such that the tokens with this key or a larger key have a total weight of at least `needed`. `ruled(id, logit)`
// applies the request's rules to a logit, and `weigh(key, logit)` returns the weight of a token. Each pass over the row finds two bits.
template <typename Ruled, typename Weigh>
__device__ unsigned int threshold_of(const T* row, Ruled ruled, Weigh weigh, Mass needed, Mass* parts) {
    unsigned int threshold = 0;
    for (int shift = 30; shift >= 0; shift -= 2) {
        Mass sums[3] = {};
        each(row, [&](unsigned int id, float x) {
            x = ruled(id, x);
            const unsigned int key = key_of(x);
            if (key <= KEY_OF_NOTHING || key >> shift <= threshold >> shift) return;
            const Mass weight = weigh(key, x);
#pragma unroll
            for (unsigned int i = 0; i < 3; ++i) sums[i] += key >= (threshold | (i + 1) << shift) ? weight : 0;
        });
#pragma unroll
        for (int i = 0; i < 3; ++i) sums[i] = all_reduce<Added>(sums[i], parts);
        // The sums decrease with i, because fewer keys reach a larger threshold. The number of sums that are at least `needed` is therefore
        // the next two bits of the result.
        threshold |= static_cast<unsigned int>((sums[0] >= needed) + (sums[1] >= needed) + (sums[2] >= needed)) << shift;
    }
    return threshold;
}

// Number of neighboring lanes that compare each of `n` items with all other items: the largest power of two, up to 8, for which there are
// enough threads.
__device__ __forceinline__ unsigned int lookers_of(unsigned int n) {
    unsigned int lookers = 1;
    while (lookers < 8 && 2 * lookers * n <= THREADS) lookers *= 2;
    return lookers;
}

// Sum over the lanes that share an item. All lanes of a warp must call this function.
template <typename Value> __device__ __forceinline__ Value sum_of_lookers(Value value, unsigned int lookers) {
    for (unsigned int offset = lookers / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

// Merges the groups, whose max keys are `bests`, into at least 2k sets. Returns the k-th largest of the sets' maxima, or 0 if fewer than k
// sets contain tokens. The result is a lower bound of the k-th largest key of the row. Every thread receives it. `merged` has room for
// max(64, 4k) elements, and `found` must be 0.
__device__ __forceinline__ unsigned int kth_of_maxima(const unsigned int* bests, unsigned int k, unsigned int* merged, unsigned int* found) {
    unsigned int n = 64;
    while (n < 2 * k) n *= 2;
    for (unsigned int i = threadIdx.x; i < n; i += THREADS) {
        unsigned int largest = 0;
        for (unsigned int group = i; group < MOST_GROUPS; group += n) largest = max(largest, bests[group]);
        merged[i] = largest;
    }
    __syncthreads();
    const unsigned int lookers = lookers_of(n);
    for (unsigned int nth = threadIdx.x; nth < n * lookers; nth += THREADS) {
        const unsigned int i = nth / lookers, key = merged[i];
        unsigned int before = 0;
#pragma unroll 8
        for (unsigned int j = nth % lookers; j < n; j += lookers) before += merged[j] > key || (merged[j] == key && j < i);
        if (sum_of_lookers(before, lookers) == k - 1) *found = key;
    }
    __syncthreads();
    return *found;
}

// Calls `visit(id, logit)` for each token of the n groups in `groups`. A thread handles up to AT_ONCE accesses at a time.
template <typename Group, typename Visit>
__device__ __forceinline__ void each_of_groups(const T* row, const Group* groups, unsigned int n, Visit visit) {
    constexpr unsigned int AT_ONCE = N > 1 ? 2 : 8;  // accesses in flight
    for (unsigned int i = threadIdx.x; i < n * PACKS; i += THREADS * AT_ONCE) {
        Pack<T, N> packs[AT_ONCE];
        // First token of an access, or VOCABULARY if there is no such access.
        auto first_of = [&](unsigned int a) {
            const unsigned int at = i + a * THREADS, nth = at % PACKS;
            if (at >= n * PACKS) return VOCABULARY;
            const unsigned int group = static_cast<unsigned int>(groups[at / PACKS]);
            return group / 32 * PIECE + (nth * 32 + group % 32) * N;
        };
        unsigned int first[AT_ONCE];
#pragma unroll
        for (unsigned int a = 0; a < AT_ONCE; ++a) {
            first[a] = first_of(a);
            if (first[a] < VOCABULARY) packs[a] = load_pack<N>(row + first[a]);
        }
#pragma unroll
        for (unsigned int a = 0; a < AT_ONCE; ++a) {
            if (first[a] >= VOCABULARY) continue;
#pragma unroll
            for (unsigned int j = 0; j < N; ++j) visit(first[a] + j, to_float(packs[a].at[j]));
        }
    }
}
