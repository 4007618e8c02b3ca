    // Finds the best token of each group of a row's logits (see PIECE for groups). All CTAs of the row take part. The CTA that arrives last
    // continues with the code after this partial, and the other CTAs exit.
    const unsigned int row = blockIdx.y, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const float infinite = __int_as_float(0x7f800000);
    const Request& request = reinterpret_cast<const Request*>(requests)[row];
    const int n_known = __ldg(known + row);
    const int* there = tokens + __ldg(slot_starts + row);
    const int* list = request.ids;
    const int *suppressed = list + request.n_end, *suppressed_first = suppressed + request.n_suppressed;
    const int *forced_first = suppressed_first + request.n_suppressed_first, *forced_last = forced_first + request.n_forced_first;
    const bool is_first = n_known == request.n_prompt, is_last = n_known + 1 == request.most;

    // Builds the bitmaps `seen` and `forbidden` before griddepcontrol.wait: they depend on the request and the sequence so far, not on
    // logits.
    const bool penalises = n_known > 0 && request.repetition_penalty != 1.0f;
    const bool no_end = n_known < request.least && request.n_end > 0;
    const bool forbids = n_known > 0 && (request.ngram > 0 || no_end || request.n_suppressed > 0 || (is_first && request.n_suppressed_first > 0));
    if (penalises || forbids) {
        for (unsigned int i = thread; i < WORDS; i += THREADS) seen[i] = forbidden[i] = 0;
        __syncthreads();
        auto set = [](unsigned int* bitmap, int id) {
            if (static_cast<unsigned int>(id) < VOCABULARY) atomicOr(bitmap + id / 32, 1u << id % 32);
        };
        if (penalises) {
            for (int i = thread; i < n_known; i += THREADS) set(seen, there[i]);
        }
        if (request.ngram > 0) {
            const int n = request.ngram;
            const int* last = there + n_known - (n - 1);
            for (int i = thread; i + n <= n_known; i += THREADS) {
                int equal = 0;
                while (equal < n - 1 && there[i + equal] == last[equal]) ++equal;
                if (equal == n - 1) set(forbidden, there[i + n - 1]);
            }
        }
        if (no_end) {
            for (int i = thread; i < request.n_end; i += THREADS) set(forbidden, list[i]);
        }
        for (int i = thread; i < request.n_suppressed; i += THREADS) set(forbidden, suppressed[i]);
        if (is_first) {
            for (int i = thread; i < request.n_suppressed_first; i += THREADS) set(forbidden, suppressed_first[i]);
        }
        __syncthreads();
    }
    griddepcontrol_wait();
{% if beams %}
    if (n_known == 0 || request.n_beams == 0) return;  // the same for all CTAs of the row
{% else %}
    if (n_known == 0) {  // the same for all CTAs of the row
        if (blockIdx.x == 0 && thread == 0) chosen[row] = IDLE;
        return;
    }
    if (request.n_beams > 0) return;
{% endif %}
    const T* from = logits + static_cast<unsigned long long>(row) * VOCABULARY;
    auto ruled = [&](unsigned int id, float x) {
{% if beams %}
        // With beam search, the repetition penalty applies to log-probabilities, which are not available before the whole row has been
        // read. Tokens that occur in the sequence are therefore excluded here, and evaluated later.
        if (penalises && seen[id / 32] >> id % 32 & 1u) return -infinite;
{% else %}
        if (penalises && seen[id / 32] >> id % 32 & 1u) {
            x = x < 0.0f ? x * request.repetition_penalty : x / request.repetition_penalty;
        }
{% endif %}
        return forbids && forbidden[id / 32] >> id % 32 & 1u ? -infinite : x;
    };
{% if beams %}
    const bool weighs = request.flags & RENORMALIZES;  // whether the sum of the exponentials of all tokens is needed
    constexpr bool logs = true;
    constexpr float temperature = 1.0f;
{% else %}
    const bool logs = request.flags & LOG_PROBABILITY, samples = request.flags & SAMPLES;
    const unsigned int top_k = request.top_k;
    const bool weighs = samples && top_k == 0;  // whether the sum of the exponentials of all tokens is needed
    const float temperature = request.temperature;
{% endif %}

    // Finds the best token of each group of this CTA. Sums of exponentials are relative to the largest logit so far. If the CTA has more
    // warps than pieces, several warps share a piece, and the first of these warps merges the results.
    constexpr unsigned int AT_ONCE = N > 1 ? 16 / N : {% if beams %}6{% else %}8{% endif %};  // accesses in flight, limited by the number of registers
    const unsigned int n_pieces = (PIECES - blockIdx.x + gridDim.x - 1) / gridDim.x;
    const unsigned int sharers = max(1u, WARPS / n_pieces), share = warp % sharers;
    const unsigned int accesses = (PACKS + sharers - 1) / sharers;
    static_assert(2 * THREADS <= MOST_CANDIDATES && THREADS <= MOST_GROUPS);
    Mass* found_best = masses;  // indexed by thread, like the arrays that follow
    float2* found_raw = reinterpret_cast<float2*>(masses + THREADS);
    float* found_sum = reinterpret_cast<float*>(bests);
    auto leave = [&](unsigned int piece, Mass best, float2 raw, float sum) {
        const unsigned int at = row * MOST_GROUPS + piece * 32 + lane;
        const bool has_tokens = piece * PIECE + lane * N < VOCABULARY;
        best_of_group[at] = static_cast<long long>(best);
        if (has_tokens && logs) raw_of_group[2 * at] = raw.x, raw_of_group[2 * at + 1] = raw.y;
        if (has_tokens && weighs) sum_of_group[at] = sum;
    };
    for (unsigned int nth = warp / sharers; nth < n_pieces; nth += WARPS / sharers) {
        const unsigned int piece = nth * gridDim.x + blockIdx.x;
        const unsigned int begin = piece * PIECE + lane * N, first_access = share * accesses, end = min(PACKS, first_access + accesses);
        unsigned int best_id = begin + first_access * 32 * N, wrong_id = VOCABULARY;
        // A group without tokens ranks below all others.
        const bool is_empty = first_access >= end || best_id >= VOCABULARY;
        float2 raw = {-infinite, 0.0f};  // max logit without the rules, and sum of exponentials relative to it
        float top = -infinite, sum = 0.0f;
        for (unsigned int k = first_access; k < end && begin + k * 32 * N < VOCABULARY; k += AT_ONCE) {
            auto first_of = [&](unsigned int i) { return k + i < end ? begin + (k + i) * 32 * N : VOCABULARY; };
            Pack<T, N> packs[AT_ONCE];
#pragma unroll
            for (unsigned int i = 0; i < AT_ONCE; ++i) {
                if (first_of(i) < VOCABULARY) packs[i] = load_pack<N>(from + first_of(i));
            }
            float x[AT_ONCE * N];
            bool is_wrong = false;
#pragma unroll
            for (unsigned int i = 0; i < AT_ONCE * N; ++i) {
                x[i] = first_of(i / N) < VOCABULARY ? to_float(packs[i / N].at[i % N]) : -infinite;
                is_wrong |= !(x[i] < infinite);
            }
            if (is_wrong) {
                // Invalid values stay in `x`. The row is reported as invalid, so results that depend on these values are not used.
#pragma unroll
                for (unsigned int i = 0; i < AT_ONCE * N; ++i) {
                    if (!(x[i] < infinite)) wrong_id = min(wrong_id, first_of(i / N) + i % N);
                }
            }
            if (logs) {
                const float before = raw.x;
#pragma unroll
                for (unsigned int i = 0; i < AT_ONCE * N; ++i) raw.x = fmaxf(raw.x, x[i]);
                if (raw.x > -infinite) {
                    raw.y *= expf(before - raw.x);
#pragma unroll
                    for (unsigned int i = 0; i < AT_ONCE * N; ++i) raw.y += expf(x[i] - raw.x);
                }
            }
            if (penalises || forbids) {
#pragma unroll
                for (unsigned int i = 0; i < AT_ONCE * N; ++i) {
                    if (first_of(i / N) < VOCABULARY) x[i] = ruled(first_of(i / N) + i % N, x[i]);
                }
            }
            const float before = top;
            unsigned int at = AT_ONCE * N;
#pragma unroll
            for (unsigned int i = 0; i < AT_ONCE * N; ++i) {
                // The first of equal logits is kept, because it has the lower id.
                if (x[i] > top) top = x[i], at = i;
            }
            if (at < AT_ONCE * N) best_id = begin + (k + at / N) * 32 * N + at % N;
            if (weighs && top > -infinite) {
                sum *= expf(before / temperature - top / temperature);
#pragma unroll
                for (unsigned int i = 0; i < AT_ONCE * N; ++i) sum += expf(x[i] / temperature - top / temperature);
            }
        }
        const bool is_wrong = wrong_id < VOCABULARY;
        Mass best = static_cast<Mass>(is_wrong ? KEY_OF_WRONG : key_of(top)) << 32 | (0xffffffffu - (is_wrong ? wrong_id : best_id));
        if (is_empty) best = 0;
        if (sharers == 1) {
            leave(piece, best, raw, sum);
        } else {
            found_best[thread] = best;
            found_raw[thread] = raw;
            found_sum[thread] = sum;
        }
    }
    if (sharers > 1) {
        __syncthreads();
        if (share == 0 && warp / sharers < n_pieces) {
            Mass best = 0;
            float2 raw = {-infinite, 0.0f};
            float sum = 0.0f;
            for (unsigned int i = thread; i < thread + sharers * 32; i += 32) {
                best = Larger::of(best, found_best[i]);
                raw.x = fmaxf(raw.x, found_raw[i].x);
            }
            const float top = of_key(best >> 32);
            for (unsigned int i = thread; i < thread + sharers * 32; i += 32) {
                const unsigned int key = found_best[i] >> 32;
                if (logs && found_raw[i].x > -infinite) raw.y += found_raw[i].y * expf(found_raw[i].x - raw.x);
                if (weighs && key > KEY_OF_NOTHING) sum += found_sum[i] * expf(of_key(key) / temperature - top / temperature);
            }
            leave(warp / sharers * gridDim.x + blockIdx.x, best, raw, sum);
        }
    }
    __threadfence();
    __syncthreads();
    if (thread == 0) {
        // The counter starts at -1. The last CTA resets it.
        const unsigned int arrived = atomicAdd(reinterpret_cast<unsigned int*>(n_arrived + row), 1u) + 2u;
        is_last_cta = arrived == gridDim.x;
        if (is_last_cta) n_arrived[row] = -1;
    }
    __syncthreads();
    if (!is_last_cta) return;
    __threadfence();

    if (thread == 0) n_found = n_groups_left = found = 0;
    Mass best = 0;
    for (unsigned int group = thread; group < MOST_GROUPS; group += THREADS) {
        const Mass of_group = group < GROUPS ? static_cast<Mass>(__ldcg(best_of_group + row * MOST_GROUPS + group)) : 0;
        bests[group] = of_group >> 32;
        best = Larger::of(best, of_group);
    }
    const Mass top_of_all = all_reduce<Larger>(best, parts);
    unsigned int top_key = top_of_all >> 32;
    if (top_key == KEY_OF_WRONG) {
        if (thread == 0) {
            const unsigned int id = 0xffffffffu - static_cast<unsigned int>(top_of_all);
{% if beams %}
            n_candidates[row] = NOT_A_NUMBER;
            candidate_ids[row * STRIDE] = static_cast<int>(id);
{% else %}
            chosen[row] = NOT_A_NUMBER;
            log_probability[row] = static_cast<float>(id);
{% endif %}
        }
        return;
    }
    float log_sum = 0.0f;
    if (logs) {
        float top = -infinite;
        const float* raw = raw_of_group + 2 * row * MOST_GROUPS;
        for (unsigned int group = thread; group < GROUPS; group += THREADS) {
            if (bests[group] > 0) top = fmaxf(top, __ldcg(raw + 2 * group));
        }
        top = of_key(static_cast<unsigned int>(all_reduce<Larger>(key_of(top), parts)));
        Mass sum = 0;
        for (unsigned int group = thread; group < GROUPS; group += THREADS) {
            if (bests[group] == 0) continue;
            const float share = __ldcg(raw + 2 * group + 1) * expf(__ldcg(raw + 2 * group) - top);
            sum += __float2ull_rn(share * 1099511627776.0f);
        }
        sum = all_reduce<Added>(sum, parts);
        log_sum = top + logf(static_cast<float>(sum) / 1099511627776.0f);
    }
