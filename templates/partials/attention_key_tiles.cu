constexpr unsigned int KEY_TILE = {{ key_tile }};  // keys per key tile

__device__ __forceinline__ unsigned int key_tiles(unsigned int n) { return (n + KEY_TILE - 1) / KEY_TILE; }
