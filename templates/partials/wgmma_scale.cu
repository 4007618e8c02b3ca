// Multiplies the accumulators by the scales of their columns.
{% if swap_ab %}using TileScale = float4;  // scales of a lane's columns

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
{% else %}struct TileScale { float at[(BLOCK_N + 127) / 128]; };  // scales that a thread loads

// Loads the scales of a tile's columns. Each thread of a warpgroup has every 128th scale.
__device__ __forceinline__ TileScale load_tile_scale(const float* scale, unsigned int tile_n) {
    TileScale of;
#pragma unroll
    for (int i = 0; i < (BLOCK_N + 127) / 128; ++i) {
{% if gated %}        const int row = i * 128 + threadIdx.x % 128, at = tile_n * TILE_N + row % TILE_N;
        of.at[i] = at < N && row < BLOCK_N ? scale[at + row / TILE_N * N] : 0.0f;
{% else %}        const int at = tile_n * BLOCK_N + i * 128 + threadIdx.x % 128;
        of.at[i] = at < N ? scale[at] : 0.0f;
{% endif %}    }
    return of;
}

__device__ __forceinline__ void store_tile_scale(float* tile_scale, const TileScale& of) {
#pragma unroll
    for (int i = 0; i < (BLOCK_N + 127) / 128; ++i) {
        const int at = i * 128 + threadIdx.x % 128;
        if (at < BLOCK_N) tile_scale[at] = of.at[i];
    }
}

__device__ __forceinline__ void scale_tile(float (&acc)[M_TILES][ACCUMULATORS], const float* tile_scale) {
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