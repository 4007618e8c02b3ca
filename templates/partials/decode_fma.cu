__device__ __forceinline__ float4 load_shared(unsigned int address) {
    float4 to;
    asm volatile("ld.shared.v4.f32 { %0, %1, %2, %3 }, [%4];"
                 : "=f"(to.x), "=f"(to.y), "=f"(to.z), "=f"(to.w) : "r"(address) : "memory");
    return to;
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// State of online softmax for the query heads of a warp, in f32. Four lanes share a key. Each lane multiplies a part of the key's packs by
// the query, and the four lanes add up their partial dot products.
class Heads {
public:
{% if bias != "none" %}    __device__ __forceinline__ Heads(const T* from, unsigned int rows, const T* biases, unsigned int first_head)
        : biases(biases), first_head(first_head), last(rows - 1) {
{% else %}    __device__ __forceinline__ Heads(const T* from, unsigned int rows) {
{% endif %}        for (unsigned int i = threadIdx.x; i < ROWS * PACKS; i += {{ threads }}) {
            float4 pack = {};
            if (i < rows * PACKS) {
                asm volatile("ld.global.v4.f32 { %0, %1, %2, %3 }, [%4];"
                             : "=f"(pack.x), "=f"(pack.y), "=f"(pack.z), "=f"(pack.w) : "l"(from + i * PACK) : "memory");
            }
            queries()[i] = pack;
        }
        __syncthreads();
#pragma unroll
        for (unsigned int r = 0; r < ROWS; ++r) {
            row_max[r] = minus_infinity();
            row_sum[r] = 0.0f;
#pragma unroll
            for (unsigned int i = 0; i < VALUE_PACKS; ++i) o[r][i] = float4{};
        }
    }

    // Updates the state with the tile at `stage`, of which only the first n > 0 keys exist{% if adjusts %}. `distance` is the distance of
    // the first key from the query{% endif %}.
    __device__ __forceinline__ void add(unsigned int stage, unsigned int n{% if adjusts %}, int distance{% endif %}) {
        const unsigned int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4, values = stage + VALUES_AT + value_place(g, c);
        float s[ROWS][2] = {};
#pragma unroll
        for (unsigned int i = 0; i < KEY_PACKS; ++i) {
            const unsigned int at = stage + key_place(g, c, i);
            const float4 low = load_shared(at + i * PACK_BYTES), high = load_shared(at + (KEY_PACKS + i) * PACK_BYTES);
            const unsigned int pack = min(i * 4 + c, PACKS - 1);  // packs past the end of a key are zeros
#pragma unroll
            for (unsigned int r = 0; r < ROWS; ++r) {
                const float4 query = queries()[r * PACKS + pack];
                s[r][0] = dot(low, query, s[r][0]);
                s[r][1] = dot(high, query, s[r][1]);
            }
        }
        float rescale[ROWS];
#pragma unroll
        for (unsigned int r = 0; r < ROWS; ++r) {
            float low = quad_sum(s[r][0]), high = quad_sum(s[r][1]);
{% if adjusts %}            const ByDistance by_distance{% if bias != "none" %}(biases, first_head + min(r, last)){% else %}{}{% endif %};
            low = by_distance.of(low, distance + static_cast<int>(g));
            high = by_distance.of(high, distance + static_cast<int>(g) + 8);
{% endif %}            if (g >= n) low = minus_infinity();
            if (g + 8 >= n) high = minus_infinity();
            const float new_max = fmaxf(row_max[r], max_of_keys(fmaxf(low, high)) * SCALE_LOG2);
            rescale[r] = exp2_approximate(row_max[r] - new_max);
            row_max[r] = new_max;
            s[r][0] = exp2_approximate(fmaf(low, SCALE_LOG2, -new_max));
            s[r][1] = exp2_approximate(fmaf(high, SCALE_LOG2, -new_max));
            row_sum[r] = fmaf(row_sum[r], rescale[r], s[r][0] + s[r][1]);
        }
#pragma unroll
        for (unsigned int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (unsigned int i = 0; i < VALUE_PACKS; ++i) scale(o[r][i], rescale[r]);
        }
#pragma unroll
        for (unsigned int nth = 0; nth < 4; ++nth) {
            float4 v[VALUE_PACKS];
#pragma unroll
            for (unsigned int i = 0; i < VALUE_PACKS; ++i) v[i] = load_shared(values + (nth * VALUE_PACKS + i) * PACK_BYTES);
#pragma unroll
            for (unsigned int r = 0; r < ROWS; ++r) {
                const float weight = __shfl_sync(ALL_LANES, s[r][nth / 2], (c * 2 + nth % 2) * 4);
#pragma unroll
                for (unsigned int i = 0; i < VALUE_PACKS; ++i) add(o[r][i], weight, v[i]);
            }
        }
    }

    // Stores partial outputs [ROWS, HEAD], row maxima and row sums.
    __device__ __forceinline__ void store(float* partial, float2* statistics) {
        const unsigned int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
        for (unsigned int r = 0; r < ROWS; ++r) {
            const float sum = sum_of_keys(row_sum[r]);
            if (threadIdx.x % 32 == 0) statistics[r] = float2{row_max[r], sum};
#pragma unroll
            for (unsigned int i = 0; i < VALUE_PACKS; ++i) {
                const float4& part = o[r][i];
                const float4 whole = {quad_sum(part.x), quad_sum(part.y), quad_sum(part.z), quad_sum(part.w)};
                const unsigned int pack = i * 8 + g;
                if (c == 0 && pack < PACKS) reinterpret_cast<float4*>(partial)[r * PACKS + pack] = whole;
            }
        }
    }

private:
{% if bias != "none" %}    const T* biases;
    unsigned int first_head, last;  // first head of the CTA, and number of heads after the first
{% endif %}    float row_max[ROWS], row_sum[ROWS];  // maxima are times SCALE_LOG2; sums are over the lane's keys
    float4 o[ROWS][VALUE_PACKS];         // sums over the lane's values

    static __device__ __forceinline__ float4* queries() {
        __shared__ float4 of_cta[ROWS * PACKS];
        return of_cta;
    }

    static __device__ __forceinline__ float dot(const float4& a, const float4& b, float sum) {
        return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
    }

    static __device__ __forceinline__ void scale(float4& x, float by) {
        x.x *= by;
        x.y *= by;
        x.z *= by;
        x.w *= by;
    }

    static __device__ __forceinline__ void add(float4& sum, float weight, const float4& x) {
        sum.x = fmaf(weight, x.x, sum.x);
        sum.y = fmaf(weight, x.y, sum.y);
        sum.z = fmaf(weight, x.z, sum.z);
        sum.w = fmaf(weight, x.w, sum.w);
    }
};
