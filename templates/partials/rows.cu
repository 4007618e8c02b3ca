// Rows of WIDTH elements in registers: a team of WARPS warps has X rows, and each thread every TEAM-th pack of each.
using T = {{ storage }};
constexpr int WIDTH = {{ width }};
constexpr int N = {{ vector }};  // elements of a pack, which is one access
constexpr int X = {{ x_rows }};  // rows of a team, whose reductions interleave
constexpr int WARPS = {{ warps_per_row }};
constexpr int TEAM = 32 * WARPS;
constexpr int TEAMS = {{ threads }} / TEAM;
constexpr int PACKS = WIDTH / N;
constexpr int PACKS_PER_THREAD = (PACKS + TEAM - 1) / TEAM;  // packs of a row in a thread

__device__ __forceinline__ unsigned int team_first_row() {
    return (blockIdx.x * TEAMS + threadIdx.x / TEAM) * X;
}

// Index of a row's first element. Past the end it is the last row's, so that loads need no branch; stores are guarded.
__device__ __forceinline__ unsigned long long row_start(unsigned int row, unsigned int rows) {
    return static_cast<unsigned long long>(min(row, rows - 1)) * WIDTH;
}

// Whether this thread's pack `h` exists: only the last may not.
__device__ __forceinline__ bool has_pack(int h) {
    return (h + 1) * TEAM <= PACKS || h * TEAM + static_cast<int>(threadIdx.x % TEAM) < PACKS;
}

// First column of this thread's pack `h`, or of the row's last pack if that does not exist.
__device__ __forceinline__ int pack_column(int h) {
    const int pack = h * TEAM + static_cast<int>(threadIdx.x % TEAM);
    return (has_pack(h) ? pack : PACKS - 1) * N;
}
