// Which output tile this block computes. Blocks that run together take GROUP_M row tiles times a
// few column tiles, so that both operands are read from L2.
struct TileIndex { unsigned int m, n; };

template <unsigned int TILES_N, unsigned int GROUP_M>
__device__ __forceinline__ TileIndex tile_of_block(unsigned int tiles_m) {
    const unsigned int first_m = blockIdx.x / (GROUP_M * TILES_N) * GROUP_M;
    const unsigned int in_group = blockIdx.x % (GROUP_M * TILES_N);
    const unsigned int height = min(tiles_m - first_m, GROUP_M);
    return {first_m + in_group % height, in_group / height};
}
