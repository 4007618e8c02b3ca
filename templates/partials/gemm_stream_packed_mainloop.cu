        // The weight's fragments of one block (64 columns) are converted while the MMAs of the previous block run.
        unsigned int fragments[2][4][4];
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            barrier_wait(full + stage * 8, parity);
            const unsigned int x_rows = ring + stage * STAGE_BYTES, values = x_rows + X_BYTES;
{%- if group > 0 %}
            const unsigned int scales = values + VALUE_BYTES;
{%- endif %}
#pragma unroll
            for (int block = 0; block < 2; ++block) {
                auto& to = fragments[block];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
{%- if gated %}
                    const int row = half * (BLOCK_N / 2) + warp * 8 + lane / 4;  // row in the first or the second half of the weight tile
{%- else %}
                    const int row = warp * 16 + half * 8 + lane / 4;
{%- endif %}
                    unsigned int words[LANE_WORDS];
                    load_words(words, values + (block * BLOCK_N + row) * ROW_BYTES + lane % 4 * (ROW_BYTES / 4));
{%- if group > 0 %}
                    Scale scale;
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        if (k * 16 % GROUP == 0) scale = scale_of(load_word(scales + ((block * 64 + k * 16) / GROUP * BLOCK_N + row) * {{ scale_bytes }}));
                        unpack_weight(word_of(words, k), scale, to[k][half], to[k][half + 2]);
                    }
{%- else %}
#pragma unroll
                    for (int k = 0; k < 4; ++k) unpack_weight(word_of(words, k), to[k][half], to[k][half + 2]);
{%- endif %}
                }
                const unsigned long long x_desc = matrix_descriptor(x_rows + block * (X_BYTES / 2));
                warpgroup_arrive();
#pragma unroll
                for (int k = 0; k < 4; ++k) warpgroup_mma_packed(acc, to[k], x_desc + k * 2, step > 0 || block > 0 || k > 0);
                warpgroup_commit();
                warpgroup_wait<1>();
            }
            // The MMAs of the previous step are complete, so the stage of that step is free. All lanes arrive, because each lane has read
            // from the stage.
            if (refills && step >= LAG) barrier_arrive(empty + (stage >= LAG ? stage - LAG : stage - LAG + STAGES) * 8);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }