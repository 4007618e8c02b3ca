{% include "partials/cache_encode.cu" %}
// Rounds N neighboring values to E4M3 and stores them.
template <int N> __device__ __forceinline__ void store_e4m3(unsigned char* to, const float (&value)[N]) {
    if constexpr (N % 4 == 0) {
        Pack<unsigned int, N / 4> words;
#pragma unroll
        for (int j = 0; j < N / 4; ++j) words.at[j] = pack_e4m3(value[j * 4], value[j * 4 + 1], value[j * 4 + 2], value[j * 4 + 3]);
        store_pack(reinterpret_cast<unsigned int*>(to), words);
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j) to[j] = static_cast<unsigned char>(pack_e4m3(value[j], 0.0f, 0.0f, 0.0f));
    }
}
