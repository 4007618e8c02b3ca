    // Each group sums every GROUPS-th row from `begin` to `end`{% if by_position %}, weighted by the row's position (counted from 1){% endif %}.
    // The first group then adds up the partial sums of all groups.
    if (group < GROUPS) {
#pragma unroll 4
        for (int t = begin + group; t < end; t += GROUPS) {
            const T* from = x + static_cast<long long>(t) * WIDTH;
{%- if by_position %}
            const float weight = static_cast<float>(t - begin + 1);
{%- endif %}
#pragma unroll
            for (int h = 0; h < PACKS_PER_THREAD; ++h) {
                const Pack<T, N> a = load_pack<N>(from + pack_column(h));
#pragma unroll
                for (int j = 0; j < N; ++j) {{ total }}[h][j] += {% if by_position %}weight * {% endif %}to_float(a.at[j]);
            }
        }
    }
    if constexpr (GROUPS > 1) {  // each thread has one pack in this case
        __shared__ float partial[GROUPS][N][GROUP];
        if (group < GROUPS) {
#pragma unroll
            for (int j = 0; j < N; ++j) partial[group][j][threadIdx.x % GROUP] = {{ total }}[0][j];
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < N; ++j) {
            {{ total }}[0][j] = 0.0f;
            if (group == 0) {
#pragma unroll 8
                for (int g = 0; g < GROUPS; ++g) {{ total }}[0][j] += partial[g][j][threadIdx.x];
            }
        }
    }