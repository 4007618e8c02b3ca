    // Epilogue of gemm_mma. The code uses the accumulators c and the tile coordinates of that kernel. Applies bias, activation and rounding
    // in registers. Two neighboring lanes hold four adjacent columns of each n8 tile. If STORE_BYTES is 8, they exchange a pair of columns,
    // so that each lane has four columns of one of two tiles. Each lane then stores 8 bytes, and a warp stores whole 32-byte sectors.
    const int odd = lane % 2;
#pragma unroll
    for (int j = 0; j < N_TILES; j += 2) {
        const int column = block_n + warp_n + j * 8;
        const int mine = column + lane % 4 * 2;  // this lane has columns mine, mine + 1, mine + 8 and mine + 9
        float lane_bias[4] = {};
{% if bias %}
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int at = mine + e / 2 * 8 + e % 2;
            lane_bias[e] = at < N ? to_float(bias[at]) : 0.0f;
        }
{% endif %}
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned int row = block_m + warp_m + i * 16 + half * 8 + lane / 4;
                T* to = out + static_cast<size_t>(row) * N;
                unsigned int pair[2];
{%- if residual %}
                float more[4] = {};  // residual of this lane's four columns
                const T* add = residual + static_cast<size_t>(row) * N;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int at = mine + e * 8;
                    if constexpr (STORE_BYTES >= 4) {
                        unsigned int both = 0;
                        if (row < rows && at < N) both = load_pair(add + at);
                        unpack_pair<T>(both, more[e * 2], more[e * 2 + 1]);
                    } else {
                        if (row < rows && at < N) more[e * 2] = to_float(add[at]);
                        if (row < rows && at + 1 < N) more[e * 2 + 1] = to_float(add[at + 1]);
                    }
                }
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    pair[e] = pack_pair<T>({{ activation }}(c[i][j + e][half * 2] + lane_bias[e * 2]) + more[e * 2],
                                           {{ activation }}(c[i][j + e][half * 2 + 1] + lane_bias[e * 2 + 1]) + more[e * 2 + 1]);
{%- else %}
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    pair[e] = pack_pair<T>({{ activation }}(c[i][j + e][half * 2] + lane_bias[e * 2]),
                                           {{ activation }}(c[i][j + e][half * 2 + 1] + lane_bias[e * 2 + 1]));
{%- endif %}
                if constexpr (STORE_BYTES == 8) {
                    const unsigned int got = __shfl_xor_sync(0xffffffff, odd ? pair[0] : pair[1], 1);
                    const int at = column + odd * 8 + lane % 4 / 2 * 4;
                    if (row < rows && at < N)
                        *reinterpret_cast<uint2*>(to + at) =
                            odd ? make_uint2(got, pair[1]) : make_uint2(pair[0], got);
                } else {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int at = mine + e * 8;
                        if constexpr (STORE_BYTES == 4) {
                            if (row < rows && at < N) *reinterpret_cast<unsigned int*>(to + at) = pair[e];
                        } else {
                            if (row < rows && at < N) to[at].bits = pair[e] & 0xffff;
                            if (row < rows && at + 1 < N) to[at + 1].bits = pair[e] >> 16;
                        }
                    }
                }
            }
        }
    }
