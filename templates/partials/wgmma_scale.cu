// Multiplies the accumulators by the scales of their columns.
{% if swap_ab %}using TileScale = float4;  // of a lane's columns

__device__ __forceinline__ TileScale load_tile_scale(const float* scale, unsigned int column) {
    if (N % BLOCK_N != 0 && column >= N) return {};
    return *reinterpret_cast<const float4*>(scale + column + threadIdx.x % 32 / 4 * 4);
}

__device__ __forceinline__ void scale_tile(float (&acc)[M_TILES][ACCUMULATORS], const TileScale& by) {
#pragma unroll
    for (int j = 0; j < ACCUMULATORS; j += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            acc[0][j + e] *= by.x, acc[0][j + 2 + e] *= by.y;
            acc[1][j + e] *= by.z, acc[1][j + 2 + e] *= by.w;
        }
    }
}
{% else %}__device__ __forceinline__ void scale_tile(float (&acc)[M_TILES][ACCUMULATORS], const float* tile_scale) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; ++j) {
        const int column = {% if direct_store %}j / 4 * 32 + lane % 4 * 8 + j % 4 * 2{% else %}j * 8 + lane % 4 * 2{% endif %};
        const float2 by = *reinterpret_cast<const float2*>(tile_scale + column);
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
            float* of = &acc[i][j * 4];
            of[0] *= by.x, of[1] *= by.y, of[2] *= by.x, of[3] *= by.y;
        }
    }
}
{% endif %}