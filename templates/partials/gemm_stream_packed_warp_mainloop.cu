        // For few rows of x, each warp converts its weight rows and issues warp-level MMAs, without waiting for other warps.
#pragma unroll
        for (int i = 0; i < ACCUMULATORS; ++i) acc[i] = 0.0f;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            barrier_wait(full + stage * 8, parity);
            // The MMAs of the previous step have been issued, so the reads of its stage are complete and the stage is free. All lanes
            // arrive, because each lane has read from the stage.
            if (refills && step >= LAG) barrier_arrive(empty + (stage >= LAG ? stage - LAG : stage - LAG + STAGES) * 8);
            const unsigned int x_rows = ring + stage * STAGE_BYTES, values = x_rows + X_BYTES;
{%- if gated %}
            const int first_row = warp * 8 + lane / 4, half_rows = BLOCK_N / 2;  // this lane's first row, and the distance to its second
{%- else %}
            const int first_row = warp * 16 + lane / 4, half_rows = 8;
{%- endif %}
{%- if group > 0 %}
            const unsigned int scales = values + VALUE_BYTES;
            Scale scale[2];
            float sums[ACCUMULATORS];  // over the columns of one group
{%- endif %}
#pragma unroll
            for (int block = 0; block < 2; ++block) {
                unsigned int words[2][LANE_WORDS];
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    load_words(words[half], values + (block * BLOCK_N + first_row + half * half_rows) * ROW_BYTES + lane % 4 * (ROW_BYTES / 4));
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    const int k = block * 4 + pair * 2;  // first of two MMAs of 16 columns
                    unsigned int fragments[2][4];
{%- if group > 0 %}
                    if (k * 16 % GROUP == 0) {
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            scale[half] = scale_of(load_word(scales + (k * 16 / GROUP * BLOCK_N + first_row + half * half_rows) * {{ scale_bytes }}));
#pragma unroll
                        for (int i = 0; i < ACCUMULATORS; ++i) sums[i] = 0.0f;
                    }
{%- endif %}
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd)
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            unpack_weight(word_of(words[half], pair * 2 + odd){% if group > 0 %}, scale[half]{% endif %}, fragments[odd][half], fragments[odd][half + 2]);
#pragma unroll
                    for (int octet = 0; octet < MMA_N / 8; ++octet) {
                        // TMA swizzles the 16-byte chunks of a row.
                        unsigned int tokens[4];
                        load_matrices(tokens, x_rows + block * (X_BYTES / 2) + octet * 1024 + lane % 8 * 128 + ((pair * 4 + lane / 8) ^ (lane % 8)) * 16);
#pragma unroll
                        for (int odd = 0; odd < 2; ++odd)
                            warp_mma(&{% if group > 0 %}sums{% else %}acc{% endif %}[octet * 4], fragments[odd], tokens[odd * 2], tokens[odd * 2 + 1]);
                    }
{%- if group > 0 %}
                    if ((k + 2) * 16 % GROUP == 0) {
#pragma unroll
                        for (int i = 0; i < ACCUMULATORS; ++i) acc[i] = fmaf(sums[i], scale[i / 2 % 2].factor, acc[i]);
                    }
{%- endif %}
                }
            }
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
