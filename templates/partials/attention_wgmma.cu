// WGMMAs of attention for 64 queries: q · kᵀ with KEYS columns, and p · v with HEAD columns. In lane l of warp w of the warpgroup,
// acc[4j + e] (e from 0 to 3) is in row 16w + l / 4 + e / 2 · 8 and column 8j + l % 4 · 2 + e % 2.

// wgmma descriptor of rows of COLUMNS elements in shared memory. The swizzle depends on the length of a row in bytes. `next_box` is the
// stride in bytes to the next COLUMNS columns, for an operand whose columns are the N dimension of the MMA.
__device__ __forceinline__ unsigned long long smem_descriptor(unsigned int address, unsigned int next_box) {
    constexpr unsigned long long SWIZZLE = COLUMNS == 64 ? 1 : 2, EIGHT_ROWS = 8 * ROW_BYTES >> 4;
    return SWIZZLE << 62 | EIGHT_ROWS << 32 | (next_box >> 4 << 16 | address >> 4);  // shared addresses have 18 bits
}

// Byte offset of 16-byte chunk `chunk` of a row, in a tile of N rows.
template <unsigned int N>
__device__ __forceinline__ unsigned int swizzled(unsigned int row, unsigned int chunk) {
    constexpr unsigned int PER_ROW = ROW_BYTES / 16;
    const unsigned int mask = COLUMNS == 64 ? row % 8 : row / 2 % 4;
    return (chunk / PER_ROW * N + row) * ROW_BYTES + (chunk % PER_ROW ^ mask) * 16;
}

// Loads all columns of a head, for rows from `row` on, with one TMA copy. The third dimension of the map counts boxes, which are groups of
// COLUMNS columns. The first box of the head is `box`. The boxes are stored one after another in shared memory.
__device__ __forceinline__ void load_boxes(unsigned int to, const TensorMap& from, int box, int row,
                                           unsigned int barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, { %2, %3, %4 }], [%5];" ::"r"(to), "l"(&from), "r"(0), "r"(row), "r"(box), "r"(barrier)
                 : "memory");
}

// acc = q · kᵀ, or acc += q · kᵀ if `accumulate`, over 16 columns. Both operands are in shared memory.
__device__ __forceinline__ void wgmma_ss(float (&acc)[SCORES], unsigned long long queries, unsigned long long keys,
                                         int accumulate) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %{{ scores + 2 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ keys }}k16.f32.{{ storage }}.{{ storage }} "
                 "{ {{ score_registers }} }, %{{ scores }}, %{{ scores + 1 }}, p, 1, 1, 0, 0;\n"
                 "}"
                 : {{ score_operands }}
                 : "l"(queries), "l"(keys), "r"(accumulate));
}

// acc = p · v, or acc += p · v if `accumulate`, over 16 keys. P is in registers. V is in shared memory, with one key per row.
__device__ __forceinline__ void wgmma_rs(float (&acc)[ACC], const unsigned int (&p)[4], unsigned long long values,
                                         int accumulate) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %{{ acc + 5 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ acc * 2 }}k16.f32.{{ storage }}.{{ storage }} "
                 "{ {{ acc_registers }} }, { %{{ acc }}, %{{ acc + 1 }}, %{{ acc + 2 }}, %{{ acc + 3 }} }, "
                 "%{{ acc + 4 }}, p, 1, 1, 1;\n"
                 "}"
                 : {{ acc_operands }}
                 : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(values), "r"(accumulate));
}

// Prevents the compiler from moving reads of WGMMA results before the wait for them (CUTLASS: warpgroup_fence_operand).
template <int N> __device__ __forceinline__ void warpgroup_fence_operand(float (&acc)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// Stores 16 bytes: one word followed by zeros.
__device__ __forceinline__ void store_chunk(unsigned int address, unsigned int first) {
    asm volatile("st.shared.v4.u32 [%0], { %1, %2, %2, %2 };" ::"r"(address), "r"(first), "r"(0) : "memory");
}

__device__ __forceinline__ void write_chunk(Element* to, const unsigned int (&words)[4]) {
    asm volatile("st.global.v4.u32 [%0], { %1, %2, %3, %4 };" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}

{% if to_e4m3 %}// Rounds the f16 elements of a chunk to E4M3, and stores them.
__device__ __forceinline__ void write_e4m3_chunk(unsigned char* to, const unsigned int (&words)[4]) {
    unsigned short halves[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(halves[i]) : "r"(words[i]));
    const uint2 bytes = {static_cast<unsigned int>(halves[1]) << 16 | halves[0], static_cast<unsigned int>(halves[3]) << 16 | halves[2]};
    *reinterpret_cast<uint2*>(to) = bytes;
}

{% endif %}__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Reciprocal with an error of at most 1 ulp.
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// Reductions over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Transposes a 4 × 4 matrix of words over a quad: word j of lane i becomes word i of lane j.
__device__ __forceinline__ void transpose_quad(unsigned int (&words)[4], unsigned int lane) {
#pragma unroll
    for (unsigned int step = 1; step <= 2; step *= 2) {
        const bool upper = (lane & step) != 0;
#pragma unroll
        for (unsigned int i = 0; i < 4; ++i) {
            if ((i & step) != 0) continue;
            const unsigned int sent = upper ? words[i] : words[i + step];
            const unsigned int received = __shfl_xor_sync(0xffffffff, sent, step);
            words[i] = upper ? received : words[i];
            words[i + step] = upper ? words[i + step] : received;
        }
    }
}
