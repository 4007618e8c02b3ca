// Mean over a sequence's tokens with one CTA: each group of threads sums every GROUPS-th token, and the first group adds the partial
// sums.
{% include "partials/pool_groups.cu" %}
// Whether this thread has results after `mean_pool`.
__device__ __forceinline__ bool in_first_group() { return threadIdx.x < GROUP; }

// `mean` is complete in the first group, and 0 in the others.
__device__ __forceinline__ void mean_pool(
    float (&mean)[PACKS_PER_THREAD][N], const T* x, const int* cu_lens, unsigned int sequence) {
    const int begin = cu_lens[sequence], end = cu_lens[sequence + 1];
    const int group = threadIdx.x / GROUP;
    if (group < GROUPS) {
#pragma unroll 4
        for (int t = begin + group; t < end; t += GROUPS) {
            const T* from = x + static_cast<long long>(t) * WIDTH;
#pragma unroll
            for (int h = 0; h < PACKS_PER_THREAD; ++h) {
                const Pack<T, N> a = load_pack<N>(from + pack_column(h));
#pragma unroll
                for (int j = 0; j < N; ++j) mean[h][j] += to_float(a.at[j]);
            }
        }
    }
    if constexpr (GROUPS > 1) {  // in this case a thread has one pack
        __shared__ float partial[GROUPS][N][GROUP];
        if (group < GROUPS) {
#pragma unroll
            for (int j = 0; j < N; ++j) partial[group][j][threadIdx.x % GROUP] = mean[0][j];
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < N; ++j) {
            mean[0][j] = 0.0f;
            if (group == 0) {
#pragma unroll 8
                for (int g = 0; g < GROUPS; ++g) mean[0][j] += partial[g][j][threadIdx.x];
            }
        }
    }
    const float share = 1.0f / static_cast<float>(end - begin);
#pragma unroll
    for (int h = 0; h < PACKS_PER_THREAD; ++h) {
#pragma unroll
        for (int j = 0; j < N; ++j) mean[h][j] = has_pack(h) ? mean[h][j] * share : 0.0f;
    }
}
