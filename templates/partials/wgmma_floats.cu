// acc += a · bᵀ, an m64k{{ mma_k }} MMA{% if not quantized_rows %} with N = MMA_N{% endif %}.
// If `accumulate` is 0, acc is overwritten. a is x and b is the weight; with swap-AB, a is the weight and b is x. Warp w of a warpgroup has
// the rows from 16w on. Lane l holds acc[4j + e] for row l / 4 + e / 2 · 8 and column 8j + l % 4 · 2 + e % 2.{% if quantized_rows %}
// In shared memory, two adjacent rows of the weight (a pair) are stored as one row. The MMA multiplies only the first (of_pair = 0) or the
// second (of_pair = 1) row of each pair, and changes only the accumulators of these rows. The accumulators of both MMAs together have the
// layout of one MMA over all rows.{% endif %}
__device__ __forceinline__ void warpgroup_mma(float (&acc){% if quantized_rows and swap_ab %}[M_TILES]{% endif %}[ACCUMULATORS], unsigned long long a, unsigned long long b, int accumulate{% if quantized_rows %}, int of_pair{% endif %}) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %{{ accumulators + 2 }}, 0;\n"
{% if e4m3 %}                 "wgmma.mma_async.sync.aligned.m64n{{ mma_n }}k32.f32.e4m3.e4m3 "
                 "{ {{ acc_registers }} }, %{{ accumulators }}, %{{ accumulators + 1 }}, p, 1, 1;\n"
{% else %}                 "wgmma.mma_async.sync.aligned.m64n{{ mma_n }}k16.f32.{{ storage }}.{{ storage }} "
                 "{ {{ acc_registers }} }, %{{ accumulators }}, %{{ accumulators + 1 }}, p, 1, 1, 0, 0;\n"
{% endif %}                 "}"
                 : {{ acc_operands }}
                 : "l"(a), "l"(b), "r"(accumulate));
}
