// 64 queries of a warpgroup, or a thread's part of what it keeps of them: rows `row` and `row + 8` of the
// sequence, of n tokens.
struct Rows {
    float s[SCORES], o[SUMS];
    unsigned int p[KEY_STEPS][4];
    float shift[2], sums[2];
    unsigned int row, n;

    // s = queries · keysᵀ.
    __device__ __forceinline__ void multiply_keys(unsigned int queries, unsigned int keys) {
        products_begin();
#pragma unroll
        for (int i = 0; i < HEAD_STEPS; ++i) {
            const unsigned int box = i * 16 / COLUMNS, column = i * 16 % COLUMNS * 2;
            multiply(s, rows_descriptor(queries + box * 64 * ROW_BYTES + column, 0),
                     rows_descriptor(keys + box * KEYS * ROW_BYTES + column, 0), i > 0);
        }
        products_commit();
    }

    // o += weights · values.
    __device__ __forceinline__ void multiply_values(unsigned int values, unsigned int ones) {
        products_begin();
#pragma unroll
        for (int i = 0; i < KEY_STEPS; ++i) {
            const unsigned int from = values + i * 16 * ROW_BYTES;
            multiply_add(o, p[i], rows_descriptor(from, ONES ? ones - from : KEYS * ROW_BYTES), 1);
        }
        products_commit();
    }

    // Of the first tile of keys.
    __device__ __forceinline__ void begin() {
        shift[0] = shift[1] = minus_infinity();
        sums[0] = sums[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) o[i] = 0.0f;
        mask(0);
        raise();
        weigh();
    }

    // Of a later one, whose first key is `key`.
    __device__ __forceinline__ void go_on(unsigned int key) {
        mask(key);
        const float before[2] = {sums[0], sums[1]};
        if (weigh()) {
            sums[0] = before[0], sums[1] = before[1];
            raise();
            weigh();
        }
    }

    // The two rows' sums of weighted values, divided by those of the weights.
    __device__ __forceinline__ void write(Element* out, unsigned int lane) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = ONES ? __shfl_sync(0xffffffff, o[SUMS - 4 + r * 2], lane & ~3) : quad_sum(sums[r]);
            const float inverse = reciprocal(sum);
#pragma unroll
            for (int i = 0; i < HEAD / 32; ++i) {
                unsigned int words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int from = (i * 4 + j) * 4 + r * 2;
                    words[j] = pack_pair<Element>(o[from] * inverse, o[from + 1] * inverse);
                }
                transpose_quad(words, lane);
                if (row + r * 8 < n) write_chunk(out + r * 8 * OUT_STRIDE + (i * 4 + lane % 4) * 8, words);
            }
        }
    }

private:
    __device__ __forceinline__ void mask(unsigned int key) {
        if (key + KEYS <= n) return;
#pragma unroll
        for (int i = 0; i < SCORES; ++i) {
            if (key + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 >= n) s[i] = minus_infinity();
        }
    }

    // Weights of the scores, and whether one of the warp's is 2 or more. Rows beyond the end, which are
    // the next sequence's queries, have no vote: their bits must not change this one's.
    __device__ __forceinline__ bool weigh() {
        unsigned int any[2] = {};
#pragma unroll
        for (int i = 0; i < SCORES / 2; ++i) {
            const float low = exp2_approximate(fmaf(s[i * 2], SCALE_LOG2, -shift[i % 2]));
            const float high = exp2_approximate(fmaf(s[i * 2 + 1], SCALE_LOG2, -shift[i % 2]));
            p[i / 4][i % 4] = pack_pair<Element>(low, high);
            if (!ONES) sums[i % 2] += low + high;
            any[i % 2] |= p[i / 4][i % 4];
        }
        const unsigned int votes = (row < n ? any[0] : 0) | (row + 8 < n ? any[1] : 0);
        return __any_sync(0xffffffff, (votes & 0x40004000) != 0);  // the highest bit of the exponents
    }

    // The scores' maximum becomes that of the sums, too.
    __device__ __forceinline__ void raise() {
        float rescale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = s[r * 2];
#pragma unroll
            for (int i = 0; i < SCORES; i += 4) top = fmaxf(top, fmaxf(s[i + r * 2], s[i + r * 2 + 1]));
            top = fmaxf(shift[r], fmaf(quad_max(top), SCALE_LOG2, HEADROOM));
            rescale[r] = exp2_approximate(shift[r] - top);
            shift[r] = top;  // finite: a tile has at least one key
            sums[r] *= rescale[r];
        }
#pragma unroll
        for (int i = 0; i < SUMS; ++i) o[i] *= rescale[i / 2 % 2];
    }
};

// Of the last tile, values after the sequence's last are another's, of which not even a NaN may be
// multiplied by 0. All threads of a warpgroup, whose barrier this is.
__device__ __forceinline__ void clear_rest(unsigned int values, unsigned int n, unsigned int barrier) {
    const unsigned int valid = (n - 1) % KEYS + 1;
#pragma unroll
    for (int box = 0; box < BOXES; ++box) {
#pragma unroll 1
        for (unsigned int i = valid * ROW_BYTES + threadIdx.x % 128 * 16; i < KEYS * ROW_BYTES; i += 128 * 16) {
            store_chunk(values + box * KEYS * ROW_BYTES + i, 0);
        }
    }
    fence_for_copies();
    warpgroup_sync(barrier);
}
