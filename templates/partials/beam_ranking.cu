        // Ranks the candidates of the group by score, then lower beam, then lower token id.
        for (int at = thread; at < of_group * static_cast<int>(STRIDE); at += THREADS) {
            const int beam = first + at / static_cast<int>(STRIDE), i = at % static_cast<int>(STRIDE);
            if (i >= n_ahead[beam + 1] - n_ahead[beam]) continue;
            const int id = candidate_ids[(row + beam) * STRIDE + i];
            float x = candidate_values[(row + beam) * STRIDE + i];
            int n_taken = 0;
            for (int other = 0; other < first; ++other) n_taken += state[other / of_group * of_group] != DONE && token[other] == id;
            if (n_taken > 0 && !is_forced) {
                // Hugging Face transformers applies the diversity penalty before the rules, so its repetition penalty also scales the
                // diversity penalty. Here, the rules have already been applied, so the diversity penalty is scaled explicitly.
                bool is_there = false;
                const int* there = tokens_before + start_of[beam];
                for (int j = 0; request.repetition_penalty != 1.0f && j < n_known; ++j) is_there |= there[j] == id;
                x -= n_taken * request.diversity * (is_there ? request.repetition_penalty : 1.0f);
            }
            // 28 bits are enough for the token ids of any vocabulary.
            const unsigned int lower = static_cast<unsigned int>(beam) << 28 | static_cast<unsigned int>(id);
            numbers[n_ahead[beam] - begin + i] = static_cast<unsigned long long>(key_of(x + running[beam])) << 32 | (0xffffffffu - lower);
        }
        __syncthreads();
        for (int at = thread; at < n_all; at += THREADS) {
            const unsigned long long own = numbers[at];
            int greater = 0;
#pragma unroll 8
            for (int i = 0; i < n_all; ++i) greater += numbers[i] > own;
            if (greater < n_kept) {
                const unsigned int key = own >> 32, lower = 0xffffffffu - static_cast<unsigned int>(own);
                kept_score[greater] = __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
                kept_beam[greater] = lower >> 28;
                kept_id[greater] = lower & 0x0fffffffu;
            }
        }
        __syncthreads();
