        const unsigned int position = tile.keys_before(row);
        // Hides the keys of a tile that are outside the window of a query. Returns whether the tile has keys before the window of a query of
        // the warp. The first key of this query is then in this tile or in a later one.
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
