// For each of n vectors of the query, writes its max dot product over this warp's rows to `partial`. The warp's rows are in groups of 32
// (one row per lane) that start at `at`, `at + step`, … before `end`.
__device__ __forceinline__ void products(uint4* staged, float* partial, const T* query, int n, const T* vectors,
                                         const int* taken, int at, int end, int step) {
    const int lane = threadIdx.x % 32;
    __syncthreads();  // the previous vectors of the query and their maxima have been read
    stage(staged, query, n);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    float largest[QUERIES];
#pragma unroll
    for (int j = 0; j < QUERIES; ++j) largest[j] = __uint_as_float(0xff800000u);  // minus infinity
    for (; at < end; at += step) {
        const T* row = vectors + static_cast<long long>(__ldg(taken + min(at + lane, end - 1))) * WIDTH;
        float sum[QUERIES] = {};
#pragma unroll 2
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const uint4 a = load_columns(row, chunk * N);
#pragma unroll
            for (int j = 0; j < QUERIES; ++j) {
                const uint4 b = staged[j * CHUNKS + chunk];
                sum[j] = fmaf(__uint_as_float(a.x), __uint_as_float(b.x), sum[j]);
                sum[j] = fmaf(__uint_as_float(a.y), __uint_as_float(b.y), sum[j]);
                sum[j] = fmaf(__uint_as_float(a.z), __uint_as_float(b.z), sum[j]);
                sum[j] = fmaf(__uint_as_float(a.w), __uint_as_float(b.w), sum[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < QUERIES; ++j) largest[j] = nan_max(largest[j], sum[j]);
    }
#pragma unroll
    for (int j = 0; j < QUERIES; ++j) {
        float all = largest[j];
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) all = nan_max(all, __shfl_xor_sync(ALL_LANES, all, offset));
        if (lane == 0) partial[j] = all;
    }
    __syncthreads();
}
