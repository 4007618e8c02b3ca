{% if windowed %}constexpr int WINDOW = {{ window }};  // the farthest key that is attended to

{% endif %}// What the distance of a key from its query, the key's position less the query's, does to the score of a head.
class ByDistance {
public:
{% if bias == "table" %}    // From the biases of all heads.
    __device__ __forceinline__ ByDistance(const {{ storage }}* biases, unsigned int head)
        : of_head(biases + static_cast<unsigned long long>(head) * (2 * REACH + 1) + REACH) {}

{% elif bias == "slopes" %}    // From the slopes of all heads.
    __device__ __forceinline__ ByDistance(const {{ storage }}* slopes, unsigned int head) : slope(-LOG2_E * to_float(slopes[head])) {}

{% endif %}    // The score of a key{% if bias != "none" %}, times log2(e){% endif %}; −∞ of one that is not attended to.
    __device__ __forceinline__ float of(float score, int distance) const {
{% if causal and windowed %}        if (distance > 0 || distance < -WINDOW) return __int_as_float(0xff800000);
{% elif causal %}        if (distance > 0) return __int_as_float(0xff800000);
{% elif windowed %}        if (abs(distance) > WINDOW) return __int_as_float(0xff800000);
{% endif %}{% if bias == "table" %}        return fmaf(score, SCORE_LOG2, LOG2_E * to_float(of_head[min(max(distance, -REACH), REACH)]));
{% elif bias == "slopes" %}        return fmaf(score, SCORE_LOG2, slope * static_cast<float>(abs(distance)));
{% else %}        return score;
{% endif %}    }
{% if bias != "none" %}
private:
    static constexpr float LOG2_E = 1.4426950408889634f;
    static constexpr float SCORE_LOG2 = {{ score_log2 }};  // scale · log2(e)
{% endif %}{% if bias == "table" %}    static constexpr int REACH = {{ reach }};
    const {{ storage }}* of_head;  // at distance 0
{% elif bias == "slopes" %}    float slope;
{% endif %}};
