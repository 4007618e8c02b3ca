// Grouped rasterization for L2 reuse: traverses GROUP_M row tiles column by column. GROUP_M and TILES_N are constants of the including
// kernel.
struct TileIndex { unsigned int m, n; };
__device__ __forceinline__ TileIndex tile_of(unsigned int index, unsigned int tiles_m) {
    const unsigned int first_m = index / (GROUP_M * TILES_N) * GROUP_M;
    const unsigned int in_group = index % (GROUP_M * TILES_N);
    const unsigned int height = min(tiles_m - first_m, static_cast<unsigned int>(GROUP_M));
    return {first_m + in_group % height, in_group / height};
}
