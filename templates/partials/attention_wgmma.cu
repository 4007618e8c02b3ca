// Products of a warpgroup for attention, 64 queries by KEYS or HEAD. Warp w of a warpgroup has rows
// 16w ..; lane l has sums[4j + e] in row l / 4 + e / 2 · 8 and column 8j + l % 4 · 2 + e % 2.

// Describes rows of COLUMNS elements in shared memory, swizzled by their own length; `next_box` is
// the distance to their next columns where these are columns of the product, too.
__device__ __forceinline__ unsigned long long rows_descriptor(unsigned int address, unsigned int next_box) {
    constexpr unsigned long long SWIZZLE = COLUMNS == 64 ? 1 : 2, EIGHT_ROWS = 8 * ROW_BYTES >> 4;
    return SWIZZLE << 62 | EIGHT_ROWS << 32 | (next_box >> 4 << 16 | address >> 4);  // addresses have 18 bits
}

// Where chunk `chunk` of 16 bytes of a row lies among N rows of a head.
template <unsigned int N>
__device__ __forceinline__ unsigned int swizzled(unsigned int row, unsigned int chunk) {
    constexpr unsigned int PER_ROW = ROW_BYTES / 16;
    const unsigned int mask = COLUMNS == 64 ? row % 8 : row / 2 % 4;
    return (chunk / PER_ROW * N + row) * ROW_BYTES + (chunk % PER_ROW ^ mask) * 16;
}

// Copies the rows of a head from `row` on, box `box` and those beside it one after the other, to shared memory.
__device__ __forceinline__ void load_boxes(unsigned int to, const TensorMap& from, int box, int row,
                                           unsigned int barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, { %2, %3, %4 }], [%5];" ::"r"(to), "l"(&from), "r"(0), "r"(row), "r"(box), "r"(barrier)
                 : "memory");
}

// s (+)= queries · keysᵀ, both in shared memory, 16 columns of them.
__device__ __forceinline__ void multiply(float (&sums)[SCORES], unsigned long long queries, unsigned long long keys,
                                         int add) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %{{ scores + 2 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ keys }}k16.f32.{{ storage }}.{{ storage }} "
                 "{ {{ score_registers }} }, %{{ scores }}, %{{ scores + 1 }}, p, 1, 1, 0, 0;\n"
                 "}"
                 : {{ score_operands }}
                 : "l"(queries), "l"(keys), "r"(add));
}

// o (+)= weights · values for 16 keys: weights in registers, values as rows of keys.
__device__ __forceinline__ void multiply_add(float (&sums)[SUMS], const unsigned int (&weights)[4],
                                             unsigned long long values, int add) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %{{ sums + 5 }}, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n{{ sums * 2 }}k16.f32.{{ storage }}.{{ storage }} "
                 "{ {{ sum_registers }} }, { %{{ sums }}, %{{ sums + 1 }}, %{{ sums + 2 }}, %{{ sums + 3 }} }, "
                 "%{{ sums + 4 }}, p, 1, 1, 1;\n"
                 "}"
                 : {{ sum_operands }}
                 : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(values), "r"(add));
}

// Registers that products wrote are not read before this.
template <int N> __device__ __forceinline__ void keep(float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// 16 bytes: a word, and zeros.
__device__ __forceinline__ void store_chunk(unsigned int address, unsigned int first) {
    asm volatile("st.shared.v4.u32 [%0], { %1, %2, %2, %2 };" ::"r"(address), "r"(first), "r"(0) : "memory");
}

__device__ __forceinline__ void write_chunk(Element* to, const unsigned int (&words)[4]) {
    asm volatile("st.global.v4.u32 [%0], { %1, %2, %3, %4 };" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}

__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Within 1 ulp.
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// Over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Word j of lane i of four becomes word i of lane j.
__device__ __forceinline__ void transpose_quad(unsigned int (&words)[4], unsigned int lane) {
#pragma unroll
    for (unsigned int step = 1; step <= 2; step *= 2) {
        const bool upper = (lane & step) != 0;
#pragma unroll
        for (unsigned int i = 0; i < 4; ++i) {
            if ((i & step) != 0) continue;
            const unsigned int given = upper ? words[i] : words[i + step];
            const unsigned int taken = __shfl_xor_sync(0xffffffff, given, step);
            words[i] = upper ? taken : words[i];
            words[i + step] = upper ? words[i + step] : taken;
        }
    }
}
