// The tiles of a stream: every so many-th of the heads of all tiles, in turns forwards and backwards
// through the streams, so that none has the longer one every time.
struct Walk {
    unsigned int stream, streams, all, from = 0;
    bool backwards = false;

    __device__ __forceinline__ Walk(unsigned int tokens, unsigned int batch, unsigned int stream)
        : stream(stream * gridDim.x + blockIdx.x), streams(STREAMS * gridDim.x), all((tokens / ROWS + batch) * HEADS) {}

    __device__ __forceinline__ Tile next(Tiles& tiles) {
        Tile tile;
        tile.length = 0;
        while (from < all && tile.length == 0) {
            tile = tiles.at(from + (backwards ? streams - 1 - stream : stream));
            from += streams, backwards = !backwards;
        }
        return tile;
    }
};

// One lane reads it and hands it on: the one that later says, by an arrival, that its warp has done so.
__device__ __forceinline__ Tile load_tile(unsigned int address) {
    Tile x;
    x.start = x.length = x.first = x.head = 0;
    if (threadIdx.x % 32 == 0) {
        asm volatile("ld.shared.v4.u32 { %0, %1, %2, %3 }, [%4];"
                     : "=r"(x.start), "=r"(x.length), "=r"(x.first), "=r"(x.head)
                     : "r"(address)
                     : "memory");
    }
    x.start = __shfl_sync(0xffffffff, x.start, 0);
    x.length = __shfl_sync(0xffffffff, x.length, 0);
    x.first = __shfl_sync(0xffffffff, x.first, 0);
    x.head = __shfl_sync(0xffffffff, x.head, 0);
    return x;
}

__device__ __forceinline__ void store_tile(unsigned int address, const Tile& x) {
    asm volatile("st.shared.v4.u32 [%0], { %1, %2, %3, %4 };" ::"r"(address), "r"(x.start), "r"(x.length),
                 "r"(x.first), "r"(x.head)
                 : "memory");
}

// What one warp does for a stream: tiles of queries, keys and values on their way to its places in
// shared memory, as soon as these are free, until there is none; then the record of an empty tile.
__device__ __forceinline__ void feed(const Places& at, const TensorMap& q, const TensorMap& k, const TensorMap& v,
                                     Tiles& all, Walk& walk) {
    Ring<PLACES> place;
    Ring<STAGES> stage;
    for (;;) {
        const Tile tile = walk.next(all);
        if (threadIdx.x % 32 == 0) {
            barrier_wait(at.read(place.at), place.phase ^ 1);
            store_tile(at.record(place.at), tile);
            barrier_wait(at.empty(stage.at), stage.phase ^ 1);
            if (tile.length == 0) {
                barrier_arrive(at.full_keys(stage.at));
            } else {
                const unsigned int groups = min((tile.length - tile.first + 63) / 64, static_cast<unsigned int>(GROUPS));
                const unsigned int box = tile.head * BOXES;
                unsigned int also = groups * Q_BYTES;
                for (unsigned int key = 0; key < tile.length; key += KEYS) {
                    const unsigned int keys = at.full_keys(stage.at), values = at.full_values(stage.at);
                    if (key > 0) barrier_wait(at.empty(stage.at), stage.phase ^ 1);
                    barrier_arrive_expecting(keys, TILE_BYTES + also);
                    load_boxes(at.keys(stage.at), k, {{ k_column }} / COLUMNS + box, tile.start + key, keys);
                    if (key == 0) {
#pragma unroll
                        for (unsigned int i = 0; i < GROUPS; ++i) {
                            if (i < groups) {
                                load_boxes(at.queries(place.at) + i * Q_BYTES, q, {{ q_column }} / COLUMNS + box,
                                           tile.start + tile.first + i * 64, keys);
                            }
                        }
                    }
                    barrier_arrive_expecting(values, TILE_BYTES);
                    load_boxes(at.values(stage.at), v, {{ v_column }} / COLUMNS + box, tile.start + key, values);
                    also = 0;
                    stage.advance();
                }
            }
            place.advance();
        }
        __syncwarp();
        if (tile.length == 0) return;
    }
}
