// acc += a · bᵀ, an m64k32 MMA of 8-bit integers. If `accumulate` is 0, acc is overwritten. a is x and b is the weight; with swap-AB, a is
// the weight and b is x. x has signed integers, and the weight has unsigned codes, which are its integers plus 128. Warp w of a warpgroup
// has the rows from 16w on. Lane l holds acc[4j + e] for row l / 4 + e / 2 · 8 and column 8j + l % 4 · 2 + e % 2.
// In shared memory, two adjacent rows of the weight (a pair) are stored as one row. The MMA multiplies only the first (of_pair = 0) or the
// second (of_pair = 1) row of each pair, and changes only the accumulators of these rows. The accumulators of both MMAs together have the
// layout of one MMA over all rows.
__device__ __forceinline__ void warpgroup_mma(int (&acc){% if swap_ab %}[M_TILES]{% endif %}[ACCUMULATORS], unsigned long long a, unsigned long long b, int accumulate, int of_pair) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %{{ accumulators + 2 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ mma_n }}k32.s32.{% if swap_ab %}u8.s8{% else %}s8.u8{% endif %} "
                 "{ {{ acc_registers }} }, %{{ accumulators }}, %{{ accumulators + 1 }}, p;\n"
                 "}"
                 : {{ acc_operands }}
                 : "l"(a), "l"(b), "r"(accumulate));
}
