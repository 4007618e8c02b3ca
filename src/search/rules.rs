use std::collections::HashMap;

use super::log_sum;

/// What changes logits before a token is chosen, in the order in which transformers applies it.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// Divides the positive and multiplies the negative logits of tokens that are there already (Keskar et al. 2019); 1 for
    /// none.
    pub repetition_penalty: f32,
    /// What the logit of a token loses for each time that it is among the new ones; 0 for nothing.
    pub frequency_penalty: f32,
    /// What the logit of a token loses that is among the new ones, however often; 0 for nothing.
    pub presence_penalty: f32,
    /// What is added to the logits of tokens.
    pub bias: Vec<(u32, f32)>,
    /// No sequence of so many tokens occurs twice; 0 for none.
    pub no_repeat_ngram: usize,
    /// Tokens that end a sequence.
    pub end: Vec<u32>,
    /// No end before so many tokens, the prompt's included.
    pub min_length: usize,
    /// No end before so many new tokens.
    pub min_new_tokens: usize,
    /// The first new token.
    pub forced_first: Option<u32>,
    /// The tokens of which the last new one is, where the most new tokens are reached.
    pub forced_last: Vec<u32>,
    /// Tokens that never come.
    pub suppressed: Vec<u32>,
    /// Tokens that do not come first, or behind the first one where that is forced.
    pub suppressed_first: Vec<u32>,
    /// Whether log-probabilities are made to sum to one again behind these rules, which counts in the scores of beams.
    pub renormalize: bool,
    /// Maximum number of new tokens; [`Rules::NO_LIMIT`] for all that the model's positions and the KV cache leave.
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
            forced_last: Vec::new(),
            suppressed: Vec::new(),
            suppressed_first: Vec::new(),
            renormalize: false,
            max_new_tokens: Self::NO_LIMIT,
        }
    }
}

impl Rules {
    /// Stands for no limit of [`max_new_tokens`](Self::max_new_tokens).
    pub const NO_LIMIT: usize = usize::MAX;

    /// Changes the logits of the token behind `tokens`, of which the first `n_prompt` are the prompt.
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
        if n_new == 0
            && let Some(first) = self.forced_first
        {
            force(logits, &[first]);
        }
        if n_new.saturating_add(1) == self.max_new_tokens && !self.forced_last.is_empty() {
            force(logits, &self.forced_last);
        }
        forbid(logits, &self.suppressed);
        if n_new == usize::from(self.forced_first.is_some()) {
            forbid(logits, &self.suppressed_first);
        }
        if self.renormalize && logits.iter().any(|&x| x > f32::NEG_INFINITY) {
            let sum = log_sum(logits);
            logits.iter_mut().for_each(|x| *x -= sum);
        }
    }

    /// Whether they are among those that devices apply: not the penalties by counts and the bias, which OpenAI has, nor what does not come
    /// behind a forced token.
    pub fn suit_devices(&self) -> bool {
        let is_plain = self.forced_first.is_none() || self.suppressed_first.is_empty();
        is_plain
            && self.frequency_penalty == 0.0
            && self.presence_penalty == 0.0
            && self.bias.is_empty()
    }

    /// Whether a token ends its sequence.
    pub fn ends(&self, id: u32) -> bool {
        self.end.contains(&id)
    }

    /// Takes from the logits of new tokens by how often each of them has come.
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

/// Tokens that would end a sequence of `n` tokens that is there already.
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
