__device__ __forceinline__ Tile load_tile(unsigned int address) {
    Tile x;
    asm volatile("ld.shared.v4.u32 { %0, %1, %2, %3 }, [%4];"
                 : "=r"(x.start), "=r"(x.length), "=r"(x.first), "=r"(x.head)
                 : "r"(address)
                 : "memory");
    return x;
}

__device__ __forceinline__ void store_tile(unsigned int address, const Tile& x) {
    asm volatile("st.shared.v4.u32 [%0], { %1, %2, %3, %4 };" ::"r"(address), "r"(x.start), "r"(x.length),
                 "r"(x.first), "r"(x.head)
                 : "memory");
}

// A warp's work for stream `stream` of its block: every so many-th tile, in turns forwards and backwards
// through all streams so that none has the longer one every time, on its way to shared memory as soon as
// there is room; then the record of an empty one.
__device__ __forceinline__ void feed(const Places& at, const TensorMap& q, const TensorMap& k, const TensorMap& v,
                                     const int* __restrict__ cu_lens, unsigned int batch, unsigned int stream) {
    const unsigned int all = (cu_lens[batch] / ROWS + batch) * HEADS;  // and more, where sequences end in a tile
    const unsigned int streams = STREAMS * gridDim.x;
    unsigned int own = stream * gridDim.x + blockIdx.x;
    Tiles tiles(cu_lens, batch, all > streams);
    const bool loads = threadIdx.x % 32 == 0;
    unsigned int read = 1;  // parity of the readers' barrier
    Stage stage;
    wait_for_earlier_kernels();
    for (unsigned int from = 0; from < all; from += streams) {
        const Tile tile = tiles.find(from + own);
        own = streams - 1 - own;
        if (tile.length == 0) continue;
        if (loads) {
            const unsigned int groups = min((tile.length - tile.first + 63) / 64, GROUPS);
            barrier_wait(at.read(), read);
            read ^= 1;
            store_tile(at.record, tile);
            unsigned int also = groups * Q_BYTES;
            for (unsigned int key = 0; key < tile.length; key += KEYS) {
                barrier_wait(at.empty(stage.at), stage.parity ^ 1);
                load_keys(at, stage.at, k, tile, key, also);
                if (key == 0) {
#pragma unroll
                    for (unsigned int i = 0; i < GROUPS; ++i) {
                        if (i < groups) load_queries(at, stage.at, q, tile, i);
                    }
                }
                load_values(at, stage.at, v, tile, key);
                stage.advance();
                also = 0;
            }
        }
        __syncwarp();
    }
    if (!loads) return;
    barrier_wait(at.read(), read);
    store_tile(at.record, {0, 0, 0, 0});
    barrier_wait(at.empty(stage.at), stage.parity ^ 1);
    barrier_arrive(at.full_keys(stage.at));
}
