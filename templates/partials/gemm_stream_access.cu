{%- if not packed %}
// acc += weight · xᵀ, an m64k{{ mma_k }} MMA with N = MMA_N. If `accumulate` is 0, acc is overwritten.
// In lane l of warp w of the warpgroup, acc[4j + e] (octet j, e from 0 to 3) belongs to weight row 16w + l / 4 + e / 2 · 8 and token
// 8j + l % 4 · 2 + e % 2.
__device__ __forceinline__ void warpgroup_mma(float (&acc)[ACCUMULATORS], unsigned long long weight,
                                             unsigned long long x, int accumulate) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %{{ accumulators + 2 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ mma_n }}k{{ mma_k }}.f32.{% if scaled %}e4m3.e4m3{% else %}{{ storage }}.{{ storage }}{% endif %} "
                 "{ {{ acc_registers }} }, %{{ accumulators }}, %{{ accumulators + 1 }}, p, 1, 1{% if not scaled %}, 0, 0{% endif %};\n"
                 "}"
                 : {{ acc_operands }}
                 : "l"(weight), "l"(x), "r"(accumulate));
}
{%- endif %}

// Like load_box, but all lanes of a warp call it, and one lane issues the copy. Arguments that are equal in all lanes then stay in uniform
// registers. If only one lane took a branch with the copies, the compiler would turn each copy into a loop over lanes.
__device__ __forceinline__ void warp_load_box(unsigned int to, const TensorMap& from, int column, int row, unsigned int barrier) {
    asm volatile("{\n"
                 ".reg .pred elected;\n"
                 "elect.sync _|elected, 0xffffffff;\n"
                 "@elected cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, { %2, %3 }], [%4];\n"
                 "}" ::"r"(to), "l"(&from), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}
{%- if gated and not packed %}

// Like warp_load_box, but alternates eight rows of the first half of a matrix with the corresponding eight rows of the second half.
// `eight_rows` is the index of the first group of eight rows.
__device__ __forceinline__ void warp_load_halves(unsigned int to, const TensorMap& from, int column, int eight_rows, unsigned int barrier) {
    asm volatile("{\n"
                 ".reg .pred elected;\n"
                 "elect.sync _|elected, 0xffffffff;\n"
                 "@elected cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, { %2, %3, %3, %4 }], [%5];\n"
                 "}" ::"r"(to), "l"(&from), "r"(column), "r"(0), "r"(eight_rows), "r"(barrier)
                 : "memory");
}
{%- endif %}
{%- if normed %}

// Volatile, because the compiler may turn a plain load into ld.global.nc and move it before griddepcontrol.wait.
__device__ __forceinline__ float2 load_row_stats(const float* from) {
    float2 to;
    asm volatile("ld.global.v2.f32 { %0, %1 }, [%2];" : "=f"(to.x), "=f"(to.y) : "l"(from) : "memory");
    return to;
}
constexpr int STATS_WARPS = (ROWS + 63) / 64;
{%- endif %}

// Stores columns `column` and `column + 1` of a row. The row may be unaligned.
__device__ __forceinline__ void store_two(T* to, int column, unsigned int pair) {
    if constexpr (N % 2 == 0) {
        if (column < N) *reinterpret_cast<unsigned int*>(to) = pair;
    } else {
        if (column < N) to[0].bits = pair & 0xffff;
        if (column + 1 < N) to[1].bits = pair >> 16;
    }
}
{%- if to_e4m3 %}

// Multiplies two results by `factor` and converts them to E4M3. Each E4M3 value is in the low byte of a half word. Magnitudes above 448
// become 448.
__device__ __forceinline__ unsigned int pack_result(float a, float b, float factor) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b * factor), "f"(a * factor));
    return __byte_perm(pair, 0, 0x4140);
}

__device__ __forceinline__ void store_two(unsigned char* to, int column, unsigned int pair) {
    static_assert(N % 2 == 0, "columns are stored in pairs");
    if (column < N) *reinterpret_cast<unsigned short*>(to) = __byte_perm(pair, 0, 0x4420);
}
{%- endif %}
{%- if residual %}

__device__ __forceinline__ unsigned int load_two(const T* from, int column) {
    unsigned int pair = 0;
    if constexpr (N % 2 == 0) {
        if (column < N) pair = load_pair(from);
    } else {
        if (column < N) pair = from[0].bits;
        if (column + 1 < N) pair |= static_cast<unsigned int>(from[1].bits) << 16;
    }
    return pair;
}
{%- endif %}

__device__ __forceinline__ void load_four(float (&to)[4], unsigned int from) {
    asm volatile("ld.shared.v4.f32 { %0, %1, %2, %3 }, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Arrives without release semantics. A release would wait for loads in flight, and is not needed: only barriers were written, and
// fence_barriers() makes them visible.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
