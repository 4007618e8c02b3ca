// The rows of a document are the rows of A, and the vectors of the query are the columns of B. A lane holds 8 neighboring columns of a row
// for two MMAs. The order of columns in an MMA is therefore permuted, in the same way for both operands.
constexpr int TILES = QUERIES / 8;
constexpr int RING = CHUNKS < 4 ? CHUNKS : 4;  // chunks in flight
constexpr int STEPS = (CHUNKS + RING - 1) / RING * RING;

// For each of n vectors of the query, writes its max dot product over this warp's rows to `partial`. The warp's rows are in groups of 16
// that start at `at`, `at + step`, … before `end`.
__device__ __forceinline__ void products(uint4* staged, float* partial, const T* query, int n, const T* vectors,
                                         const int* taken, int at, int end, int step) {
    const int lane = threadIdx.x % 32, column = lane % 4 * 8;
    int row[2], next[2];
    uint4 ring[RING][2];
    const auto find = [&](int (&to)[2], int first) {
#pragma unroll
        for (int h = 0; h < 2; ++h) to[h] = __ldg(taken + min(first + lane / 4 + 8 * h, end - 1));
    };
    const auto load = [&](uint4 (&to)[2], const int (&from)[2], int chunk) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            to[h] = load_columns(vectors + static_cast<long long>(from[h]) * WIDTH, chunk * CHUNK + column);
        }
    };
    __syncthreads();  // the previous vectors of the query and their maxima have been read
    stage(staged, query, n);
    if (at < end) {
        find(row, at);
        find(next, at + step);
#pragma unroll
        for (int r = 0; r < RING; ++r) load(ring[r], row, r);
    }
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    float largest[TILES][2];
#pragma unroll
    for (int j = 0; j < TILES; ++j) largest[j][0] = largest[j][1] = __uint_as_float(0xff800000u);  // minus infinity
    for (; at < end; at += step) {
        float sum[TILES][4] = {};
#pragma unroll 1
        for (int first = 0; first < STEPS; first += RING) {
#pragma unroll
            for (int r = 0; r < RING; ++r) {
                const int chunk = first + r;
                const uint4 low = ring[r][0], high = ring[r][1];
                if (chunk + RING < STEPS) {
                    load(ring[r], row, chunk + RING);
                } else if (at + step < end) {
                    load(ring[r], next, chunk + RING - STEPS);
                }
                if (STEPS == CHUNKS || chunk < CHUNKS) {
                    const unsigned int a[4] = {low.x, high.x, low.y, high.y}, a_next[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                    for (int j = 0; j < TILES; ++j) {
                        const uint4 b = staged[(j * CHUNKS + chunk) * 32 + lane];
                        mma<T>(sum[j], a, b.x, b.y);
                        mma<T>(sum[j], a_next, b.z, b.w);
                    }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) largest[j][e] = nan_max(largest[j][e], nan_max(sum[j][e], sum[j][e + 2]));
        }
        row[0] = next[0];
        row[1] = next[1];
        find(next, at + 2 * step);
    }
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float all = largest[j][e];
#pragma unroll
            for (int offset = 4; offset < 32; offset *= 2) all = nan_max(all, __shfl_xor_sync(ALL_LANES, all, offset));
            if (lane < 4) partial[j * 8 + lane * 2 + e] = all;
        }
    }
    __syncthreads();
}
