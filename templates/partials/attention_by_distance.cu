{% if windowed %}constexpr int WINDOW = {{ window }};  // max distance of a query from the keys it attends to

{% endif %}// Adjusts scores of a head by the distance between key and query (key position minus query position){% if capped %}, after soft capping{% endif %}.
class ByDistance {
public:
{% if bias == "table" %}    // `biases` has 2 · REACH + 1 biases for each head.
    __device__ __forceinline__ ByDistance(const {{ storage }}* biases, unsigned int head)
        : of_head(biases + static_cast<unsigned long long>(head) * (2 * REACH + 1) + REACH) {}

{% elif bias == "slopes" %}    // `slopes` has one slope for each head.
    __device__ __forceinline__ ByDistance(const {{ storage }}* slopes, unsigned int head) : slope(-LOG2_E * to_float(slopes[head])) {}

{% endif %}    // Returns the score of a key{% if adjusts %}, scaled and adjusted by its distance, times log2(e){% endif %}; −∞ for keys that are not attended to.
    __device__ __forceinline__ float of(float score, int distance) const {
{% if causal and windowed %}        if (distance > 0 || distance < -WINDOW) return __int_as_float(0xff800000);
{% elif causal %}        if (distance > 0) return __int_as_float(0xff800000);
{% elif windowed %}        if (abs(distance) > WINDOW) return __int_as_float(0xff800000);
{% endif %}{% if capped and bias == "table" %}        return capped(score) + LOG2_E * to_float(of_head[min(max(distance, -REACH), REACH)]);
{% elif capped and bias == "slopes" %}        return fmaf(slope, static_cast<float>(abs(distance)), capped(score));
{% elif capped %}        return capped(score);
{% elif bias == "table" %}        return fmaf(score, SCORE_LOG2, LOG2_E * to_float(of_head[min(max(distance, -REACH), REACH)]));
{% elif bias == "slopes" %}        return fmaf(score, SCORE_LOG2, slope * static_cast<float>(abs(distance)));
{% else %}        return score;
{% endif %}    }
{% if capped %}
private:
{% include "partials/soft_cap.cu" %}{% if bias != "none" %}    static constexpr float LOG2_E = 1.4426950408889634f;
{% endif %}{% elif bias != "none" %}
private:
    static constexpr float LOG2_E = 1.4426950408889634f;
    static constexpr float SCORE_LOG2 = {{ score_log2 }};  // scale · log2(e)
{% endif %}{% if bias == "table" %}    static constexpr int REACH = {{ reach }};
    const {{ storage }}* of_head;  // biases of the head; points to distance 0
{% elif bias == "slopes" %}    float slope;
{% endif %}};
