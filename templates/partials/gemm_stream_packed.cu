constexpr unsigned int X_BYTES = MMA_N * 256;  // two boxes of 64 columns
constexpr int WEIGHT_ROWS = {% if gated %}2 * N{% else %}N{% endif %}, PADDED_ROWS = (WEIGHT_ROWS + 7) / 8 * 8;
constexpr int SCALES = {% if group > 0 %}128 / GROUP{% else %}0{% endif %};  // scales per weight row in a stage
constexpr unsigned int VALUE_BYTES = 2 * BLOCK_N * ROW_BYTES;
constexpr unsigned int STAGE_BYTES = X_BYTES + (VALUE_BYTES + SCALES * BLOCK_N * {{ scale_bytes }} + 1023) / 1024 * 1024;
constexpr size_t ALL_VALUES = static_cast<size_t>(K_STAGES) * 2 * PADDED_ROWS * ROW_BYTES;  // bytes before the scales of the weight

// Copies `bytes` bytes (a multiple of 16) from global to shared memory. All lanes of a warp call this function, and one lane issues the
// copy: see warp_load_box.
__device__ __forceinline__ void warp_copy_bulk(unsigned int to, const unsigned char* from, unsigned int bytes, unsigned int barrier) {
    asm volatile("{\n"
                 ".reg .pred elected;\n"
                 "elect.sync _|elected, 0xffffffff;\n"
                 "@elected cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n"
                 "}" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
{%- if row_scaled %}

__device__ __forceinline__ const float* row_scales(const unsigned char* weight) {
    return reinterpret_cast<const float*>(weight + ALL_VALUES);
}
{%- endif %}

{% if warp_mma %}// Loads four matrices of eight rows of 16 bytes. Lane i passes the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(unsigned int (&to)[4], unsigned int row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}

// acc += weight · xᵀ, an m16n8k16 MMA of a warp. In lane l, acc[e] (e from 0 to 3) belongs to row l / 4 + e / 2 · 8 of `weight` and token
// l % 4 · 2 + e % 2.
__device__ __forceinline__ void warp_mma(float* acc, const unsigned int (&weight)[4], unsigned int x_low, unsigned int x_high) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{{ storage }}.{{ storage }}.f32 "
                 "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(weight[0]), "r"(weight[1]), "r"(weight[2]), "r"(weight[3]), "r"(x_low), "r"(x_high));
}
{%- else %}// acc += weight · xᵀ, an m64k16 MMA with N = MMA_N and with the weight's fragments in registers. If `accumulate` is 0, acc is
// overwritten. In lane l of warp w of the warpgroup, acc[4j + e] (octet j, e from 0 to 3) belongs to row 16w + l / 4 + e / 2 · 8 of
// `weight` and token 8j + l % 4 · 2 + e % 2.
__device__ __forceinline__ void warpgroup_mma_packed(float (&acc)[ACCUMULATORS], const unsigned int (&weight)[4], unsigned long long x,
                                                    int accumulate) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %{{ accumulators + 5 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ mma_n }}k16.f32.{{ storage }}.{{ storage }} "
                 "{ {{ acc_registers }} }, { %{{ accumulators }}, %{{ accumulators + 1 }}, %{{ accumulators + 2 }}, %{{ accumulators + 3 }} }, %{{ accumulators + 4 }}, p, 1, 1, 0;\n"
                 "}"
                 : {{ acc_operands }}
                 : "r"(weight[0]), "r"(weight[1]), "r"(weight[2]), "r"(weight[3]), "l"(x), "r"(accumulate));
}
{%- endif %}
