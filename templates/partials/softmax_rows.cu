// Finds the rows of scores of a warp's queries, in a batch of sequences that may have different lengths.
using T = {{ storage }};
constexpr int N = {{ vector }};  // elements of a 16-byte pack
constexpr bool MASKED = {{ masked }};

// Scores of one query of one head.
struct Row {
    unsigned long long start;  // index of the first score
    unsigned int length;       // number of keys; 0 past the last query
    unsigned int valid;        // number of leading keys that are not masked
};

// For each x < X, finds the row of query first + x · TEAMS + team in head blockIdx.y. `first` is uniform over the warp, which has TEAMS
// teams.
//
// If all sequences have the same length, offsets are computed without a search. Otherwise, the warp searches the batch with 32 probes at a
// time, until its lanes hold a window of sequences that contains all rows of the warp. For up to 32 sequences, this takes one round of
// loads.
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
{% if causal %}            row[x].valid = exists ? query % longest + 1 : 0;
{% else %}            row[x].valid = MASKED && exists ? __ldg(valid_lens + query / longest) : row[x].length;
{% endif %}        }
        return;
    }
    constexpr unsigned int ROWS = X * TEAMS;
    const unsigned int lane = threadIdx.x % 32;
    // `first` is in one of the `span` sequences from `low` on. The warp's other rows are at most ROWS − 1 sequences later.
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
            const unsigned int started = __ballot_sync(ALL_LANES, start <= query);
            if (t == team) owner = __popc(started) - 1;
        }
        const unsigned int query = first + x * TEAMS + team;
        const bool exists = query < tokens;
        const unsigned int from = __shfl_sync(ALL_LANES, start, owner);
        const unsigned int length = __shfl_sync(ALL_LANES, end, owner) - from;
        const unsigned long long offset = __shfl_sync(ALL_LANES, pairs, owner);
{% if causal %}        const unsigned int keys = query - from + 1;
{% else %}        const unsigned int keys = MASKED ? __shfl_sync(ALL_LANES, valid, owner) : length;
{% endif %}        row[x].start = exists ? head + offset + static_cast<unsigned long long>(query - from) * length : 0;
        row[x].length = exists ? length : 0;
        row[x].valid = exists ? keys : 0;
    }
}
