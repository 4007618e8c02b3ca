    // Returns log2(e) · cap · tanh(scale · score / cap).
    static __device__ __forceinline__ float capped(float score) {
{% if storage == "float" %}        return {{ cap_log2 }} * tanhf({{ score_by_cap }} * score);
{% else %}        // tanh(y) = 1 - 2 / (1 + e^2y). An infinite exponential gives 1. The error is at most 2^-22 of the cap.
        float exponential, inverse;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"({{ score_by_cap_2_log2 }} * score));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + exponential));
        return fmaf(-2.0f * {{ cap_log2 }}, inverse, {{ cap_log2 }});
{% endif %}    }

