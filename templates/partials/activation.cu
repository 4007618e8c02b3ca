// Activations of f32 values. PRECISE keeps f32 outputs at f32 accuracy with the built-in functions;
// otherwise the output is rounded to 16 bits and cheaper forms are exact enough for that.
constexpr bool PRECISE = {{ precise }};

// max(x, 0) that lets a NaN through, as the other activations do.
__device__ __forceinline__ float relu(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Both GELUs are x·P(x) with P(-t) = 1 - P(t), so that x·P(x) = max(x, 0) - t·P(-t) with t = |x|.
// log2 P(-t) is smooth and is a polynomial here (minimax in ulps of an f16 result), which keeps
// the relative accuracy of the negative tail, where 1 + erf or 1 + tanh would cancel.
//
// GELU, P(-t) = erfc(t/√2)/2, t ≤ 8: off by at most 0.19 ulp of an f16 result.
__device__ __forceinline__ float gelu_exact(float x) {
    if constexpr (PRECISE) {
        return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    } else {
        const float t = fminf(fabsf(x), 8.0f);
        float p = -3.289606248e-4f;
        p = fmaf(p, t, 5.904912017e-3f);
        p = fmaf(p, t, -4.847910255e-2f);
        p = fmaf(p, t, -4.638266265e-1f);
        p = fmaf(p, t, -1.149288535f);
        p = fmaf(p, t, -1.000131011f);
        return fmaf(-t, exp2_approx(p), relu(x));
    }
}

// GELU by tanh, P(-t) = 1/(1 + exp(2√(2/π)(t + 0.044715t³))), t ≤ 6: off by at most 0.19 ulp of
// an f16 result.
__device__ __forceinline__ float gelu_tanh(float x) {
    if constexpr (PRECISE) {
        return 0.5f * x * (1.0f + tanhf(0.79788456f * fmaf(0.044715f * x * x, x, x)));
    } else {
        const float t = fminf(fabsf(x), 6.0f);
        float p = 4.028572585e-4f;
        p = fmaf(p, t, -5.260052159e-3f);
        p = fmaf(p, t, 1.839462295e-2f);
        p = fmaf(p, t, -6.000623107e-2f);
        p = fmaf(p, t, -4.580758512e-1f);
        p = fmaf(p, t, -1.150125861f);
        p = fmaf(p, t, -1.000131965f);
        return fmaf(-t, exp2_approx(p), relu(x));
    }
}

// tanh.approx is off by at most 2^-11 of the result, the ulp of f16.
__device__ __forceinline__ float tanh_of(float x) {
    if constexpr (PRECISE) {
        return tanhf(x);
    } else {
        float y;
        asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }
}

__device__ __forceinline__ float identity(float x) { return x; }
