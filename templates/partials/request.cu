// What a request asks of its next tokens. The host writes it (`Choice::encode`), in this order.
struct Request {
    int n_prompt;
    int most;   // tokens at most, the prompt's included
    int least;  // no end before so many tokens
    int flags;
    float temperature;
    unsigned int top_k;  // 0 for all
    float top_p, min_p;
    unsigned int seed[2];
    float repetition_penalty;
    int ngram;  // no sequence of so many tokens occurs twice; 0 for none
    // Rows of a request whose beams are searched, 0 where none are, in groups that keep apart; and this row's place among them.
    int n_beams, n_groups, beam;
    unsigned int n_candidates;  // tokens of each row that can count
    float diversity, length_penalty;
    int stopping;
    // Numbers of ids in the lists, which follow one another.
    int n_end, n_suppressed, n_suppressed_first, n_forced_first, n_forced_last;
    int ids[{{ width }} - 24];
};
constexpr int SAMPLES = 1, LOG_PROBABILITY = 2, RENORMALIZES = 4;  // flags
constexpr int STOP_WHEN_FULL = 1, STOP_WHEN_BEATEN = 2;  // of a search; 0 is the heuristic between them

// What stands in a token's place.
constexpr int IDLE = -1, NOT_A_NUMBER = -2, NO_TOKEN = -3, FOUND = -4;
