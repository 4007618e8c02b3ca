// Generation parameters of a request. The host writes them in this order (`DeviceSamplingParams::encode`).
struct Request {
    int n_prompt;
    int most;   // max number of tokens, including the prompt
    int least;  // min number of tokens before the sequence may end
    int flags;
    float temperature;
    unsigned int top_k;  // 0 for no limit
    float top_p, min_p;
    unsigned int seed[2];
    float repetition_penalty;
    int ngram;  // length of n-grams that must not occur twice; 0 for no limit
    // Number of beams of the request (0 without beam search), number of beam groups, and index of this row's beam.
    int n_beams, n_groups, beam;
    unsigned int n_candidates;  // max candidates of a row
    float diversity, length_penalty;
    int stopping;
    // Lengths of five lists of token ids, which are stored one after another in `ids`.
    int n_end, n_suppressed, n_suppressed_first, n_forced_first, n_forced_last;
    int ids[{{ width }} - 24];
};
constexpr int SAMPLES = 1, LOG_PROBABILITY = 2, RENORMALIZES = 4;  // bits of `flags`
constexpr int STOP_WHEN_FULL = 1, STOP_WHEN_BEATEN = 2;  // values of `stopping` (of a beam search); 0 selects a heuristic

// Outcomes other than a token, in this order: the row holds no sequence, a logit is NaN or +∞, the rules exclude every token, or the beam
// search is done.
constexpr int IDLE = -1, NOT_A_NUMBER = -2, NO_TOKEN = -3, FOUND = -4;
