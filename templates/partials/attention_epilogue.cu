{% include "partials/attention_mma.cu" %}
// Divides 16 rows of the output by their row sums, and writes the first `rows` of them. The rows are staged in shared memory that only
// this warp uses, so that stores are 16 bytes wide.
__device__ __forceinline__ void write_rows(const float (&o)[HEAD / 8][4], const float (&row_sum)[2],
                                           unsigned char* stage, Element* out, unsigned int rows) {
    const unsigned int lane = threadIdx.x % 32;
    const float inverse[2] = {1.0f / row_sum[0], 1.0f / row_sum[1]};
    unsigned char* at = stage + lane / 4 * PITCH + lane % 4 * 4;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < HEAD / 8; ++i) {
        *reinterpret_cast<unsigned int*>(at + i * 16) =
            pack_pair<Element>(o[i][0] * inverse[0], o[i][1] * inverse[0]);
        *reinterpret_cast<unsigned int*>(at + 8 * PITCH + i * 16) =
            pack_pair<Element>(o[i][2] * inverse[1], o[i][3] * inverse[1]);
    }
    __syncwarp();
    for (unsigned int i = lane; i < 16 * HEAD_CHUNKS; i += 32) {
        const unsigned int row = i / HEAD_CHUNKS;
        const unsigned int chunk = i % HEAD_CHUNKS;
        if (row < rows) {
            *reinterpret_cast<uint4*>(out + row * OUT_STRIDE + chunk * PER_CHUNK) =
                *reinterpret_cast<const uint4*>(stage + row * PITCH + chunk * 16);
        }
    }
}
