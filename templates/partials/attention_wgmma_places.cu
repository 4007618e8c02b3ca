// Where the things of a stream lie in shared memory, and its barriers: a stage has one for its keys and
// one for its values, and one that their readers complete; queries have one of their readers, and beside
// them a record of the tile.
struct Places {
    static constexpr unsigned int STREAM_BYTES = GROUPS * Q_BYTES + STAGES * 2 * TILE_BYTES;
    static constexpr unsigned int SMALL_BYTES = {{ small_bytes }};
    unsigned int queries, ones, record;

    __device__ __forceinline__ Places(const unsigned char* shared, unsigned int stream) {
        const unsigned int start = shared_address(shared);
        queries = start + stream * STREAM_BYTES;
        ones = start + STREAMS * STREAM_BYTES;
        record = ones + ONES_BYTES + stream * SMALL_BYTES;
    }

    __device__ __forceinline__ unsigned int keys(unsigned int stage) const {
        return queries + GROUPS * Q_BYTES + stage * 2 * TILE_BYTES;
    }
    __device__ __forceinline__ unsigned int values(unsigned int stage) const { return keys(stage) + TILE_BYTES; }
    __device__ __forceinline__ unsigned int read() const { return record + 16; }
    __device__ __forceinline__ unsigned int full_keys(unsigned int stage) const { return record + 24 + stage * 24; }
    __device__ __forceinline__ unsigned int full_values(unsigned int stage) const { return full_keys(stage) + 8; }
    __device__ __forceinline__ unsigned int empty(unsigned int stage) const { return full_keys(stage) + 16; }

    // One thread's.
    __device__ __forceinline__ void init_barriers() const {
#pragma unroll 1
        for (unsigned int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full_keys(stage), 1);
            barrier_init(full_values(stage), 1);
            barrier_init(empty(stage), GROUPS * 4);  // warps
        }
        barrier_init(read(), GROUPS * 4);
        fence_barriers();
    }

    // As many threads' as a row has bytes.
    __device__ __forceinline__ void write_ones(unsigned int thread) const {
        const unsigned int row = thread / (ROW_BYTES / 16), chunk = thread % (ROW_BYTES / 16);
        store_chunk(ones + swizzled(row, chunk), chunk == 0 ? pack_pair<Element>(1.0f, 0.0f) : 0);
        fence_for_copies();
    }
};

// A stage of the ring, and the parity of its barriers' phase.
struct Stage {
    unsigned int at = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++at == STAGES) at = 0, parity ^= 1;
    }
};

template <int BOX_ROWS>
__device__ __forceinline__ void load_boxes(unsigned int to, const TensorMap& from, unsigned int column,
                                           unsigned int row, unsigned int barrier) {
#pragma unroll
    for (int i = 0; i < BOXES; ++i) load_box(to + i * BOX_ROWS * ROW_BYTES, from, column + i * COLUMNS, row, barrier);
}

// Keys from key `first` of a sequence on; the barrier waits for `also` more bytes.
__device__ __forceinline__ void load_keys(const Places& at, unsigned int stage, const TensorMap& k, const Tile& tile,
                                          unsigned int first, unsigned int also) {
    barrier_arrive_expecting(at.full_keys(stage), TILE_BYTES + also);
    load_boxes<KEYS>(at.keys(stage), k, {{ k_column }} + tile.head * HEAD, tile.start + first, at.full_keys(stage));
}

__device__ __forceinline__ void load_values(const Places& at, unsigned int stage, const TensorMap& v, const Tile& tile,
                                            unsigned int first) {
    barrier_arrive_expecting(at.full_values(stage), TILE_BYTES);
    load_boxes<KEYS>(at.values(stage), v, {{ v_column }} + tile.head * HEAD, tile.start + first, at.full_values(stage));
}

__device__ __forceinline__ void load_queries(const Places& at, unsigned int stage, const TensorMap& q, const Tile& tile,
                                             unsigned int group) {
    load_boxes<64>(at.queries + group * Q_BYTES, q, {{ q_column }} + tile.head * HEAD,
                   tile.start + tile.first + group * 64, at.full_keys(stage));
}
