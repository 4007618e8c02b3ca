// Tiles of a pipeline (a producer and its consumers). In each round, every pipeline of the grid gets a tile. The order of the pipelines is
// reversed from round to round, so that no pipeline gets the longest sequence of every round.
struct PersistentSchedule {
    unsigned int pipeline, pipelines, end, from = 0;
    bool backwards = false;
{% if causal %}    unsigned int past = 0;  // cached keys before the tokens of this lane's sequence, in a batch of at most 32 sequences
{% endif %}
    __device__ __forceinline__ PersistentSchedule(unsigned int tokens, unsigned int batch, unsigned int pipeline)
        : pipeline(pipeline * gridDim.x + blockIdx.x), pipelines(PIPELINES * gridDim.x),
          end((tokens / ROWS + batch) * HEADS) {}

    // Returns the next tile, or a tile of length 0 after the last tile.
    __device__ __forceinline__ Tile next(TileScheduler& scheduler) {
        Tile tile;
        tile.length = 0;
        while (from < end && tile.length == 0) {
            const unsigned int index = from + (backwards ? pipelines - 1 - pipeline : pipeline);
            tile = {% if causal %}scheduler.by_keys(index, past){% else %}scheduler.at(index){% endif %};
            from += pipelines, backwards = !backwards;
        }
        return tile;
    }
};

{% if cached %}__device__ __forceinline__ unsigned int load_word(unsigned int address) {
    unsigned int x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ void store_word(unsigned int address, unsigned int x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

{% endif %}// Lane 0 loads the tile and broadcasts it. When lane 0 later arrives at the empty barrier, the whole warp has therefore read the tile.
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
{% if cached %}    x.keys = threadIdx.x % 32 == 0 ? load_word(address + 16) : 0;
    x.keys = __shfl_sync(0xffffffff, x.keys, 0);
{% endif %}    return x;
}

__device__ __forceinline__ void store_tile(unsigned int address, const Tile& x) {
    asm volatile("st.shared.v4.u32 [%0], { %1, %2, %3, %4 };" ::"r"(address), "r"(x.start), "r"(x.length),
                 "r"(x.first), "r"(x.head)
                 : "memory");
{% if cached %}    store_word(address + 16, x.keys);
{% endif %}}

{% if cached %}{% include "partials/attention_gather.cu" %}
{% else %}// The producer warp of a pipeline: loads Q, K and V with TMA into the stages as they become empty. A tile of length 0 tells the
// consumers that there are no more tiles.
__device__ __forceinline__ void produce(const SharedStorage& smem, const TensorMap& q, const TensorMap& k,
                                        const TensorMap& v, TileScheduler& scheduler, PersistentSchedule& schedule) {
    PipelineState<Q_STAGES> q_stage;
    PipelineState<STAGES> stage;
    for (;;) {
        const Tile tile = schedule.next(scheduler);
        if (threadIdx.x % 32 == 0) {
            barrier_wait(smem.empty_queries(q_stage.index), q_stage.phase ^ 1);
            store_tile(smem.tile(q_stage.index), tile);
            barrier_wait(smem.empty(stage.index), stage.phase ^ 1);
            if (tile.length == 0) {
                barrier_arrive(smem.full_keys(stage.index));
            } else {
                const unsigned int consumers =
                    min((tile.length - tile.first + 63) / 64, static_cast<unsigned int>(CONSUMERS));
                const unsigned int box = tile.head * BOXES, kv_box = tile.head / GROUP * BOXES;
                const unsigned int n_keys = tile.keys_of(ROWS);
{% if skips_keys %}                const unsigned int first_key = tile.first_key_of(tile.first);
{% endif %}                unsigned int q_bytes = consumers * Q_BYTES;  // queries arrive with the first keys
                for (unsigned int key = {{ first_key }}; key < n_keys; key += KEYS) {
                    const unsigned int keys = smem.full_keys(stage.index), values = smem.full_values(stage.index);
                    if (key > {{ first_key }}) barrier_wait(smem.empty(stage.index), stage.phase ^ 1);
                    barrier_arrive_expecting(keys, TILE_BYTES + q_bytes);
                    load_boxes(smem.keys(stage.index), k, {{ k_column }} / COLUMNS + kv_box, tile.start + key, keys);
                    if (key == {{ first_key }}) {
#pragma unroll
                        for (unsigned int i = 0; i < CONSUMERS; ++i) {
                            if (i < consumers) {
                                load_boxes(smem.queries(q_stage.index) + i * Q_BYTES, q, {{ q_column }} / COLUMNS + box,
                                           tile.start + tile.first + i * 64, keys);
                            }
                        }
                    }
                    barrier_arrive_expecting(values, TILE_BYTES);
                    load_boxes(smem.values(stage.index), v, {{ v_column }} / COLUMNS + kv_box, tile.start + key, values);
                    q_bytes = 0;
                    stage.advance();
                }
            }
            q_stage.advance();
        }
        __syncwarp();
        if (tile.length == 0) return;
    }
}
{% endif %}