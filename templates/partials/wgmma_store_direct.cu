// Results straight from registers to memory. The weight's rows lie in shared memory in an order (RowOrder::Quads)
// by which a lane has 8 neighbouring columns, 16 bytes, of each 32, in rows l / 4 and l / 4 + 8 of a warp's 16: four
// lanes write 64 bytes of a row. No shared memory, no fence, no copy to wait for.
constexpr unsigned int RESULT_BYTES = 0;

__device__ __forceinline__ void load_weight(unsigned int to, const TensorMap& weight, int column, int row,
                                            unsigned int barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, { %2, %3, %3, %3, %4 }], [%5];" ::"r"(to), "l"(&weight), "r"(column), "r"(0),
                 "r"(row / 32), "r"(barrier)
                 : "memory");
}

// The tile at (row, column), of which this warp has 16 rows of each 64; shifts is the bias of its columns, if there is one.
__device__ __forceinline__ void store_tile(const float (&sums)[M_TILES][SUMS], const float* shifts, T* out,
                                           unsigned int row, unsigned int column, unsigned int rows) {
    const int lane = threadIdx.x % 32;
    row += lane / 4;
    T* const first = out + static_cast<unsigned long long>(row) * N + column + lane % 4 * 8;
#pragma unroll
    for (int group = 0; group < BLOCK_N / 32; ++group) {
        float4 add[2] = {};
        if (BIAS) {
            const float4* from = reinterpret_cast<const float4*>(shifts + group * 32 + lane % 4 * 8);
            add[0] = from[0], add[1] = from[1];
        }
        const float shift[8] = {add[0].x, add[0].y, add[0].z, add[0].w, add[1].x, add[1].y, add[1].z, add[1].w};
        const bool inside = N % BLOCK_N == 0 || column + group * 32 < N;
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
            Vector<T> results;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* sum = &sums[i / 2][(group * 4 + j) * 4 + i % 2 * 2];
                reinterpret_cast<unsigned int*>(&results)[j] =
                    pack_pair<T>(finished(sum[0], shift[j * 2]), finished(sum[1], shift[j * 2 + 1]));
            }
            const int down = i / 2 * 64 + i % 2 * 8;
            if (inside && row + down < rows) {
                *reinterpret_cast<uint4*>(first + down * N + group * 32) = *reinterpret_cast<const uint4*>(&results);
            }
        }
    }
}
