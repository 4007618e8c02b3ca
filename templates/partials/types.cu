{% include "partials/dependent.cu" %}
// Storage types. No header is included, because each conversion is a single PTX instruction.
struct alignas(2) f16 { unsigned short bits; };
struct alignas(2) bf16 { unsigned short bits; };

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ __forceinline__ float to_float(bf16 x) {
    return __uint_as_float(static_cast<unsigned int>(x.bits) << 16);
}

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// Packs two neighboring elements in a register. The element at the lower address is in the lower half.
template <typename T> __device__ __forceinline__ unsigned int pack_pair(float low, float high);
template <> __device__ __forceinline__ unsigned int pack_pair<f16>(float low, float high) {
    unsigned int y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
template <> __device__ __forceinline__ unsigned int pack_pair<bf16>(float low, float high) {
    unsigned int y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// A vector of 16 bytes, accessed at once.
template <typename T> struct alignas(16) Vector {
    static constexpr int N = 16 / sizeof(T);
    T at[N];
};
