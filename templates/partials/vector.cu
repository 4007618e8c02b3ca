// N neighboring elements, moved in one access of N · sizeof(T) bytes. N is a power of two, and an access has at most 16 bytes.
template <typename T, int N> struct alignas(N * sizeof(T)) Pack { T at[N]; };

template <int BYTES> struct Bits;
template <> struct Bits<2> { using Type = unsigned short; };
template <> struct Bits<4> { using Type = unsigned int; };
template <> struct Bits<8> { using Type = uint2; };
template <> struct Bits<16> { using Type = uint4; };

// Loads through the read-only path (ld.global.nc). The kernel must not write this data.
template <int N, typename T> __device__ __forceinline__ Pack<T, N> load_pack(const T* from) {
    using Word = typename Bits<N * sizeof(T)>::Type;
    Pack<T, N> pack;
    *reinterpret_cast<Word*>(&pack) = __ldg(reinterpret_cast<const Word*>(from));
    return pack;
}

template <int N, typename T> __device__ __forceinline__ void store_pack(T* to, const Pack<T, N>& pack) {
    using Word = typename Bits<N * sizeof(T)>::Type;
    *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(&pack);
}

// Rounds to the storage type. One instruction converts two 16-bit elements.
template <typename T, int N> __device__ __forceinline__ Pack<T, N> to_pack(const float (&value)[N]) {
    Pack<T, N> pack;
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            reinterpret_cast<unsigned int*>(&pack)[j / 2] = pack_pair<T>(value[j], value[j + 1]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j) pack.at[j] = from_float<T>(value[j]);
    }
    return pack;
}
