// Rows of WIDTH elements in registers. A team of WARPS warps has X rows, and a thread has every TEAM-th pack of each row.
using T = {{ storage }};
constexpr int WIDTH = {{ width }};
constexpr int N = {{ vector }};  // elements per pack; a pack is one access
constexpr int X = {{ x_rows }};  // rows per team; their reductions are interleaved
constexpr int WARPS = {{ warps_per_row }};
constexpr int TEAM = 32 * WARPS;
constexpr int TEAMS = {{ threads }} / TEAM;
constexpr int PACKS = WIDTH / N;
constexpr int PACKS_PER_THREAD = (PACKS + TEAM - 1) / TEAM;  // packs of a row per thread

__device__ __forceinline__ unsigned int team_first_row() {
    return (blockIdx.x * TEAMS + threadIdx.x / TEAM) * X;
}

// Index of a row's first element. Rows past the end are clamped to the last row, so that loads need no branch; stores are guarded.
__device__ __forceinline__ unsigned long long row_start(unsigned int row, unsigned int rows) {
    return static_cast<unsigned long long>(min(row, rows - 1)) * WIDTH;
}

// Whether pack `h` of this thread exists. Only the last pack of a thread may be missing.
__device__ __forceinline__ bool has_pack(int h) {
    return (h + 1) * TEAM <= PACKS || h * TEAM + static_cast<int>(threadIdx.x % TEAM) < PACKS;
}

// First column of pack `h` of this thread, or of the row's last pack if pack `h` does not exist.
__device__ __forceinline__ int pack_column(int h) {
    const int pack = h * TEAM + static_cast<int>(threadIdx.x % TEAM);
    return (has_pack(h) ? pack : PACKS - 1) * N;
}
