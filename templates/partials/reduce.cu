// All-reductions of X independent values (TurboTransformers 4.1.2, warpAllReduce_XElem).
constexpr unsigned int ALL_LANES = 0xffffffffu;

struct Sum {
    static constexpr float IDENTITY = 0.0f;
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};
struct Max {
    // The identity is finite, because the difference of two infinite values would be NaN.
    static constexpr float IDENTITY = -3.4028235e38f;
    static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

// Reduces each of X values over the LANES lanes (a power of two) of a team. Every lane receives all X results. The X shuffles of a step are
// issued back to back, which hides their latency.
template <typename Op, int LANES = 32, int X> __device__ __forceinline__ void warp_all_reduce_xelem(float (&value)[X]) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        float other[X];
#pragma unroll
        for (int i = 0; i < X; ++i) other[i] = __shfl_xor_sync(ALL_LANES, value[i], offset);
#pragma unroll
        for (int i = 0; i < X; ++i) value[i] = Op::of(value[i], other[i]);
    }
}

// Like warp_all_reduce_xelem, but over a team of WARPS warps, which is the whole CTA if WARPS > 1. All X values are exchanged through
// shared memory at once (`blockReduce_XElem`). Each warp then reduces the partial results separately.
template <typename Op, int WARPS, int LANES = 32, int X>
__device__ __forceinline__ void team_all_reduce_xelem(float (&value)[X]) {
    warp_all_reduce_xelem<Op, LANES>(value);
    if constexpr (WARPS > 1) {
        constexpr int PARTS = WARPS <= 2 ? 2 : WARPS <= 4 ? 4 : WARPS <= 8 ? 8 : WARPS <= 16 ? 16 : 32;
        __shared__ float partial[X][WARPS];
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % PARTS;
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < X; ++i) partial[i][warp] = value[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < X; ++i) value[i] = part < WARPS ? partial[i][part] : Op::IDENTITY;
        warp_all_reduce_xelem<Op, PARTS>(value);
        __syncthreads();  // the next reduction may overwrite `partial`
    }
}
