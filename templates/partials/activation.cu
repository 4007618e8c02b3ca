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
// log2 P(-t) is smooth and is a polynomial here (minimax in the relative error of P), which keeps
// the relative accuracy of the negative tail, where 1 + erf or 1 + tanh would cancel.
//
// GELU, P(-t) = erfc(t/√2)/2, t ≤ 8: off by at most 0.18 ulp of an f16 result (1.2e-5).
__device__ __forceinline__ float gelu_exact(float x) {
    if constexpr (PRECISE) {
        return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    } else {
        const float t = fminf(fabsf(x), 8.0f);
        float p = 1.848628881e-5f;
        p = fmaf(p, t, -5.362203228e-4f);
        p = fmaf(p, t, 6.730959285e-3f);
        p = fmaf(p, t, -4.986490309e-2f);
        p = fmaf(p, t, -4.629549980e-1f);
        p = fmaf(p, t, -1.149396777f);
        p = fmaf(p, t, -1.000122666f);
        return fmaf(-t, exp2_approx(p), relu(x));
    }
}

// GELU by tanh, P(-t) = 1/(1 + exp(2√(2/π)(t + 0.044715t³))), t ≤ 6: off by at most 0.26 ulp of
// an f16 result (2.1e-5).
__device__ __forceinline__ float gelu_tanh(float x) {
    if constexpr (PRECISE) {
        return 0.5f * x * (1.0f + tanhf(0.79788456f * fmaf(0.044715f * x * x, x, x)));
    } else {
        const float t = fminf(fabsf(x), 6.0f);
        float p = -5.180617154e-5f;
        p = fmaf(p, t, 1.144100563e-3f);
        p = fmaf(p, t, -9.391515516e-3f);
        p = fmaf(p, t, 2.968283556e-2f);
        p = fmaf(p, t, -7.554913312e-2f);
        p = fmaf(p, t, -4.482913017e-1f);
        p = fmaf(p, t, -1.152107596f);
        p = fmaf(p, t, -1.000155330f);
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
