// Two warpgroups share out a block's steps of k: the first half and the second. Weights are there before x is made, so
// they go on to registers: a product of 64 by 64 whose operands both lie in shared memory takes all of its bandwidth,
// and x, which is on its way there, waits.
constexpr int GROUP_STEPS = (STEPS + 1) / 2;             // of a warpgroup, at most
constexpr int HELD = GROUP_STEPS < {{ most_held }} ? GROUP_STEPS : {{ most_held }};  // whose weights are in registers: the last ones
constexpr int UNHELD = GROUP_STEPS - HELD;
constexpr bool EVEN = K_STEPS % (2 * SPLITS) == 0;       // all warpgroups have as many steps
constexpr int EIGHTS = ROWS / 8, HALF = (EIGHTS + 1) / 2;  // eights of tokens, and those that a warpgroup finishes
constexpr int PASSED = HALF + (TOKENS - ROWS) / 8;         // whose sums it passes on
constexpr int COPIES = 8;  // the warp that copies
// Steps whose weights lie before x. Those of the others, the second warpgroup's, are in registers when x comes.
constexpr int BEFORE_X = {{ before_x }};
static_assert(K_STEPS / SPLITS / 2 * WEIGHT_BYTES >= PASSED * PART_BYTES, "sums are passed on where weights were");
static_assert(BEFORE_X == STEPS || (BEFORE_X - GROUP_STEPS >= UNHELD && (BEFORE_X - GROUP_STEPS) * WEIGHT_BYTES >= PASSED * PART_BYTES),
              "x lies where weights were that are in registers, and not where sums are passed on");

// As above with the weights of a warpgroup in registers.
__device__ __forceinline__ void multiply_add(float (&sums)[SUMS], const unsigned int (&weight)[4],
                                             unsigned long long x, int add) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %{{ sums + 5 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ tokens }}k16.f32.{{ storage }}.{{ storage }} "
                 "{ {{ sum_registers }} }, { %{{ sums }}, %{{ sums + 1 }}, %{{ sums + 2 }}, %{{ sums + 3 }} }, "
                 "%{{ sums + 4 }}, p, 1, 1, 0;\n"
                 "}"
                 : {{ sum_operands }}
                 : "r"(weight[0]), "r"(weight[1]), "r"(weight[2]), "r"(weight[3]), "l"(x), "r"(add));
}

// Four 8×8 matrices from shared memory: lanes 8i .. 8i + 7 give the addresses of the rows of matrix i.
__device__ __forceinline__ void load_matrices(unsigned int (&to)[4], unsigned int address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void store_four(unsigned int to, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], { %1, %2, %3, %4 };" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

__device__ __forceinline__ void load_four(float (&to)[4], unsigned int from) {
    asm volatile("ld.shared.v4.f32 { %0, %1, %2, %3 }, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "r"(from) : "memory");
}

// Barriers of so many threads, for those that go on when all are there, and for those that do not wait.
template <int THREADS> __device__ __forceinline__ void sync_of(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
template <int THREADS> __device__ __forceinline__ void arrive_at(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
