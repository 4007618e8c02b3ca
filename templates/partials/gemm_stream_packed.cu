constexpr unsigned int X_BYTES = MMA_N * 256;  // two boxes of 64 columns
constexpr int WEIGHT_ROWS = {% if gated %}2 * N{% else %}N{% endif %}, PADDED_ROWS = (WEIGHT_ROWS + 7) / 8 * 8;
constexpr int SCALES = {% if group > 0 %}128 / GROUP{% else %}0{% endif %};  // scales of a row in a stage
constexpr unsigned int VALUE_BYTES = 2 * BLOCK_N * ROW_BYTES;
constexpr unsigned int STAGE_BYTES = X_BYTES + (VALUE_BYTES + SCALES * BLOCK_N * 4 + 1023) / 1024 * 1024;
constexpr size_t ALL_VALUES = static_cast<size_t>(K_STAGES) * 2 * PADDED_ROWS * ROW_BYTES;  // bytes before the scales of the weight

// Copies bytes in multiples of 16 from global to shared memory.
__device__ __forceinline__ void copy_bulk(unsigned int to, const unsigned char* from, unsigned int bytes, unsigned int barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}
{%- if row_scaled %}

__device__ __forceinline__ const float* row_scales(const unsigned char* weight) {
    return reinterpret_cast<const float*>(weight + ALL_VALUES);
}
{%- endif %}

// acc += weight · xᵀ like warpgroup_mma, with the fragments of the weight in registers.
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
