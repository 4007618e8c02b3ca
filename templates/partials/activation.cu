// Activations of f32 values. PRECISE selects CUDA's math functions (such as erff), for f32 outputs. Otherwise outputs are rounded to 16
// bits, for which approximations are sufficient.
constexpr bool PRECISE = {{ precise }};

// Returns max(x, 0). Propagates NaN, like the other activations.
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

// Both GELUs are x·P(x), with a distribution function P for which P(-t) = 1 - P(t). Therefore x·P(x) = max(x, 0) - t·P(-t) with t = |x|.
// log2 P(-t) is smooth, so it is approximated by a polynomial. The polynomial has the form with the fewest multiply-adds, because each
// multiply-add takes an issue slot from concurrent MMAs. The approximation is minimax in units of max(ulp of an f16 result, 2^-16). This
// preserves the relative accuracy of results with magnitudes above 2^-6, including negative results, for which 1 + erf or 1 + tanh would
// suffer from cancellation. For large t, the approximations of t·P(-t) are negligible, so t is not clamped. An infinite x gives NaN. After
// rounding to f16, results of at least 2^-6 have an error of at most 0.68 ulp, and smaller results have an error of at most 6.5e-6.
//
// GELU, P(-t) = erfc(t/√2)/2: error of at most 0.18 of these units.
__device__ __forceinline__ float gelu_exact(float x) {
    if constexpr (PRECISE) {
        return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    } else {
        const float t = fabsf(x);
        // Saturated at 0, so that the square below does not grow again for large t.
        float p = __saturatef(fmaf(-8.368778756e-3f, t, 2.451695412e-1f));
        p = fmaf(p, t, 9.547768461e-1f);
        p = fmaf(p, p, 2.360562524e-1f);
        p = fmaf(-p, t, -1.000307032f);
        return fmaf(-t, exp2_approx(p), relu(x));
    }
}

// GELU with tanh, P(-t) = 1/(1 + exp(2√(2/π)(t + 0.044715t³))): error of at most 0.18 of the units described above gelu_exact.
__device__ __forceinline__ float gelu_tanh(float x) {
    if constexpr (PRECISE) {
        return 0.5f * x * (1.0f + tanhf(0.79788456f * fmaf(0.044715f * x * x, x, x)));
    } else {
        const float t = fabsf(x);
        float p = -1.650665051e-3f;
        p = fmaf(p, t, 6.447228778e-3f);
        p = fmaf(p, t, -4.204277154e-2f);
        p = fmaf(p, t, -4.701603811e-1f);
        p = fmaf(p, t, -1.147055774f);
        p = fmaf(p, t, -1.000337590f);
        return fmaf(-t, exp2_approx(p), relu(x));
    }
}

// The relative error of tanh.approx is at most 2^-11, as large as an ulp of f16.
__device__ __forceinline__ float tanh_of(float x) {
    if constexpr (PRECISE) {
        return tanhf(x);
    } else {
        float y;
        asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }
}

{% if activation == "silu" %}// The approximate exp and 1/x have errors of at most 2 and 1 ulp of f32.
__device__ __forceinline__ float silu(float x) {
    if constexpr (PRECISE) {
        return x / (1.0f + expf(-x));
    } else {
        float y;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + exp2_approx(-1.44269504f * x)));
        return x * y;
    }
}

{% elif activation == "quick_gelu" %}// The approximate exp and 1/x have errors of at most 2 and 1 ulp of f32.
__device__ __forceinline__ float quick_gelu(float x) {
    if constexpr (PRECISE) {
        return x / (1.0f + expf(-1.702f * x));
    } else {
        float y;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + exp2_approx(-2.45546696f * x)));
        return x * y;
    }
}

{% elif activation == "log1p_relu" %}// Uses the built-in function for all types: near 0, where most results are, an approximate logarithm has a large relative error.
__device__ __forceinline__ float log1p_relu(float x) { return log1pf(relu(x)); }

{% endif %}__device__ __forceinline__ float identity(float x) { return x; }
