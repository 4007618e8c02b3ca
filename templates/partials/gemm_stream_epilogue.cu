        // Applies bias, activation and rounding to the accumulators of an octet (8 tokens), and stores the results.
{%- if residual %}
        auto epilogue = [&](int octet, const float (&sum)[4], const unsigned int (&add)[2]) {
{%- else %}
        auto epilogue = [&](int octet, const float (&sum)[4]) {
{%- endif %}
{%- if not staged %}
            const int token = octet * 8 + lane / 4;
            const size_t at = static_cast<size_t>(first_token + token) * N + my_column;
{%- endif %}
            float y[4];  // in the order of the accumulators
{%- if normed %}
            const float4 two = *reinterpret_cast<const float4*>(&normals[octet * 8 + lane % 4 * 2]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
{%- if centered %}
                y[e] = fmaf(sum[e], e % 2 ? two.z : two.x, fmaf(e % 2 ? two.w : two.y, of_gamma[e / 2], of_beta[e / 2] + lane_bias[e / 2]));
{%- else %}
                y[e] = fmaf(sum[e], e % 2 ? two.z : two.x, lane_bias[e / 2]);
{%- endif %}
            }
{%- else %}
#pragma unroll
            for (int e = 0; e < 4; ++e) y[e] = sum[e] + lane_bias[e / 2];
{%- endif %}
{%- if gated %}
            const unsigned int pair = transposed({% if to_e4m3 %}pack_result{% else %}pack_pair<T>{% endif %}({{ activation }}(y[0]) * y[2], {{ activation }}(y[1]) * y[3]{% if to_e4m3 %}, factor{% endif %}));
            if (token < n_tokens) store_two(out + at, my_column, pair);
{%- else %}
{%- if emits %}
            float lane_stats[4] = {};  // Σ s of this lane's two tokens, then Σ s² of the two tokens
{%- endif %}
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float s[2] = { {{ activation }}(y[half * 2]), {{ activation }}(y[half * 2 + 1]) };
{%- if residual %}
                float more[2];
                unpack_pair<T>(transposed(add[half]), more[0], more[1]);
                s[0] += more[0], s[1] += more[1];
{%- endif %}
                const unsigned int pair = transposed({% if to_e4m3 %}pack_result(s[0], s[1], factor){% else %}pack_pair<T>(s[0], s[1]){% endif %});
{%- if staged %}
                staged[staging][octet % STAGED_OCTETS * 8 + lane / 4][warp * 8 + half * 4 + lane % 4] = pair;
{%- else %}
                if (token < n_tokens) store_two(out + at + half * 8, my_column + half * 8, pair);
{%- endif %}
{%- if emits %}
                const unsigned int scaled_pair = transposed(pack_pair<T>(s[0] * scale[half], s[1] * scale[half]));
                if (token < n_tokens) store_two(scaled + at + half * 8, my_column + half * 8, scaled_pair);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float inside = row_of(tile) + half * 8 < N ? s[e] : 0.0f;
                    lane_stats[e] += inside;
                    lane_stats[2 + e] = fmaf(inside, inside, lane_stats[2 + e]);
                }
{%- endif %}
            }
{%- if emits %}
            // Butterfly reduction over the eight lanes with the same lane % 4, which hold one column each. In each of the first two steps,
            // a lane sends half of its sums to its partner, so one of the four sums remains per lane.
            const bool square_sum = lane & 16, second = lane & 8;
            float partial[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float passed = __shfl_xor_sync(0xffffffff, square_sum ? lane_stats[e] : lane_stats[2 + e], 16);
                partial[e] = (square_sum ? lane_stats[2 + e] : lane_stats[e]) + passed;
            }
            float one = (second ? partial[1] : partial[0]) + __shfl_xor_sync(0xffffffff, second ? partial[0] : partial[1], 8);
            one += __shfl_xor_sync(0xffffffff, one, 4);
            if (!(lane & 4)) warp_stats[warp][octet * 8 + lane % 4 * 2 + second][square_sum] = one;
{%- endif %}
{%- endif %}
        };
