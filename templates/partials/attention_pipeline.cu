{% include "partials/attention_wgmma_tile.cu" -%}
constexpr unsigned int ARRIVALS = {{ arrivals }};  // arrivals of producer threads at a full barrier
constexpr unsigned int RECORD = {{ record }};  // bytes of the tile record that the scheduler passes to consumers
constexpr unsigned int ONES_BYTES = ONES ? 16 * ROW_BYTES : 0;

// Shared memory and barriers of a pipeline. A K/V stage has a full barrier for its keys, a full barrier for its values, and an empty
// barrier. A Q stage has an empty barrier and the scheduler's tile record. The full barrier of a tile's first keys also counts the queries.
struct SharedStorage {
    static constexpr unsigned int TENSOR_BYTES = Q_STAGES * CONSUMERS * Q_BYTES + STAGES * 2 * TILE_BYTES;
    static constexpr unsigned int BARRIER_BYTES = (Q_STAGES * (RECORD + 8) + STAGES * 24 + 15) / 16 * 16;
    unsigned int tensors, ones, barriers;

    __device__ __forceinline__ SharedStorage(const unsigned char* shared, unsigned int pipeline) {
        const unsigned int start = shared_address(shared);
        tensors = start + pipeline * TENSOR_BYTES;
        ones = start + PIPELINES * TENSOR_BYTES;
        barriers = ones + ONES_BYTES + pipeline * BARRIER_BYTES;
    }

    __device__ __forceinline__ unsigned int queries(unsigned int q_stage) const {
        return tensors + q_stage * CONSUMERS * Q_BYTES;
    }
    __device__ __forceinline__ unsigned int keys(unsigned int stage) const {
        return tensors + Q_STAGES * CONSUMERS * Q_BYTES + stage * 2 * TILE_BYTES;
    }
    __device__ __forceinline__ unsigned int values(unsigned int stage) const { return keys(stage) + TILE_BYTES; }
    __device__ __forceinline__ unsigned int tile(unsigned int q_stage) const { return barriers + q_stage * RECORD; }
    __device__ __forceinline__ unsigned int empty_queries(unsigned int q_stage) const {
        return barriers + Q_STAGES * RECORD + q_stage * 8;
    }
    __device__ __forceinline__ unsigned int full_keys(unsigned int stage) const {
        return barriers + Q_STAGES * (RECORD + 8) + stage * 24;
    }
    __device__ __forceinline__ unsigned int full_values(unsigned int stage) const { return full_keys(stage) + 8; }
    __device__ __forceinline__ unsigned int empty(unsigned int stage) const { return full_keys(stage) + 16; }

    __device__ __forceinline__ void init_barriers() const {
#pragma unroll 1
        for (unsigned int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full_keys(stage), ARRIVALS);
            barrier_init(full_values(stage), ARRIVALS);
            barrier_init(empty(stage), CONSUMERS * 4);  // one arrival per consumer warp
        }
        for (unsigned int q_stage = 0; q_stage < Q_STAGES; ++q_stage) {
            barrier_init(empty_queries(q_stage), CONSUMERS * 4);
        }
        fence_barriers();
    }
};

// Stage index and phase parity of a ring with COUNT stages.
template <unsigned int COUNT> struct PipelineState {
    unsigned int index = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        if (++index == COUNT) index = 0, phase ^= 1;
    }
};
