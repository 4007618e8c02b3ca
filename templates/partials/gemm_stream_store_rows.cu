        // With an odd number of columns, every other row is not aligned to 4 bytes. Each warp stores whole rows of the tile in 4-byte
        // words. Storing 2-byte elements of eight rows at a time would take as long in L2 as reading the weight from device memory.
        const auto store_rows = [&](int first_octet) {
            consumers_sync();
#pragma unroll 1
            for (int row = warp; row < STAGED_OCTETS * 8; row += CONSUMERS / 32) {
                const int token = first_octet * 8 + row;
                if (token >= n_tokens) break;
                T* to = out + static_cast<size_t>(first_token + token) * N + column;
                const unsigned int* from = staged[staging][row];
                const int shifted = (first_token + token) % 2, n = min(N - column, BLOCK_N);
                if (shifted && lane == 0) to[0].bits = from[0] & 0xffff;
#pragma unroll
                for (int i = lane; i < BLOCK_N / 2; i += 32) {
                    const int at = i * 2 + shifted;
                    const unsigned int pair = shifted ? __funnelshift_r(from[i], from[i + 1], 16) : from[i];
                    if (at + 1 < n) *reinterpret_cast<unsigned int*>(to + at) = pair;
                    else if (at < n) to[at].bits = pair & 0xffff;
                }
            }
            staging ^= 1;  // alternates, so that a fast warp does not overwrite data that other warps still read
        };
