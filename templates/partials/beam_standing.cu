        // Determines the beams that continue, the sequences that end now, and the best of all sequences that have ended.
        const int m = min(n_kept, n_all);
        int n_ended = 0;
        for (int i = 0; i < of_group; ++i) n_ended += ended[first + i] != 0;
        const bool stops_when_full = request.stopping == STOP_WHEN_FULL, is_full = n_ended == of_group && stops_when_full;
        if (thread < m) {
            bool is_end = false;
            for (int i = 0; i < request.n_end; ++i) is_end |= request.ids[i] == kept_id[thread];
            ends[thread] = is_end;
        }
        __syncthreads();
        if (thread < m) {
            bool just_ended = (ends[thread] || is_last) && thread < of_group;
            if (request.n_groups > 1 && !ends[thread]) {
                // With several groups, the of_group best candidates without an end token also end in the last step. There is one exception:
                // in a search that stops when its groups are full, they do not end if sequences that ended earlier or end now already fill
                // this group.
                int n_full = n_ended, n_open = 0;
                for (int i = 0; i < min(m, of_group); ++i) n_full += ends[i];
                for (int i = 0; i < thread; ++i) n_open += !ends[i];
                just_ended = is_last && n_open < of_group && !(stops_when_full && n_full >= of_group);
            }
            ends_now[thread] = just_ended;
            float score = kept_score[thread] / norms[0];
            if (is_full) score += NEVER;
            if (!just_ended) score += NEVER;
            ended_score[thread] = score;
        }
        __syncthreads();
        if (thread < m) {
            auto going = [&](int i) { return key_of(ends[i] ? kept_score[i] + NEVER : kept_score[i]); };
            const unsigned int own = going(thread);
            int before = 0;
            for (int i = 0; i < m; ++i) before += going(i) > own || (going(i) == own && i < thread);
            auto go_on = [&](int to, float score) {
                running[first + to] = score;
                parent[first + to] = kept_beam[thread];
                token[first + to] = kept_id[thread];
            };
            if (before < of_group) go_on(before, ends[thread] ? kept_score[thread] + NEVER : kept_score[thread]);
            // If there are fewer candidates than beams, the remaining beams become dead, with a score of −∞.
            for (int to = m; before == 0 && to < of_group; ++to) go_on(to, -infinite);
        }
        if (thread < m + of_group) {
            auto score = [&](int i) { return key_of(i < of_group ? best[first + i] : ended_score[i - of_group]); };
            const unsigned int own = score(thread);
            int before = 0;
            for (int i = 0; i < m + of_group; ++i) before += score(i) > own || (score(i) == own && i < thread);
            if (before < of_group) from_kept[before] = thread;
        }
        __syncthreads();
        if (thread == 0) {
            unsigned int used = 0;
            for (int i = 0; i < of_group; ++i) {
                if (from_kept[i] < of_group) used |= 1u << place[first + from_kept[i]];
            }
            bool are_all_ended = true;
            float worst = infinite;
            int free = first;
            for (int i = 0; i < of_group; ++i) {
                const int from = from_kept[i], candidate = from - of_group;
                if (from < of_group) {
                    next_best[i] = best[first + from];
                    next_ended[i] = ended[first + from];
                    next_length[i] = length[first + from];
                    next_place[i] = place[first + from];
                } else {
                    while (used >> free & 1u) ++free;
                    next_best[i] = ended_score[candidate];
                    next_ended[i] = ends_now[candidate];
                    next_length[i] = n_new;
                    next_place[i] = free;
                    copy_from[free] = kept_beam[candidate];
                    copy_token[free] = kept_id[candidate];
                    used |= 1u << free;
                }
                are_all_ended &= next_ended[i] != 0;
                worst = fminf(worst, next_best[i]);
            }
            // Best score that the search can still reach: the score of the best beam that continues, or, with several groups, the score of
            // the best candidate, even if this candidate ends (as in `BeamSearchScorer`).
            const float possible = (request.n_groups > 1 ? kept_score[0] : running[first]) / norms[1];
            bool is_beaten = true, goes_on = false;
            for (int i = 0; i < of_group; ++i) {
                is_beaten &= possible <= (next_ended[i] ? worst : NEVER);
                best[first + i] = next_best[i];
                ended[first + i] = next_ended[i];
                length[first + i] = next_length[i];
                place[first + i] = next_place[i];
            }
            for (int i = 0; i < m; ++i) goes_on |= !ends[i] && !is_last;
            const bool is_open = !(are_all_ended && stops_when_full);
            state[first] = !is_beaten && is_open && goes_on ? 0 : DONE_NOW;
        }
        __syncthreads();
