// Sliced-K: the first consumer warpgroup has the first half of a CTA's steps along k, and the second warpgroup has the second half. Weights
// arrive before x and are moved to registers. A 64×64 MMA with both operands in shared memory would use the full bandwidth of shared memory
// and delay the loads of x.
constexpr int WARPGROUP_STEPS = (STEPS + 1) / 2;  // max steps of a warpgroup
constexpr int RESIDENT = WARPGROUP_STEPS < {{ max_resident }} ? WARPGROUP_STEPS : {{ max_resident }};  // last steps, with weights in registers
constexpr int FROM_SHARED = WARPGROUP_STEPS - RESIDENT;  // first steps, whose weights remain in shared memory
constexpr bool EVEN = K_STEPS % (2 * SPLITS) == 0;       // all warpgroups have the same number of steps
constexpr int ROW_OCTETS = ROWS / 8, HALF = (ROW_OCTETS + 1) / 2;  // octets (8 tokens) per tile, and octets that a warpgroup finishes
constexpr int EXCHANGED = HALF + (TOKENS - ROWS) / 8;              // octets that a warpgroup sends to the other warpgroup
constexpr int PRODUCER_WARP = 8;
// Number of steps whose weights stay in shared memory. x overwrites the weights of later steps, which the second warpgroup has moved to
// registers before x is loaded.
constexpr int UNALIASED_STEPS = {{ unaliased_steps }};
static_assert(K_STEPS / SPLITS / 2 * WEIGHT_BYTES >= EXCHANGED * PARTIAL_BYTES, "accumulators are exchanged where weights were");
static_assert(UNALIASED_STEPS == STEPS || (UNALIASED_STEPS - WARPGROUP_STEPS >= FROM_SHARED && (UNALIASED_STEPS - WARPGROUP_STEPS) * WEIGHT_BYTES >= EXCHANGED * PARTIAL_BYTES),
              "x overwrites only weights that are in registers, and not where accumulators are exchanged");

// Like the other overload of warpgroup_mma, but with the weights as A fragments in registers.
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

// Loads four 8×8 matrices from shared memory. Lanes 8i .. 8i + 7 provide the addresses of the rows of matrix i.
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

// Waits at a named barrier until all THREADS threads have arrived.
template <int THREADS> __device__ __forceinline__ void named_barrier_sync(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
// Arrives at a named barrier of THREADS threads without waiting.
template <int THREADS> __device__ __forceinline__ void named_barrier_arrive(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
