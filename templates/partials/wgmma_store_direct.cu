// Epilogue that stores from registers directly to global memory, without staging, fence or TMA. The tensor map permutes the weight's rows
// in shared memory (RowOrder::Quads, or RowOrder::PairsOfQuads for a packed weight), so that lane l holds 8 neighboring columns (16 bytes)
// of each 32 columns, in rows l / 4 and l / 4 + 8 of its warp's 16 rows. Four lanes write 64 bytes of a row.
constexpr unsigned int EPILOGUE_BYTES = 0;

{% if gated %}__device__ __forceinline__ void load_rows(unsigned int to, const TensorMap& weight, int column, int row,
                                            unsigned int barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, { %2, %3, %3, %3, %4 }], [%5];" ::"r"(to), "l"(&weight), "r"(column), "r"(0),
                 "r"(row / 32), "r"(barrier)
                 : "memory");
}

// Loads rows of the first half of the weight, and then rows of the second half.
__device__ __forceinline__ void load_weight(unsigned int to, const TensorMap& weight, int column, int row,
                                            unsigned int barrier) {
    load_rows(to, weight, column, row, barrier);
    load_rows(to + TILE_N * {% if quantized_rows %}64{% else %}128{% endif %}, weight, column, N + row, barrier);
}

{% else %}__device__ __forceinline__ void load_weight(unsigned int to, const TensorMap& weight, int column, int row,
                                            unsigned int barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, { %2, %3, %3, %3, %4 }], [%5];" ::"r"(to), "l"(&weight), "r"(column), "r"(0),
                 "r"(row / 32), "r"(barrier)
                 : "memory");
}

{% endif %}{% if prepares %}{% include "partials/wgmma_store_heads.cu" %}{% elif to_e4m3 %}{% include "partials/wgmma_store_quantized.cu" %}{% else %}// Stores this warp's rows, which are 16 of each 64 rows of the tile, from (row, column) on. tile_bias is read only if BIAS.
__device__ __forceinline__ void store_tile(const float (&acc)[M_TILES][ACCUMULATORS], const float* tile_bias, T* out,
{%- if residual %}
                                           const T* residual,
{%- endif %}
                                           unsigned int row, unsigned int column, unsigned int rows) {
    const int lane = threadIdx.x % 32;
    row += lane / 4;
    T* const first = out + static_cast<unsigned long long>(row) * N + column + lane % 4 * 8;
{% if gated %}#pragma unroll
    for (int group = 0; group < TILE_N / 32; ++group) {
        // Read the bias only when it is added, because registers cannot hold the bias of both halves.
        const float* of_gate = tile_bias + group * 32 + lane % 4 * 8;
        const auto up_of = [&](float sum, int j) { return BIAS ? sum + of_gate[TILE_N + j] : sum; };
        const auto gate_of = [&](float sum, int j) { return epilogue(sum, BIAS ? of_gate[j] : 0.0f); };
        const bool inside = N % TILE_N == 0 || column + group * 32 < N;
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
            Vector<T> results;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* gate = &acc[i / 2][(group * 4 + j) * 4 + i % 2 * 2];
                const float* up = gate + TILE_N / 2;
                reinterpret_cast<unsigned int*>(&results)[j] =
                    pack_pair<T>(gate_of(gate[0], j * 2) * up_of(up[0], j * 2), gate_of(gate[1], j * 2 + 1) * up_of(up[1], j * 2 + 1));
            }
            const int down = i / 2 * 64 + i % 2 * 8;
            if (inside && row + down < rows) {
                *reinterpret_cast<uint4*>(first + down * N + group * 32) = *reinterpret_cast<const uint4*>(&results);
            }
        }
    }
}
{% else %}#pragma unroll
    for (int group = 0; group < BLOCK_N / 32; ++group) {
        float4 accumulate[2] = {};
        if (BIAS) {
            const float4* from = reinterpret_cast<const float4*>(tile_bias + group * 32 + lane % 4 * 8);
            accumulate[0] = from[0], accumulate[1] = from[1];
        }
        const float lane_bias[8] = {accumulate[0].x, accumulate[0].y, accumulate[0].z, accumulate[0].w, accumulate[1].x, accumulate[1].y, accumulate[1].z, accumulate[1].w};
        const bool inside = N % BLOCK_N == 0 || column + group * 32 < N;
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
            Vector<T> results;
{%- if residual %}
            const int down = i / 2 * 64 + i % 2 * 8;
            uint4 add = {};
            if (inside && row + down < rows) {
                const T* from = residual + static_cast<unsigned long long>(row) * N + column + lane % 4 * 8;
                add = *reinterpret_cast<const uint4*>(from + down * N + group * 32);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* sum = &acc[i / 2][(group * 4 + j) * 4 + i % 2 * 2];
                float more[2];
                unpack_pair<T>(j == 0 ? add.x : j == 1 ? add.y : j == 2 ? add.z : add.w, more[0], more[1]);
                reinterpret_cast<unsigned int*>(&results)[j] =
                    pack_pair<T>(epilogue(sum[0], lane_bias[j * 2]) + more[0], epilogue(sum[1], lane_bias[j * 2 + 1]) + more[1]);
            }
{%- else %}
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* sum = &acc[i / 2][(group * 4 + j) * 4 + i % 2 * 2];
                reinterpret_cast<unsigned int*>(&results)[j] =
                    pack_pair<T>(epilogue(sum[0], lane_bias[j * 2]), epilogue(sum[1], lane_bias[j * 2 + 1]));
            }
            const int down = i / 2 * 64 + i % 2 * 8;
{%- endif %}
            if (inside && row + down < rows) {
                *reinterpret_cast<uint4*>(first + down * N + group * 32) = *reinterpret_cast<const uint4*>(&results);
            }
        }
    }
}
{% endif %}{% endif %}