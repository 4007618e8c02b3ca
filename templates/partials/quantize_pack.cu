{% include "partials/quantize.cu" %}

// Multiplies values by `factor` and rounds them to E4M3.
template <int N> __device__ __forceinline__ Pack<unsigned char, N> to_e4m3_pack(const float (&value)[N], float factor) {
    static_assert(N % 4 == 0, "a conversion fills a word");
    Pack<unsigned char, N> pack;
#pragma unroll
    for (int j = 0; j < N; j += 4) {
        reinterpret_cast<unsigned int*>(&pack)[j / 4] =
            pack_e4m3(value[j] * factor, value[j + 1] * factor, value[j + 2] * factor, value[j + 3] * factor);
    }
    return pack;
}
