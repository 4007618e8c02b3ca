    // Applies bias, activation and rounding. A lane has pairs of accumulators. A pair is one column of two tokens. `transposed` turns the
    // pair into two neighboring columns of one token, which the lane stores.
{%- if residual %}
    auto epilogue = [&](int octet, const float (&sum)[4], const unsigned int (&add)[2]) {
{%- else %}
    auto epilogue = [&](int octet, const float (&sum)[4]) {
{%- endif %}
        const int token = octet * 8 + lane / 4, column = row + warp * 16 + lane % 4 * 2;
        T* to = out + static_cast<size_t>(first_token + token) * N + column;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
{%- if residual %}
            float more[2];
            unpack_pair<T>(transposed(add[half]), more[0], more[1]);
            const unsigned int pair = transposed(pack_pair<T>({{ activation }}(sum[half * 2] + lane_bias[half]) + more[0],
                                                              {{ activation }}(sum[half * 2 + 1] + lane_bias[half]) + more[1]));
{%- else %}
            const unsigned int pair = transposed(pack_pair<T>({{ activation }}(sum[half * 2] + lane_bias[half]),
                                                              {{ activation }}(sum[half * 2 + 1] + lane_bias[half])));
{%- endif %}
            if (token < n_tokens && column + half * 8 < N) *reinterpret_cast<unsigned int*>(to + half * 8) = pair;
        }
    };
{% include "partials/split_k_reduction.cu" %}
