// Packs 32 columns of a row of results, and transposes them within the quad, so that each lane has 8 neighboring columns.
            unsigned int words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int from = (i * 4 + j) * 4 + r * 2;
                words[j] = pack_pair<{% if to_e4m3 %}f16{% else %}Element{% endif %}>(o[from] * inverse, o[from + 1] * inverse);
            }
            transpose_quad(words, lane);
