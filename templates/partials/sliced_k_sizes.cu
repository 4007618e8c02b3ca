// Two warpgroups share out a block's steps of k: the first half and the second. Weights are there before x is made, so
// they go on to registers: a product of 64 by 64 whose operands both lie in shared memory takes all of its bandwidth,
// and x, which is on its way there, waits.
constexpr int WARPGROUP_STEPS = (STEPS + 1) / 2;             // of a warpgroup, at most
constexpr int RESIDENT = WARPGROUP_STEPS < {{ max_resident }} ? WARPGROUP_STEPS : {{ max_resident }};  // whose weights are in registers: the last ones
constexpr int STREAMED = WARPGROUP_STEPS - RESIDENT;
constexpr bool EVEN = K_STEPS % (2 * SPLITS) == 0;       // all warpgroups have as many steps
constexpr int ROW_OCTETS = ROWS / 8, HALF = (ROW_OCTETS + 1) / 2;  // octets of tokens, and those that a warpgroup finishes
constexpr int EXCHANGED = HALF + (TOKENS - ROWS) / 8;         // whose acc it send_to on
constexpr int PRODUCER_WARP = 8;  // the warp that copies
// Steps whose weights lie before x. Those of the others, the second warpgroup's, are in registers when x comes.
constexpr int UNALIASED_STEPS = {{ unaliased_steps }};
static_assert(K_STEPS / SPLITS / 2 * WEIGHT_BYTES >= EXCHANGED * PARTIAL_BYTES, "acc are passed on where weights were");
static_assert(UNALIASED_STEPS == STEPS || (UNALIASED_STEPS - WARPGROUP_STEPS >= STREAMED && (UNALIASED_STEPS - WARPGROUP_STEPS) * WEIGHT_BYTES >= EXCHANGED * PARTIAL_BYTES),
              "x lies where weights were that are in registers, and not where acc are passed on");

// As above with the weights of a warpgroup in registers.
__device__ __forceinline__ void warpgroup_mma(float (&acc)[ACCUMULATORS], const unsigned int (&weight)[4],
                                             unsigned long long x, int accumulate) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %{{ accumulators + 5 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ tokens }}k16.f32.{{ storage }}.{{ storage }} "
                 "{ {{ acc_registers }} }, { %{{ accumulators }}, %{{ accumulators + 1 }}, %{{ accumulators + 2 }}, %{{ accumulators + 3 }} }, "
                 "%{{ accumulators + 4 }}, p, 1, 1, 0;\n"
                 "}"
                 : {{ acc_operands }}
                 : "r"(weight[0]), "r"(weight[1]), "r"(weight[2]), "r"(weight[3]), "l"(x), "r"(accumulate));
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
template <int THREADS> __device__ __forceinline__ void named_barrier_sync(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
template <int THREADS> __device__ __forceinline__ void named_barrier_arrive(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
