// A group of threads handles a row of WIDTH elements. The CTA has GROUPS groups.
using T = {{ storage }};
constexpr int WIDTH = {{ width }};
constexpr int N = {{ vector }};  // elements per pack; a pack is one access
constexpr int THREADS = {{ threads }};
constexpr int PACKS = WIDTH / N;
constexpr int GROUP = PACKS < THREADS ? PACKS : THREADS;  // threads per group
constexpr int GROUPS = THREADS / GROUP;
constexpr int PACKS_PER_THREAD = (PACKS + GROUP - 1) / GROUP;  // packs of a row per thread

// Whether pack `h` of this thread exists. Only the last pack of a thread may be missing.
__device__ __forceinline__ bool has_pack(int h) {
    return (h + 1) * GROUP <= PACKS || h * GROUP + static_cast<int>(threadIdx.x % GROUP) < PACKS;
}

// First column of pack `h` of this thread, or of the row's last pack if pack `h` does not exist.
__device__ __forceinline__ int pack_column(int h) {
    const int pack = h * GROUP + static_cast<int>(threadIdx.x % GROUP);
    return (has_pack(h) ? pack : PACKS - 1) * N;
}
