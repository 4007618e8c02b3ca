// A group of threads covers a row of WIDTH elements; the CTA has GROUPS groups.
using T = {{ storage }};
constexpr int WIDTH = {{ width }};
constexpr int N = {{ vector }};  // elements of a pack, which is one access
constexpr int THREADS = {{ threads }};
constexpr int PACKS = WIDTH / N;
constexpr int GROUP = PACKS < THREADS ? PACKS : THREADS;  // threads of a group
constexpr int GROUPS = THREADS / GROUP;
constexpr int PACKS_PER_THREAD = (PACKS + GROUP - 1) / GROUP;  // packs of a row in a thread

// Whether this thread's pack `h` exists: only the last may not.
__device__ __forceinline__ bool has_pack(int h) {
    return (h + 1) * GROUP <= PACKS || h * GROUP + static_cast<int>(threadIdx.x % GROUP) < PACKS;
}

// First column of this thread's pack `h`, or of the row's last pack if that does not exist.
__device__ __forceinline__ int pack_column(int h) {
    const int pack = h * GROUP + static_cast<int>(threadIdx.x % GROUP);
    return (has_pack(h) ? pack : PACKS - 1) * N;
}
