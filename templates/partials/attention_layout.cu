// Layout of the scores and the softmax partials of a batch. The start of a sequence is computed from two sums over the preceding sequences:
// `pairs`, the sum of their squared lengths, and `tokens`, the sum of their lengths. The sums over the whole batch give the stride of a
// head. Rounding leaves gaps between sequences: a sequence of n tokens has room for at least n rows.
{% include "partials/attention_key_tiles.cu" %}

// Pitch of rows of n scores, in scores. Each row starts at a multiple of 8 scores, so that accesses of 16 bytes are aligned.
__device__ __forceinline__ unsigned int score_pitch(unsigned int n) { return (n + 7) / 8 * 8; }

__device__ __forceinline__ unsigned long long score_start(unsigned long long pairs, unsigned long long tokens) {
    return pairs / 8 * 8 + tokens * 8;
}

// Returns the start of a sequence's partials. A row has one partial (row maximum and row sum) per key tile.
__device__ __forceinline__ unsigned long long partial_start(unsigned long long pairs, unsigned long long tokens) {
    return pairs / KEY_TILE + tokens;
}

// Index of the first score of a head and sequence.
__device__ __forceinline__ unsigned long long scores_of(unsigned int head, unsigned int sequence, unsigned int batch,
                                                        const int* __restrict__ cu_lens,
                                                        const long long* __restrict__ pair_offsets) {
    return head * score_start(pair_offsets[batch], cu_lens[batch]) +
        score_start(pair_offsets[sequence], cu_lens[sequence]);
}

// Index of the first partial of a head and sequence.
__device__ __forceinline__ unsigned long long partials_of(unsigned int head, unsigned int sequence, unsigned int batch,
                                                          const int* __restrict__ cu_lens,
                                                          const long long* __restrict__ pair_offsets) {
    return head * partial_start(pair_offsets[batch], cu_lens[batch]) +
        partial_start(pair_offsets[sequence], cu_lens[sequence]);
}
