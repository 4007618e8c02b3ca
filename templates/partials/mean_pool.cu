// Mean over the tokens of a sequence, computed by one CTA.
{% include "partials/pool_groups.cu" %}
// Whether this thread receives results from `mean_pool`.
__device__ __forceinline__ bool in_first_group() { return threadIdx.x < GROUP; }

// `mean` receives the complete mean in the first group of threads, and 0 in the other groups.
__device__ __forceinline__ void mean_pool(
    float (&mean)[PACKS_PER_THREAD][N], const T* x, const int* cu_lens, unsigned int sequence) {
    const int begin = cu_lens[sequence], end = cu_lens[sequence + 1];
    const int group = threadIdx.x / GROUP;
{% set total = "mean" %}{% include "partials/pool_sum.cu" %}
    const float share = 1.0f / static_cast<float>(end - begin);
#pragma unroll
    for (int h = 0; h < PACKS_PER_THREAD; ++h) {
#pragma unroll
        for (int j = 0; j < N; ++j) mean[h][j] = has_pack(h) ? mean[h][j] * share : 0.0f;
    }
}
