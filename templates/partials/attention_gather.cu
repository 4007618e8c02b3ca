constexpr unsigned int GATHER_WARPS = 4 / PIPELINES;               // producer warps per pipeline
constexpr unsigned int GATHERERS = GATHER_WARPS * 32;
constexpr unsigned int ROW_CHUNKS = HEAD / 8;                      // 16-byte chunks per row
constexpr unsigned int PASS = 32 / ROW_CHUNKS;                     // rows that a warp copies at once
constexpr unsigned int WARP_ROWS = KEYS / GATHER_WARPS;            // consecutive rows of a tile that a warp copies
static_assert(KEYS % GATHER_WARPS == 0 && WARP_ROWS % PASS == 0 && WARP_ROWS <= 32, "a lane for each row's slot");
static_assert(STRIDE % HEAD == 0, "rows of a cache have numbers");
static_assert(STAGES > 2, "a consumer needs the next stage's keys before it empties a stage, while one is on its way");

// Raises the expected transaction bytes of the current phase without arriving.
__device__ __forceinline__ void barrier_expect(unsigned int barrier, unsigned int bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for this thread's copies except the last PENDING groups, and arrives at the full barriers of stage `at`. WGMMA reads through the
// async proxy, so a thread must fence its copies before it arrives. It therefore cannot use cp.async.mbarrier.arrive.
template <int PENDING> __device__ __forceinline__ void arrive_full(const SharedStorage& smem, unsigned int at) {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
    fence_for_copies();
    barrier_arrive(smem.full_keys(at));
    barrier_arrive(smem.full_values(at));
}

// Code of the producer warps of a pipeline. The warps load Q with TMA, and gather rows of K and V by slot from the cache. Rows past the
// last key become zeros.
__device__ __forceinline__ void produce(const SharedStorage& smem, const TensorMap& q, const Element* keys,
                                        const Element* values, const int* slots, const int* slot_starts,
                                        const int* key_lens, TileScheduler& scheduler, PersistentSchedule& schedule) {
    constexpr unsigned int NONE = ~0u;
    PipelineState<Q_STAGES> q_stage;
    PipelineState<STAGES> stage;
    const unsigned int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % GATHER_WARPS * WARP_ROWS;
    const unsigned int chunk = lane % ROW_CHUNKS, pass_row = lane / ROW_CHUNKS;
    const bool leads = threadIdx.x % GATHERERS == 0;
    for (;;) {
        Tile tile = schedule.next(scheduler);
        tile.keys = tile.length == 0 ? 0 : __ldg(key_lens + tile.sequence);
        const int* own = slots + (tile.length == 0 ? 0 : __ldg(slot_starts + tile.sequence)) + warp_row;
        const unsigned int n_keys = tile.keys_of(ROWS);
        // Index of the cache row that is the warp's l-th row, in lane l. Indices count rows of HEAD elements.
        const auto row_from = [&](unsigned int key) {
            if (lane >= WARP_ROWS || key + warp_row + lane >= n_keys) return NONE;
            const unsigned int slot = __ldg(own + key + lane);
            return slot / BLOCK * static_cast<unsigned int>(STRIDE / HEAD) + tile.head / GROUP * BLOCK + slot % BLOCK;
        };
        unsigned int rows = row_from(0);
        if (leads) {
            barrier_wait(smem.empty_queries(q_stage.index), q_stage.phase ^ 1);
            store_tile(smem.tile(q_stage.index), tile);
        }
        barrier_wait(smem.empty(stage.index), stage.phase ^ 1);
        if (tile.length == 0) {
            barrier_arrive(smem.full_keys(stage.index));
            return;
        }
        if (leads) {
            const unsigned int consumers = min((tile.length - tile.first + 63) / 64, static_cast<unsigned int>(CONSUMERS));
            barrier_expect(smem.full_keys(stage.index), consumers * Q_BYTES);  // queries arrive with the first keys
            for (unsigned int i = 0; i < consumers; ++i) {
                load_boxes(smem.queries(q_stage.index) + i * Q_BYTES, q, {{ q_column }} / COLUMNS + tile.head * BOXES,
                           tile.start + tile.first + i * 64, smem.full_keys(stage.index));
            }
        }
        __syncwarp();
        unsigned int on_its_way = 0;  // index of the previous stage, whose copies are in flight
        for (unsigned int key = 0; key < n_keys; key += KEYS) {
            const unsigned int next_rows = row_from(key + KEYS);  // loaded early, so that it is available when the next stage is empty
            if (key > 0) barrier_wait(smem.empty(stage.index), stage.phase ^ 1);
#pragma unroll 2
            for (unsigned int i = 0; i < WARP_ROWS; i += PASS) {
                const unsigned int from = __shfl_sync(0xffffffff, rows, i + pass_row);
                const unsigned int to = swizzled<KEYS>(warp_row + i + pass_row, chunk);
                const unsigned long long at = from == NONE ? 0 : static_cast<unsigned long long>(from) * HEAD + chunk * 8;
                if (PASS * ROW_CHUNKS < 32 && pass_row >= PASS) continue;
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem.keys(stage.index) + to),
                             "l"(keys + at), "r"(from == NONE ? 0 : 16)
                             : "memory");
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem.values(stage.index) + to),
                             "l"(values + at), "r"(from == NONE ? 0 : 16)
                             : "memory");
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
            rows = next_rows;
            if (key > 0) arrive_full<1>(smem, on_its_way);
            on_its_way = stage.index;
            stage.advance();
        }
        arrive_full<0>(smem, on_its_way);
        q_stage.advance();
    }
}
