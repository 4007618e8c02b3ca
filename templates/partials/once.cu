// Streaming accesses for data that is not reused soon. They do not displace other data from the caches.
template <int N, typename T> __device__ __forceinline__ Pack<T, N> load_pack_once(const T* from) {
    if constexpr (sizeof(Pack<T, N>) == 16) {
        Pack<T, N> pack;
        unsigned int* word = reinterpret_cast<unsigned int*>(&pack);
        asm("ld.global.nc.L1::no_allocate.v4.b32 { %0, %1, %2, %3 }, [%4];"
            : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "l"(from));
        return pack;
    } else {
        return load_pack<N>(from);
    }
}

// Cache-streaming store (st.global.cs). The data is the first to be evicted from L2.
template <int N, typename T> __device__ __forceinline__ void store_pack_once(T* to, const Pack<T, N>& pack) {
    using Word = typename Bits<N * sizeof(T)>::Type;
    __stcs(reinterpret_cast<Word*>(to), *reinterpret_cast<const Word*>(&pack));
}
