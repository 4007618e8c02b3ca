// Converts four values to E4M3, the first in the lowest byte. Magnitudes above 448 become 448, and NaN stays NaN.
__device__ __forceinline__ unsigned int pack_e4m3(float a, float b, float c, float d) {
    unsigned short low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return static_cast<unsigned int>(high) << 16 | low;
}
