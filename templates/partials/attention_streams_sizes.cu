{% include "partials/attention_wgmma_boxes.cu" -%}
constexpr unsigned int ONES_BYTES = ONES ? 16 * ROW_BYTES : 0;
// The largest weight of the tile that set the maximum is 2^-3: those of later tiles may grow to 2.
constexpr float HEADROOM = 3.0f;
static_assert(HEAD % COLUMNS == 0 && KEYS % 16 == 0 && STAGES >= 2, "whole boxes, and room to refill");
static_assert(ONES == (BOXES == 1), "boxes of values are one distance apart, and the ones are elsewhere");

// Where the things of a stream lie in shared memory, and its barriers. A stage has one for its keys and
// one for its values, and one that its readers complete; queries have PLACES, each with a barrier that
// their readers complete, and a record of the tile.
struct Places {
    static constexpr unsigned int STREAM_BYTES = PLACES * GROUPS * Q_BYTES + STAGES * 2 * TILE_BYTES;
    static constexpr unsigned int BARRIER_BYTES = (PLACES * 24 + STAGES * 24 + 15) / 16 * 16;
    unsigned int boxes, ones, small;

    __device__ __forceinline__ Places(const unsigned char* shared, unsigned int stream) {
        const unsigned int start = shared_address(shared);
        boxes = start + stream * STREAM_BYTES;
        ones = start + STREAMS * STREAM_BYTES;
        small = ones + ONES_BYTES + stream * BARRIER_BYTES;
    }

    __device__ __forceinline__ unsigned int queries(unsigned int place) const { return boxes + place * GROUPS * Q_BYTES; }
    __device__ __forceinline__ unsigned int keys(unsigned int stage) const {
        return boxes + PLACES * GROUPS * Q_BYTES + stage * 2 * TILE_BYTES;
    }
    __device__ __forceinline__ unsigned int values(unsigned int stage) const { return keys(stage) + TILE_BYTES; }
    __device__ __forceinline__ unsigned int record(unsigned int place) const { return small + place * 16; }
    __device__ __forceinline__ unsigned int read(unsigned int place) const { return small + PLACES * 16 + place * 8; }
    __device__ __forceinline__ unsigned int full_keys(unsigned int stage) const {
        return small + PLACES * 24 + stage * 24;
    }
    __device__ __forceinline__ unsigned int full_values(unsigned int stage) const { return full_keys(stage) + 8; }
    __device__ __forceinline__ unsigned int empty(unsigned int stage) const { return full_keys(stage) + 16; }

    __device__ __forceinline__ void init_barriers() const {
#pragma unroll 1
        for (unsigned int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full_keys(stage), 1);
            barrier_init(full_values(stage), 1);
            barrier_init(empty(stage), GROUPS * 4);  // warps
        }
        for (unsigned int place = 0; place < PLACES; ++place) barrier_init(read(place), GROUPS * 4);
        fence_barriers();
    }
};

// Counts the phases of COUNT barriers in a ring.
template <unsigned int COUNT> struct Ring {
    unsigned int at = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        if (++at == COUNT) at = 0, phase ^= 1;
    }
};
