// Logit of the sink of a head, times log2(e). The sink counts as the score of one more key, whose value is 0, so it only adds its weight to
// the row sum.
__device__ __forceinline__ float sink_log2(const {{ storage }}* sinks, unsigned int head) {
    return 1.4426950408889634f * to_float(sinks[head]);
}
