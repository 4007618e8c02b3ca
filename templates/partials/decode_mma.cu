{% include "partials/mma.cu" %}
// Transposes an 8 × 8 matrix of 16-bit elements over a warp's lanes.
__device__ __forceinline__ unsigned int transposed(unsigned int pair) {
    unsigned int to;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(pair));
    return to;
}

{% if e4m3 %}// Loads a pack and converts its elements.
__device__ __forceinline__ void load_shared(unsigned int (&to)[4], unsigned int address) {
    unsigned int words[2];
    asm volatile("ld.shared.v2.u32 { %0, %1 }, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
    unpack_e4m3(words[0], to[0], to[1]);
    unpack_e4m3(words[1], to[2], to[3]);
}
{% else %}__device__ __forceinline__ void load_shared(unsigned int (&to)[4], unsigned int address) {
    asm volatile("ld.shared.v4.u32 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}
{% endif %}
// State of online softmax for up to eight query heads per warp. The columns of the MMAs are heads. The rows of the MMAs are keys in the
// first product, and columns of the values in the second product. With c = lane % 4, the 8 elements of a lane's pack are used as elements
// 2c, 2c + 1, 2c + 8 and 2c + 9 of two products, both for queries and for keys. This is valid because a dot product's terms may be added in
// any order.
class Heads {
public:
{% if bias != "none" %}    __device__ __forceinline__ Heads(const T* queries, unsigned int rows, const T* biases, unsigned int first_head)
        : by_distance{ByDistance(biases, first_head + min(threadIdx.x % 4 * 2, rows - 1)),
                      ByDistance(biases, first_head + min(threadIdx.x % 4 * 2 + 1, rows - 1))} {
{% else %}    __device__ __forceinline__ Heads(const T* queries, unsigned int rows) {
{% endif %}        const unsigned int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
        for (unsigned int i = 0; i < KEY_PACKS; ++i) {
            q[i][0] = q[i][1] = q[i][2] = q[i][3] = 0;
            if (g < rows && i * 4 + c < PACKS) {
                // ld.global.nc is not used, because the compiler may move such loads before griddepcontrol.wait.
                asm volatile("ld.global.v4.u32 { %0, %1, %2, %3 }, [%4];"
                             : "=r"(q[i][0]), "=r"(q[i][1]), "=r"(q[i][2]), "=r"(q[i][3])
                             : "l"(queries + g * HEAD + (i * 4 + c) * PACK) : "memory");
            }
        }
{% if e4m3 and storage == "bf16" %}        scale_queries();
{% endif %}#pragma unroll
        for (int r = 0; r < 2; ++r) {
            row_max[r] = minus_infinity();
            row_sum[r] = 0.0f;
        }
#pragma unroll
        for (unsigned int i = 0; i < VALUE_PACKS * 16; ++i) o[i / 4][i % 4] = 0.0f;
    }

    // Updates the state with the tile at `stage`, of which only the first n > 0 keys exist{% if adjusts %}. `distance` is the distance of
    // the first key from the query{% endif %}.
    __device__ __forceinline__ void add(unsigned int stage, unsigned int n{% if adjusts %}, int distance{% endif %}{% if scaled %}, float key_scale{% endif %}) {
{% if e4m3 %}        const unsigned int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
        const unsigned int values[2] = {stage + VALUES_AT + value_place(g, c, 0), stage + VALUES_AT + value_place(g, c, 1)};
{% else %}        const unsigned int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4, values = stage + VALUES_AT + value_place(g, c);
{% endif %}        float s[4] = {}, odd[4] = {};  // two independent chains of MMAs, to halve the latency
#pragma unroll
        for (unsigned int i = 0; i < KEY_PACKS; ++i) {
            unsigned int low[4], high[4];  // keys g and g + 8
            const unsigned int at = stage + key_place(g, c, i);
            load_shared(low, at + i * PACK_BYTES);
            load_shared(high, at + (KEY_PACKS + i) * PACK_BYTES);
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
                const unsigned int a[4] = {low[half], high[half], low[half + 1], high[half + 1]};
                mma<Operand>(half == 0 ? s : odd, a, q[i][half], q[i][half + 1]);
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] {% if e4m3 and storage == "bf16" %}= (s[e] + odd[e]) * {% if scaled %}(score_scale[e % 2] * key_scale){% else %}score_scale[e % 2]{% endif %}{% elif scaled %}= (s[e] + odd[e]) * key_scale{% else %}+= odd[e]{% endif %};
{% if adjusts %}#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] = by_distance[e % 2].of(s[e], distance + static_cast<int>(g) + e / 2 * 8);
{% endif %}        if (g >= n) s[0] = s[1] = minus_infinity();
        if (g + 8 >= n) s[2] = s[3] = minus_infinity();
        float rescale[2];
        bool grows = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float new_max = fmaxf(row_max[r], max_of_keys(fmaxf(s[r], s[2 + r])) * SCALE_LOG2);
            rescale[r] = exp2_approximate(row_max[r] - new_max);
            grows |= row_max[r] != new_max;
            row_max[r] = new_max;
            s[r] = exp2_approximate(fmaf(s[r], SCALE_LOG2, -new_max));
            s[2 + r] = exp2_approximate(fmaf(s[2 + r], SCALE_LOG2, -new_max));
            row_sum[r] = fmaf(row_sum[r], rescale[r], s[r] + s[2 + r]);
        }
        // The row maxima rarely grow after the first tiles, so rescaling is skipped if none of the warp's maxima has grown.
        if (__any_sync(ALL_LANES, grows)) {
#pragma unroll
            for (unsigned int i = 0; i < VALUE_PACKS * 16; ++i) o[i / 4][i % 4] *= rescale[i % 2];
        }
        const unsigned int b0 = transposed(pack_pair<Operand>(s[0], s[1])), b1 = transposed(pack_pair<Operand>(s[2], s[3]));
#pragma unroll
        for (unsigned int i = 0; i < VALUE_PACKS; ++i) {
            unsigned int v[4][4];  // values 2c, 2c + 1, 2c + 8, 2c + 9
#pragma unroll
            for (unsigned int nth = 0; nth < 4; ++nth) load_shared(v[nth], values{% if e4m3 %}[(nth * VALUE_PACKS + i) % 2]{% endif %} + (nth * VALUE_PACKS + i) * PACK_BYTES);
#pragma unroll
            for (unsigned int pair = 0; pair < 4; ++pair) {
                float(&acc)[4] = o[i * 4 + pair];
                const unsigned int a[4] = {__byte_perm(v[0][pair], v[1][pair], 0x5410), __byte_perm(v[0][pair], v[1][pair], 0x7632),
                                           __byte_perm(v[2][pair], v[3][pair], 0x5410), __byte_perm(v[2][pair], v[3][pair], 0x7632)};
                mma<Operand>(acc, a, b0, b1);
            }
        }
    }

    // Stores partial outputs [ROWS, HEAD], row maxima and row sums.
    __device__ __forceinline__ void store(float* partial, float2* statistics) {
        const unsigned int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
        for (unsigned int r = 0; r < 2; ++r) {
            const float sum = sum_of_keys(row_sum[r]);
            const unsigned int row = c * 2 + r;
            if (row >= ROWS) continue;
            if (g == 0) statistics[row] = float2{row_max[r], sum};
#pragma unroll
            for (unsigned int i = 0; i < VALUE_PACKS * 2; ++i) {
                const unsigned int pack = i / 2 * 8 + g;
                const float(&first)[4] = o[i * 2], (&second)[4] = o[i * 2 + 1];
                if (pack < PACKS) {
                    *reinterpret_cast<float4*>(partial + row * HEAD + pack * PACK + i % 2 * 4) =
                        float4{first[r], first[r + 2], second[r], second[r + 2]};
                }
            }
        }
    }

private:
{% if e4m3 and storage == "bf16" %}    // Converts the queries to f16. The queries of a head are multiplied by a power of two, so that the largest is between 2¹⁴ and 2¹⁵.
    __device__ __forceinline__ void scale_queries() {
        float largest = 0.0f;
#pragma unroll
        for (unsigned int i = 0; i < KEY_PACKS * 4; ++i) {
            const unsigned int pair = q[i / 4][i % 4];
            largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(pair << 16)), fabsf(__uint_as_float(pair & 0xffff0000))));
        }
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
        // The limit ensures that the factor and its inverse are normal numbers.
        const unsigned int exponent = max(__float_as_uint(largest) >> 23, 15);
        const float factor = __uint_as_float((127 + 14 + 127 - exponent) << 23), inverse = __uint_as_float((exponent - 14) << 23);
#pragma unroll
        for (unsigned int i = 0; i < KEY_PACKS * 4; ++i) {
            unsigned int& pair = q[i / 4][i % 4];
            pair = pack_pair<f16>(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xffff0000) * factor);
        }
#pragma unroll
        for (unsigned int r = 0; r < 2; ++r) score_scale[r] = __shfl_sync(ALL_LANES, inverse, (threadIdx.x % 4 * 2 + r) * 4);
    }

    float score_scale[2];  // inverse of the factor of heads 2c and 2c + 1
{% endif %}{% if adjusts %}    ByDistance by_distance[2];  // for heads 2c and 2c + 1
{% endif %}    unsigned int q[KEY_PACKS][4];
    float row_max[2], row_sum[2];  // for heads 2c and 2c + 1; maxima are times SCALE_LOG2, and sums are over the lane's keys
    float o[VALUE_PACKS * 4][4];   // o[4i + e]: columns 2e and 2e + 1 of the lane's i-th pack, each for heads 2c and 2c + 1
};
