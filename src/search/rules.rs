use std::collections::HashMap;

use super::log_sum;

/// Logits processors. They are applied before a token is chosen, in the order of Hugging Face transformers.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// For tokens that have already occurred, the number by which positive logits are divided and negative logits are multiplied (Keskar et
    /// al. 2019); 1 disables it.
    pub repetition_penalty: f32,
    /// Amount subtracted from a token's logit for each of its occurrences among the new tokens; 0
    /// disables it.
    pub frequency_penalty: f32,
    /// Amount subtracted once from the logit of every token among the new tokens; 0 disables it.
    pub presence_penalty: f32,
    /// Tokens, each with the amount that is added to its logit.
    pub bias: Vec<(u32, f32)>,
    /// Length of the n-grams that must not occur twice; 0 disables this rule.
    pub no_repeat_ngram: usize,
    /// End tokens.
    pub end: Vec<u32>,
    /// Minimum sequence length, including the prompt, before an end token is allowed.
    pub min_length: usize,
    /// Minimum number of new tokens before an end token is allowed.
    pub min_new_tokens: usize,
    /// The forced first new token.
    pub forced_first: Option<u32>,
    /// Tokens that are forced after [`forced_first`](Self::forced_first), as the beginning of the text.
    pub prefix: Vec<u32>,
    /// Tokens allowed as the last new token when the maximum length is reached; empty allows all.
    pub forced_last: Vec<u32>,
    /// Tokens that are never chosen.
    pub suppressed: Vec<u32>,
    /// Tokens that are not chosen as the first token after the forced tokens, or as the first new token if none is forced.
    pub suppressed_first: Vec<u32>,
    /// Whether log-probabilities are renormalized after the other rules are applied. This affects the scores of beams.
    pub renormalize: bool,
    /// Maximum number of new tokens. With [`Rules::NO_LIMIT`], only the model's positions and the KV cache limit the number.
    pub max_new_tokens: usize,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            bias: Vec::new(),
            no_repeat_ngram: 0,
            end: Vec::new(),
            min_length: 0,
            min_new_tokens: 0,
            forced_first: None,
            prefix: Vec::new(),
            forced_last: Vec::new(),
            suppressed: Vec::new(),
            suppressed_first: Vec::new(),
            renormalize: false,
            max_new_tokens: Self::NO_LIMIT,
        }
    }
}

impl Rules {
    /// Value of [`max_new_tokens`](Self::max_new_tokens) for no limit.
    pub const NO_LIMIT: usize = usize::MAX;

    /// Modifies the logits of the token after `tokens`, the first `n_prompt` of which are the
    /// prompt.
    pub fn apply(&self, logits: &mut [f32], tokens: &[u32], n_prompt: usize) {
        let n_new = tokens.len() - n_prompt;
        if self.repetition_penalty != 1.0 {
            self.penalise(logits, tokens);
        }
        if self.frequency_penalty != 0.0 || self.presence_penalty != 0.0 {
            self.count(logits, &tokens[n_prompt..]);
        }
        for &(id, bias) in &self.bias {
            if let Some(x) = logits.get_mut(id as usize) {
                *x += bias;
            }
        }
        if self.no_repeat_ngram > 0 {
            forbid(logits, &repeats(tokens, self.no_repeat_ngram));
        }
        if tokens.len() < self.min_length || n_new < self.min_new_tokens {
            forbid(logits, &self.end);
        }
        if let Some(id) = self.forced_at(n_new) {
            force(logits, &[id]);
        }
        if n_new.saturating_add(1) == self.max_new_tokens && !self.forced_last.is_empty() {
            force(logits, &self.forced_last);
        }
        forbid(logits, &self.suppressed);
        if n_new == self.n_forced() {
            forbid(logits, &self.suppressed_first);
        }
        if self.renormalize && logits.iter().any(|&x| x > f32::NEG_INFINITY) {
            let sum = log_sum(logits);
            logits.iter_mut().for_each(|x| *x -= sum);
        }
    }

    /// Returns whether the GPU kernels support these rules. The kernels do not support the frequency penalty, the presence penalty and the
    /// bias, which come from OpenAI's API. They support neither a forced prefix nor suppressed tokens after a forced first token.
    pub fn suit_devices(&self) -> bool {
        let is_plain = self.forced_first.is_none() || self.suppressed_first.is_empty();
        is_plain
            && self.prefix.is_empty()
            && self.frequency_penalty == 0.0
            && self.presence_penalty == 0.0
            && self.bias.is_empty()
    }

    /// Returns the number of forced tokens at the beginning.
    fn n_forced(&self) -> usize {
        usize::from(self.forced_first.is_some()) + self.prefix.len()
    }

    /// Returns the forced token after `n_new` new tokens.
    fn forced_at(&self, n_new: usize) -> Option<u32> {
        let mut forced = self.forced_first.iter().chain(&self.prefix);
        forced.nth(n_new).copied()
    }

    /// Returns whether a token ends its sequence.
    pub fn ends(&self, id: u32) -> bool {
        self.end.contains(&id)
    }

    /// Subtracts the frequency and presence penalties of the new tokens.
    fn count(&self, logits: &mut [f32], new: &[u32]) {
        let mut new = new.to_vec();
        new.sort_unstable();
        for same in new.chunk_by(|a, b| a == b) {
            if let Some(x) = logits.get_mut(same[0] as usize) {
                *x -= self.frequency_penalty * same.len() as f32 + self.presence_penalty;
            }
        }
    }

    fn penalise(&self, logits: &mut [f32], tokens: &[u32]) {
        let mut there: Vec<u32> = tokens.to_vec();
        there.sort_unstable();
        there.dedup();
        for id in there {
            if let Some(x) = logits.get_mut(id as usize) {
                *x = match *x < 0.0 {
                    true => *x * self.repetition_penalty,
                    false => *x / self.repetition_penalty,
                };
            }
        }
    }
}

/// Returns the tokens that would complete an n-gram of `n` tokens that has occurred before.
fn repeats(tokens: &[u32], n: usize) -> Vec<u32> {
    if tokens.len() + 1 < n {
        return Vec::new();
    }
    let mut followers: HashMap<&[u32], Vec<u32>> = HashMap::new();
    for gram in tokens.windows(n) {
        followers
            .entry(&gram[..n - 1])
            .or_default()
            .push(gram[n - 1]);
    }
    let last = &tokens[tokens.len() + 1 - n..];
    followers.remove(last).unwrap_or_default()
}

fn forbid(logits: &mut [f32], ids: &[u32]) {
    for &id in ids {
        if let Some(x) = logits.get_mut(id as usize) {
            *x = f32::NEG_INFINITY;
        }
    }
}

fn force(logits: &mut [f32], ids: &[u32]) {
    logits.fill(f32::NEG_INFINITY);
    for &id in ids {
        if let Some(x) = logits.get_mut(id as usize) {
            *x = 0.0;
        }
    }
}
