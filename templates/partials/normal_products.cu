    float4* const of_warps = reinterpret_cast<float4*>(parts) + lane;
#pragma unroll
    for (int product = 0; product < PRODUCTS; ++product) {
        const float(&sum)[4] = sums[product / N_TILES][product % N_TILES];
        of_warps[(product * WARPS + warp) * 32] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
#pragma unroll
    for (int e = 0; e < M_TILES * 2; ++e) {
        const int i = e / 2, half = e % 2, row = e * 8 + group;
        if (quad == 0) of_rows[row][0][warp] = ones[i][half * 2];
        if (quad == group / 2) of_rows[row][1][warp] = group % 2 ? squares[i][half][half * 2 + 1] : squares[i][half][half * 2];
    }
    __syncthreads();
    struct Normal { float mean, rstd; };
    auto normal_of = [&](int row) -> Normal {
        const float mean = sum_of(of_rows[row][0]) * (1.0f / K);
        // In 16 bits, what cancels here is less than what s was rounded by.
        const float variance = fmaxf(fmaf(sum_of(of_rows[row][1]), 1.0f / K, -mean * mean), 0.0f);
        return {mean, rsqrtf(variance + {{ eps }})};
    };
    // A warp finishes a product, adding what all warps have in the order of K.
    for (int product = warp; product < PRODUCTS; product += WARPS) {
        const int mine = product % N_TILES * 8 + quad * 2, at = column + mine;
        float sum[4] = {};
#pragma unroll
        for (int from = 0; from < WARPS; ++from) {
            const float4 more = of_warps[(product * WARPS + from) * 32];
            sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = product / N_TILES * 16 + half * 8 + group;
            const Normal normal_row = normal_of(token);
            float y[2];
#pragma unroll
            for (int e = 0; e < 2; ++e)
                y[e] = fmaf(fmaf(-normal_row.mean, of_columns[0][mine + e], sum[half * 2 + e]), normal_row.rstd, of_columns[1][mine + e]);
            const unsigned int pair = pack_pair<T>({{ activation }}(y[0]), {{ activation }}(y[1]));
            if (token < here && at < N)
                *reinterpret_cast<unsigned int*>(out + static_cast<size_t>(first_token + token) * N + at) = pair;
        }
    }
    // The normalised rows, a chunk of them by each block; warps without a product come first.
    for (int chunk = blockIdx.x % TILES_N; chunk < ALL_CHUNKS; chunk += TILES_N) {
        const int octet = WARPS - 1 - warp, k = chunk * CHUNK + quad * 8;
        for (int row = octet * 8 + group; row < here; row += WARPS * 8) {
            if (k >= K) break;
            const size_t at = static_cast<size_t>(first_token + row) * K + k;
            unsigned int of_x[4], of_residual[4], of_gamma[4], of_beta[4], packed[4];
            load(of_x, x + at), load(of_residual, residual + at), load(of_gamma, gamma + k), load(of_beta, beta + k);
{% if x_bias %}
            unsigned int of_bias[4];
            load(of_bias, x_bias + k);
{% endif %}
            const Normal normal_row = normal_of(row);
            float y[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float all = element(of_x, e){% if x_bias %} + element(of_bias, e){% endif %} + element(of_residual, e);
                y[e] = fmaf((all - normal_row.mean) * normal_row.rstd, element(of_gamma, e), element(of_beta, e));
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) packed[e] = pack_pair<T>(y[e * 2], y[e * 2 + 1]);
            *reinterpret_cast<uint4*>(normal + at) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
    }
