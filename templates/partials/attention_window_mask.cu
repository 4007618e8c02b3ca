        const unsigned int position = tile.keys_before(row);
        // Masks the scores of keys that are outside a query's window. Returns whether the window of any query of the warp begins after the
        // tile's first key. The first key that such a query attends to is in this tile or in a later tile.
        auto mask = [&](unsigned int key) {
            constexpr unsigned int AFTER = CAUSAL ? 0 : WINDOW;  // max distance of a query from later keys
            const bool precedes = __any_sync(0xffffffff, key + WINDOW < position + 8);
            if (!precedes && __all_sync(0xffffffff, key + KEYS <= {% if causal %}position + 1{% else %}min(position + AFTER + 1, n){% endif %})) return false;
#pragma unroll
            for (int i = 0; i < SCORES; ++i) {
                const unsigned int column = key + i / 4 * 8 + lane % 4 * 2 + i % 2;
                // Distance from the end of the query's window. It wraps for keys after the window.
                const unsigned int distance = position + i % 4 / 2 * 8 + AFTER - column;
                if (distance > WINDOW + AFTER{% if not causal %} || column >= n{% endif %}) s[i] = minus_infinity();
            }
            return precedes;
        };
