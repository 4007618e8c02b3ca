struct TileIndex { unsigned int m, n; };

// Returns the output tile of this CTA with grouped rasterization. CTAs that run at the same time process GROUP_M row tiles and a few column
// tiles, so that both operands are reused in L2.
template <unsigned int TILES_N, unsigned int GROUP_M>
__device__ __forceinline__ TileIndex tile_of_cta(unsigned int tiles_m) {
    const unsigned int first_m = blockIdx.x / (GROUP_M * TILES_N) * GROUP_M;
    const unsigned int in_group = blockIdx.x % (GROUP_M * TILES_N);
    const unsigned int height = min(tiles_m - first_m, GROUP_M);
    return {first_m + in_group % height, in_group / height};
}
