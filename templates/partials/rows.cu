// Rows of WIDTH elements in registers: a team of WARPS warps holds X rows, each thread every
// TEAM-th pack of each.
using T = {{ storage }};
constexpr int WIDTH = {{ width }};
constexpr int N = {{ vector }};  // elements of one access
constexpr int X = {{ x_rows }};  // rows that a team reduces together
constexpr int WARPS = {{ warps_per_row }};
constexpr int TEAM = 32 * WARPS;
constexpr int TEAMS = {{ threads }} / TEAM;
constexpr int PACKS = WIDTH / N;
constexpr int HELD = (PACKS + TEAM - 1) / TEAM;  // packs of a row in one thread

__device__ __forceinline__ unsigned int team_first_row() {
    return (blockIdx.x * TEAMS + threadIdx.x / TEAM) * X;
}

// Where row `row` starts. Past the end it is the last row: loads need no branch, stores are guarded.
__device__ __forceinline__ unsigned long long row_start(unsigned int row, unsigned int rows) {
    return static_cast<unsigned long long>(min(row, rows - 1)) * WIDTH;
}

// Whether this thread's pack `h` exists: only the last one may not.
__device__ __forceinline__ bool held(int h) {
    return (h + 1) * TEAM <= PACKS || h * TEAM + static_cast<int>(threadIdx.x % TEAM) < PACKS;
}

// First column of this thread's pack `h`, or of the row's last pack where that does not exist.
__device__ __forceinline__ int held_column(int h) {
    const int pack = h * TEAM + static_cast<int>(threadIdx.x % TEAM);
    return (held(h) ? pack : PACKS - 1) * N;
}
