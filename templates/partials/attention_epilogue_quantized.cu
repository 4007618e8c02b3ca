{% include "partials/attention_mma.cu" %}
// Rounds four f16 elements to E4M3.
__device__ __forceinline__ unsigned int round_to_e4m3(unsigned int low, unsigned int high) {
    unsigned short pairs[2];
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(pairs[0]) : "r"(low));
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(pairs[1]) : "r"(high));
    return static_cast<unsigned int>(pairs[1]) << 16 | pairs[0];
}

// Divides 16 rows of the output by their row sums and by `scale`, and writes the first `rows` of them in E4M3. The rows are staged in f16,
// in shared memory that only this warp uses, so that stores are 8 bytes wide.
__device__ __forceinline__ void write_rows(const float (&o)[HEAD / 8][4], const float (&row_sum)[2],
                                           unsigned char* stage, unsigned char* out, unsigned int rows, float scale) {
    const unsigned int lane = threadIdx.x % 32;
    const float inverse[2] = {1.0f / (row_sum[0] * scale), 1.0f / (row_sum[1] * scale)};
    unsigned char* at = stage + lane / 4 * PITCH + lane % 4 * 4;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < HEAD / 8; ++i) {
        *reinterpret_cast<unsigned int*>(at + i * 16) = pack_pair<f16>(o[i][0] * inverse[0], o[i][1] * inverse[0]);
        *reinterpret_cast<unsigned int*>(at + 8 * PITCH + i * 16) =
            pack_pair<f16>(o[i][2] * inverse[1], o[i][3] * inverse[1]);
    }
    __syncwarp();
    for (unsigned int i = lane; i < 16 * HEAD_CHUNKS; i += 32) {
        const unsigned int row = i / HEAD_CHUNKS;
        const unsigned int chunk = i % HEAD_CHUNKS;
        if (row < rows) {
            const uint4 words = *reinterpret_cast<const uint4*>(stage + row * PITCH + chunk * 16);
            *reinterpret_cast<uint2*>(out + row * OUT_STRIDE + chunk * 8) =
                make_uint2(round_to_e4m3(words.x, words.y), round_to_e4m3(words.z, words.w));
        }
    }
}
