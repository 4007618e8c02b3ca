constexpr unsigned int GATHER_WARPS = 4 / PIPELINES;               // producer warps per pipeline
constexpr unsigned int GATHERERS = GATHER_WARPS * 32;
{% if e4m3 %}constexpr unsigned int ROW_CHUNKS = HEAD / 16;                     // 16-byte chunks per row
constexpr unsigned int PASS = ROW_CHUNKS == 6 ? 4 : 32 / ROW_CHUNKS;  // rows that a warp copies at once
{% else %}constexpr unsigned int ROW_CHUNKS = HEAD / 8;                      // 16-byte chunks per row
constexpr unsigned int PASS = 32 / ROW_CHUNKS;                     // rows that a warp copies at once
{% endif %}constexpr unsigned int WARP_ROWS = KEYS / GATHER_WARPS;            // consecutive rows of a tile that a warp copies
static_assert(KEYS % GATHER_WARPS == 0 && WARP_ROWS % PASS == 0 && WARP_ROWS <= 32, "a lane for each row's slot");
constexpr unsigned int STEPS = WARP_ROWS / PASS;
// Number of rows per lane whose addresses are computed before the first of these rows is copied, so that the latencies of the computations
// overlap.
constexpr unsigned int BATCH = STEPS % 8 == 0 ? 8 : STEPS % 4 == 0 ? 4 : STEPS % 3 == 0 ? 3 : STEPS % 5 == 0 ? 5 : 1;
static_assert(STRIDE % HEAD == 0, "rows of a cache have numbers");
static_assert(STAGES > 2, "a consumer needs the next stage's keys before it empties a stage, while one is on its way");

// Raises the expected transaction bytes of the current phase without arriving.
__device__ __forceinline__ void barrier_expect(unsigned int barrier, unsigned int bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

{% if e4m3 %}{% include "partials/cache_decode.cu" %}
// Converts the chunks of a tile's rows that this thread has copied. A 16-byte chunk in E4M3 becomes two chunks of 16-bit
// elements, and was copied to the address of the first of the two. No other thread accesses these two addresses.
__device__ __forceinline__ void convert_copies(unsigned int tile) {
    const unsigned int lane = threadIdx.x % 32, chunk = lane % ROW_CHUNKS * 2, pass_row = lane / ROW_CHUNKS;
    if (PASS * ROW_CHUNKS < 32 && pass_row >= PASS) return;
#pragma unroll 2
    for (unsigned int i = 0; i < WARP_ROWS; i += PASS) {
        const unsigned int row = threadIdx.x / 32 % GATHER_WARPS * WARP_ROWS + i + pass_row;
        const unsigned int to[2] = {tile + swizzled<KEYS>(row, chunk), tile + swizzled<KEYS>(row, chunk + 1)};
        unsigned int packed[4];
        asm volatile("ld.shared.v4.u32 { %0, %1, %2, %3 }, [%4];"
                     : "=r"(packed[0]), "=r"(packed[1]), "=r"(packed[2]), "=r"(packed[3]) : "r"(to[0])
                     : "memory");
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            unsigned int words[4];
            unpack_e4m3(packed[j * 2], words[0], words[1]);
            unpack_e4m3(packed[j * 2 + 1], words[2], words[3]);
            asm volatile("st.shared.v4.u32 [%0], { %1, %2, %3, %4 };" ::"r"(to[j]), "r"(words[0]), "r"(words[1]),
                         "r"(words[2]), "r"(words[3])
                         : "memory");
        }
    }
}

{% endif %}// Waits for this thread's copies except the last PENDING groups, and arrives at the full barriers of stage `at`. WGMMA reads through the
// async proxy, so a thread must fence its copies before it arrives. It therefore cannot use cp.async.mbarrier.arrive.
template <int PENDING> __device__ __forceinline__ void arrive_full(const SharedStorage& smem, unsigned int at) {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
{% if e4m3 %}    convert_copies(smem.keys(at));
    convert_copies(smem.values(at));
{% endif %}    fence_for_copies();
    barrier_arrive(smem.full_keys(at));
    barrier_arrive(smem.full_values(at));
}

// Code of the producer warps of a pipeline. The warps load Q with TMA, and gather rows of K and V from the cache. The table `slots` gives
// the index of each key's position in the cache. Rows past the last key become zeros.
__device__ __forceinline__ void produce(const SharedStorage& smem, const TensorMap& q, const {% if e4m3 %}unsigned char{% else %}Element{% endif %}* keys,
                                        const {% if e4m3 %}unsigned char{% else %}Element{% endif %}* values, const int* slots, const int* slot_starts,
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
{% if skips_keys %}        const unsigned int first_key = tile.first_key_of(tile.first);
{% endif %}        // Returns, in lane l, the slot of the l-th row that this warp copies, for the key tile that begins at `key`.
        const auto slot_from = [&](unsigned int key) {
            return lane >= WARP_ROWS || key + warp_row + lane >= n_keys ? NONE : static_cast<unsigned int>(__ldg(own + key + lane));
        };
        unsigned int slots_ahead = slot_from({{ first_key }});
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
        for (unsigned int key = {{ first_key }}; key < n_keys; key += KEYS) {
            // Slots are loaded one tile ahead. The empty statement keeps the compiler from using them in the iteration that loads them,
            // where the warp would wait for the load.
            asm volatile("" : "+r"(slots_ahead));
            // In lane l: index of the cache row for the warp's l-th slot. A cache row has HEAD elements.
            const unsigned int rows = slots_ahead == NONE ? NONE : slots_ahead / BLOCK * static_cast<unsigned int>(STRIDE / HEAD) +
                tile.head / GROUP * BLOCK + slots_ahead % BLOCK;
            slots_ahead = slot_from(key + KEYS);
            if (key > {{ first_key }}) barrier_wait(smem.empty(stage.index), stage.phase ^ 1);
#pragma unroll 1
            for (unsigned int i = 0; i < WARP_ROWS; i += BATCH * PASS) {
                unsigned int from[BATCH];
#pragma unroll
                for (unsigned int j = 0; j < BATCH; ++j) from[j] = __shfl_sync(0xffffffff, rows, i + j * PASS + pass_row);
#pragma unroll
                for (unsigned int j = 0; j < BATCH; ++j) {
                    const unsigned int row = warp_row + i + j * PASS + pass_row;
                    const unsigned int to = swizzled<KEYS>(row, {% if e4m3 %}chunk * 2{% else %}chunk{% endif %});
                    const unsigned int column = chunk * {% if e4m3 %}16{% else %}8{% endif %};
                    const unsigned long long at = from[j] == NONE ? 0 : static_cast<unsigned long long>(from[j]) * HEAD + column;
                    if (PASS * ROW_CHUNKS < 32 && pass_row >= PASS) continue;
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem.keys(stage.index) + to),
                                 "l"(keys + at), "r"(from[j] == NONE ? 0 : 16)
                                 : "memory");
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem.values(stage.index) + to),
                                 "l"(values + at), "r"(from[j] == NONE ? 0 : 16)
                                 : "memory");
                }
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
            if (key > {{ first_key }}) arrive_full<1>(smem, on_its_way);
            on_its_way = stage.index;
            stage.advance();
        }
        arrive_full<0>(smem, on_its_way);
        q_stage.advance();
    }
}
