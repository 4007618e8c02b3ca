// Where the scores of a sequence and what their softmax needs lie. `pairs` is the sum of the squared
// lengths of the sequences before it, `tokens` that of their lengths; those of the whole batch give
// the size of a head. Dividing sums instead of summing quotients leaves gaps between sequences, and
// spares a prefix sum: a sequence of n tokens has at least n rows before the next one's first.
{% include "partials/attention_key_tiles.cu" %}

// Rows of n scores lie this far apart, so that each starts at a multiple of 16 bytes.
__device__ __forceinline__ unsigned int score_pitch(unsigned int n) { return (n + 7) / 8 * 8; }

__device__ __forceinline__ unsigned long long score_start(unsigned long long pairs, unsigned long long tokens) {
    return pairs / 8 * 8 + tokens * 8;
}

// A row has one partial, a maximum and a sum, for each tile of keys.
__device__ __forceinline__ unsigned long long partial_start(unsigned long long pairs, unsigned long long tokens) {
    return pairs / KEY_TILE + tokens;
}

// Index of row 0 of a head and sequence.
__device__ __forceinline__ unsigned long long scores_of(unsigned int head, unsigned int sequence, unsigned int batch,
                                                        const int* __restrict__ cu_lens,
                                                        const long long* __restrict__ pair_offsets) {
    return head * score_start(pair_offsets[batch], cu_lens[batch]) +
        score_start(pair_offsets[sequence], cu_lens[sequence]);
}

__device__ __forceinline__ unsigned long long partials_of(unsigned int head, unsigned int sequence, unsigned int batch,
                                                          const int* __restrict__ cu_lens,
                                                          const long long* __restrict__ pair_offsets) {
    return head * partial_start(pair_offsets[batch], cu_lens[batch]) +
        partial_start(pair_offsets[sequence], cu_lens[sequence]);
}
