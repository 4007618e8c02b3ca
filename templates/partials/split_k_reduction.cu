    // Adds the accumulators of each octet (8 tokens) over the CTAs of the cluster, and calls `epilogue` with the sums. The code uses
    // variables of split_k_prologue.
    if constexpr (SPLITS == 1) {
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            const float sum[4] = {acc[octet * 4], acc[octet * 4 + 1], acc[octet * 4 + 2], acc[octet * 4 + 3]};
            if (octet < octets) epilogue(octet, sum{% if residual %}, residuals[octet]{% endif %});
        }
    } else {
        // Each CTA sends its accumulators of an octet (8 tokens) to the CTA that finishes this octet. The receiver adds them in the order
        // of the parts of K.
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            const unsigned int partial = partials + (octet / SPLITS * SPLITS + rank) * PARTIAL_BYTES + threadIdx.x * 16;
            if (octet < octets)
                store_remote(address_in(partial, octet % SPLITS), acc[octet * 4], acc[octet * 4 + 1], acc[octet * 4 + 2],
                             acc[octet * 4 + 3], address_in(arrived, octet % SPLITS));
        }
        barrier_wait_for_cluster(arrived, 0);
{%- if residual %}
#pragma unroll
        for (int i = 0; i < OWNED; ++i) {  // unrolled, because residuals are in registers
            if (i * SPLITS + static_cast<int>(rank) >= octets) break;
{%- else %}
#pragma unroll 1
        for (int i = 0; i < OWNED && i * SPLITS + static_cast<int>(rank) < octets; ++i) {
{%- endif %}
            float sum[4] = {};
#pragma unroll
            for (int split = 0; split < SPLITS; ++split) {
                const unsigned int partial = partials + (i * SPLITS + split) * PARTIAL_BYTES + threadIdx.x * 16;
                float more[4];
                asm volatile("ld.shared.v4.f32 { %0, %1, %2, %3 }, [%4];"
                             : "=f"(more[0]), "=f"(more[1]), "=f"(more[2]), "=f"(more[3]) : "r"(partial) : "memory");
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[e] += more[e];
            }
            epilogue(i * SPLITS + rank, sum{% if residual %}, residuals[i]{% endif %});
        }
    }
