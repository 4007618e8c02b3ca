    // Finds thresholds of the logits in passes over the row. This code is reached if `top_k` is larger than MOST_K, if there are too many
    // candidates, or if the nucleus also contains tokens that are not candidates.
    unsigned int least = KEY_OF_NOTHING + 1;
    if (top_k > 0) least = max(least, threshold_of(from, ruled, [](unsigned int, float) { return Mass(1); }, top_k, parts));
    Mass n_ties = ~Mass(0);  // max number of tokens to keep whose key is `least`, lowest ids first
    if (is_nucleus) {
        const unsigned int lowest = least;
        auto weigh = [&](unsigned int key, float x) { return key >= lowest ? mass_of(probability(x)) : 0; };
        all = 0;
        each(from, [&](unsigned int id, float x) {
            x = ruled(id, x);
            all += weigh(key_of(x), x);
        });
        all = all_reduce<Added>(all, parts);
        const Mass needed = max(static_cast<Mass>(static_cast<double>(request.top_p) * static_cast<double>(all)), Mass(1));
        least = max(lowest, threshold_of(from, ruled, weigh, needed, parts));
        Mass above = 0;
        each(from, [&](unsigned int id, float x) {
            x = ruled(id, x);
            if (key_of(x) > least) above += mass_of(probability(x));
        });
        above = all_reduce<Added>(above, parts);
        const Mass each_tie = max(mass_of(probability(of_key(least))), Mass(1));
        n_ties = above < needed ? (needed - above + each_tie - 1) / each_tie : 0;
    }
    // Each warp sums up the masses of a range of consecutive tokens. The sums show which warp's range contains the sampled token.
    constexpr unsigned int RANGE = (VOCABULARY + WARPS - 1) / WARPS;
    const unsigned int begin = warp * RANGE, end = min(begin + RANGE, VOCABULARY);
    const Mass tie = mass_of(probability(of_key(least)));
    auto mass_at = [&](unsigned int id, bool& is_tie) -> Mass {
        is_tie = false;
        if (id >= end) return 0;
        const float x = ruled(id, to_float(from[id]));
        const unsigned int key = key_of(x);
        if (key < least) return 0;
        const float p = probability(x);
        if (p < request.min_p) return 0;
        is_tie = key == least;
        return mass_of(p);
    };
    Mass larger = 0;
    unsigned int ties = 0;
    for (unsigned int i = begin; i < begin + RANGE; i += 32) {
        bool is_tie;
        const Mass mass = mass_at(i + lane, is_tie);
        larger += is_tie ? 0 : mass;
        ties += is_tie;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        larger += __shfl_xor_sync(ALL_LANES, larger, offset);
        ties += __shfl_xor_sync(ALL_LANES, ties, offset);
    }
    if (lane == 0) masses[warp] = larger, ids[warp] = ties;
    __syncthreads();
    Mass lower = 0, kept = 0, ties_before = 0, ties_lower = 0;
    for (unsigned int i = 0; i < WARPS; ++i) {
        if (i == warp) lower = kept, ties_lower = ties_before;
        kept += masses[i] + min(Mass(ids[i]), n_ties - min(n_ties, ties_before)) * tie;
        ties_before += ids[i];
    }
    const Mass target = min(static_cast<Mass>(draw * static_cast<double>(kept)), kept - 1);
    const Mass of_warp = larger + min(Mass(ties), n_ties - min(n_ties, ties_lower)) * tie;
    if (target < lower || target - lower >= of_warp) return;
    for (unsigned int i = begin; i < begin + RANGE; i += 32) {
        bool is_tie;
        Mass mass = mass_at(i + lane, is_tie);
        const unsigned int votes = __ballot_sync(ALL_LANES, is_tie);
        if (is_tie && ties_lower + __popc(votes & ((1u << lane) - 1u)) >= n_ties) mass = 0;
        const Mass up_to = sum_up_to_lane(mass);
        if (mass > 0 && lower + up_to > target && lower + up_to - mass <= target) choose(static_cast<int>(i + lane));
        lower += __shfl_sync(ALL_LANES, up_to, 31);
        ties_lower += __popc(votes);
        if (lower > target) return;
    }
