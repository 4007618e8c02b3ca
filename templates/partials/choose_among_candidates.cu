    if (fits) {
        const unsigned int n = n_found;
        // Several neighboring lanes compare a candidate with all other candidates. The first of these lanes keeps the result.
        const unsigned int lookers = lookers_of(n), nth_looker = thread % lookers;
        Mass own = 0;
#pragma unroll
        for (unsigned int i = 0; i < PASSES; ++i) {
            if (i * THREADS >= n * lookers) break;
            const unsigned int at = (thread + i * THREADS) / lookers, key = at < n ? keys[at] : KEY_OF_WRONG;
            unsigned int greater = 0;
#pragma unroll 8
            for (unsigned int j = nth_looker; j < n; j += lookers) greater += keys[j] > key;
            greater = sum_of_lookers(greater, lookers);
            if (at >= n || nth_looker > 0) continue;
            // All candidates equal to the k-th largest are kept.
            masses[at] = top_k == 0 || greater < top_k ? mass_of(probability(of_key(key))) : 0;
            own += masses[at];
        }
        own = all_reduce<Added>(own, parts);
        if (top_k > 0 || n_forced > 0) all = own;
        const Mass needed = is_nucleus ? static_cast<Mass>(static_cast<double>(request.top_p) * static_cast<double>(all)) : 0;
        // If the candidates have less mass than needed, the nucleus contains tokens that are not candidates.
        fits = own >= needed;
        if (fits) {
            Mass kept = 0, stays[PASSES] = {};
#pragma unroll
            for (unsigned int i = 0; i < PASSES; ++i) {
                if (i * THREADS >= n * lookers) break;
                const unsigned int at = (thread + i * THREADS) / lookers;
                const unsigned int key = at < n ? keys[at] : KEY_OF_WRONG, id = at < n ? ids[at] : 0;
                Mass before = 0;
                if (is_nucleus) {
#pragma unroll 8
                    for (unsigned int j = nth_looker; j < n; j += lookers) {
                        before += keys[j] > key || (keys[j] == key && ids[j] < id) ? masses[j] : 0;
                    }
                    before = sum_of_lookers(before, lookers);
                }
                const bool is_outside = is_nucleus && before >= needed && before > 0;
                stays[i] = at >= n || is_outside || probability(of_key(key)) < request.min_p ? 0 : masses[at];
                kept += nth_looker == 0 ? stays[i] : 0;
            }
            __syncthreads();
#pragma unroll
            for (unsigned int i = 0; i < PASSES; ++i) {
                const unsigned int at = (thread + i * THREADS) / lookers;
                if (at < n && nth_looker == 0) masses[at] = stays[i];
            }
            kept = all_reduce<Added>(kept, parts);
            const Mass target = min(static_cast<Mass>(draw * static_cast<double>(kept)), kept - 1);
#pragma unroll
            for (unsigned int i = 0; i < PASSES; ++i) {
                if (i * THREADS >= n * lookers) break;
                const unsigned int at = (thread + i * THREADS) / lookers, id = at < n ? ids[at] : 0;
                Mass lower = 0;
#pragma unroll 8
                for (unsigned int j = nth_looker; j < n; j += lookers) lower += ids[j] < id ? masses[j] : 0;
                lower = sum_of_lookers(lower, lookers);
                if (stays[i] > 0 && lower <= target && target - lower < stays[i]) choose(static_cast<int>(id));
            }
            return;
        }
        __syncthreads();
    }
