    // Epilogue of gemm_mma with results in E4M3. Applies bias and activation, divides by out_scale, and rounds in registers. Two
    // neighboring lanes hold four adjacent columns of each n8 tile. They exchange a pair of columns, so that each lane stores four columns
    // of one of two tiles.
    const float out_factor = 1.0f / *out_scale;
    const int odd = lane % 2;
#pragma unroll
    for (int j = 0; j < N_TILES; j += 2) {
        const int column = block_n + warp_n + j * 8;
        const int mine = column + lane % 4 * 2;  // this lane has columns mine, mine + 1, mine + 8 and mine + 9
        float lane_bias[4] = {};
{%- if bias %}
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int at = mine + e / 2 * 8 + e % 2;
            lane_bias[e] = at < N ? to_float(bias[at]) : 0.0f;
        }
{%- endif %}
        const int at = column + odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned int row = block_m + warp_m + i * 16 + half * 8 + lane / 4;
                float result[4];
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    result[e] = {{ activation }}(c[i][j + e / 2][half * 2 + e % 2] + lane_bias[e]) * out_factor;
                const unsigned int own = pack_e4m3(result[0], result[1], result[2], result[3]);
                const unsigned int other = __shfl_xor_sync(0xffffffff, own, 1);
                if (row < rows && at < N)
                    *reinterpret_cast<unsigned int*>(out + static_cast<size_t>(row) * N + at) =
                        __byte_perm(own, other, odd ? 0x3276 : 0x5410);
            }
        }
    }
