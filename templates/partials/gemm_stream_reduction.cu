        if constexpr (SPLITS == 1) {
#pragma unroll
            for (int octet = 0; octet < OCTETS; ++octet) {
                const float sum[4] = {acc[octet * 4], acc[octet * 4 + 1], acc[octet * 4 + 2], acc[octet * 4 + 3]};
                if (octet < octets) epilogue(octet, sum{% if residual %}, residuals[octet]{% endif %});
{%- if staged %}
                if (octet < octets && (octet % STAGED_OCTETS == STAGED_OCTETS - 1 || octet == octets - 1)) store_rows(octet / STAGED_OCTETS * STAGED_OCTETS);
{%- endif %}
            }
        } else {
            // Each CTA sends its accumulators of an octet (8 tokens) to the CTA that finishes this octet. The receiver adds them in the
            // order of the parts of K.
#pragma unroll
            for (int octet = 0; octet < OCTETS; ++octet) {
                const unsigned int partial = partials + (octet / SPLITS * SPLITS + rank) * PARTIAL_BYTES + threadIdx.x * 16;
                if (octet < octets)
                    store_remote(address_in(partial, octet % SPLITS), acc[octet * 4], acc[octet * 4 + 1], acc[octet * 4 + 2],
                                 acc[octet * 4 + 3], address_in(arrived, octet % SPLITS));
            }
{%- if centered %}
            const unsigned int vectors = partials + OWNED * SPLITS * PARTIAL_BYTES + threadIdx.x / 4 * 16;
            if (lane % 4 == 0) {
#pragma unroll
                for (int to = 0; to < SPLITS; ++to)
                    store_remote(address_in(vectors + rank * (PARTIAL_BYTES / 4), to), of_gamma[0], of_gamma[1], of_beta[0], of_beta[1],
                                 address_in(arrived, to));
            }
{%- endif %}
            barrier_wait_for_cluster(arrived, 0);
{%- if centered %}
            of_gamma[0] = of_gamma[1] = of_beta[0] = of_beta[1] = 0.0f;
#pragma unroll
            for (int split = 0; split < SPLITS; ++split) {
                float more[4];
                load_four(more, vectors + split * (PARTIAL_BYTES / 4));
                of_gamma[0] += more[0], of_gamma[1] += more[1], of_beta[0] += more[2], of_beta[1] += more[3];
            }
{%- endif %}
#pragma unroll{% if not residual %} 1{% endif %}
            for (int i = 0; i < OWNED; ++i) {{ "{" }}{% if residual %}  // unrolled, because residuals are in registers{% endif %}
                if (i * SPLITS + static_cast<int>(rank) >= octets) break;
                float sum[4] = {};
#pragma unroll
                for (int split = 0; split < SPLITS; ++split) {
                    float more[4];
                    load_four(more, partials + (i * SPLITS + split) * PARTIAL_BYTES + threadIdx.x * 16);
#pragma unroll
                    for (int e = 0; e < 4; ++e) sum[e] += more[e];
                }
                epilogue(i * SPLITS + rank, sum{% if residual %}, residuals[i]{% endif %});
            }
        }
{%- if emits %}
        consumers_sync();
        const int token = threadIdx.x;
        if (token < n_tokens && token / 8 % SPLITS == static_cast<int>(rank)) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                float sums[2] = {};
#pragma unroll
                for (int from = 0; from < 4; ++from)
                    sums[0] += warp_stats[group * 4 + from][token][0], sums[1] += warp_stats[group * 4 + from][token][1];
                const int part = column / 64 + group;
                float* to = row_stats + (static_cast<size_t>(first_token + token) * ((N + 63) / 64) + part) * 2;
                if (part * 64 < N) *reinterpret_cast<float2*>(to) = make_float2(sums[0], sums[1]);
            }
        }
        if (tile + static_cast<int>(clusters) < tiles) consumers_sync();  // before warp_stats are overwritten
{%- endif %}
