using T = {{ storage }};
constexpr int WIDTH = {{ width }};
constexpr int N = {{ vector }};  // elements of one access
constexpr int THREADS = {{ threads }};
constexpr int PACKS = WIDTH / N;
constexpr int GROUP = PACKS < THREADS ? PACKS : THREADS;  // threads of a group
constexpr int GROUPS = THREADS / GROUP;
constexpr int HELD = (PACKS + GROUP - 1) / GROUP;  // packs of a row in one thread

// Whether this thread's pack `h` exists, counted within its group: only the last one may not.
__device__ __forceinline__ bool held(int h) {
    return (h + 1) * GROUP <= PACKS || h * GROUP + static_cast<int>(threadIdx.x % GROUP) < PACKS;
}

// First column of this thread's pack `h`, or of the row's last pack where that does not exist.
__device__ __forceinline__ int held_column(int h) {
    const int pack = h * GROUP + static_cast<int>(threadIdx.x % GROUP);
    return (held(h) ? pack : PACKS - 1) * N;
}
