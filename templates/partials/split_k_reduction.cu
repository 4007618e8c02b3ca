    if constexpr (SPLITS == 1) {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const float sum[4] = {sums[group * 4], sums[group * 4 + 1], sums[group * 4 + 2], sums[group * 4 + 3]};
            if (group < groups) finish(group, sum);
        }
    } else {
        // Every block sends its sums to the blocks that finish them, which add them in the order of K.
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const unsigned int part = parts + (group / SPLITS * SPLITS + rank) * PART_BYTES + threadIdx.x * 16;
            if (group < groups)
                store_remote(address_in(part, group % SPLITS), sums[group * 4], sums[group * 4 + 1], sums[group * 4 + 2],
                             sums[group * 4 + 3], address_in(arrived, group % SPLITS));
        }
        barrier_wait(arrived, 0);
#pragma unroll 1
        for (int i = 0; i < OWNED && i * SPLITS + static_cast<int>(rank) < groups; ++i) {
            float sum[4] = {};
#pragma unroll
            for (int split = 0; split < SPLITS; ++split) {
                const unsigned int part = parts + (i * SPLITS + split) * PART_BYTES + threadIdx.x * 16;
                float more[4];
                asm volatile("ld.shared.v4.f32 { %0, %1, %2, %3 }, [%4];"
                             : "=f"(more[0]), "=f"(more[1]), "=f"(more[2]), "=f"(more[3]) : "r"(part) : "memory");
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[e] += more[e];
            }
            finish(i * SPLITS + rank, sum);
        }
    }
