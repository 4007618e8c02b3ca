// Grid-stride loop over packs.
using T = {{ storage }};
constexpr int N = {{ vector }};  // elements per pack; a pack is one access

__device__ __forceinline__ unsigned long long first_pack() {
    return static_cast<unsigned long long>(blockIdx.x) * {{ threads }} + threadIdx.x;
}

__device__ __forceinline__ unsigned long long pack_step() {
    return static_cast<unsigned long long>(gridDim.x) * {{ threads }};
}
