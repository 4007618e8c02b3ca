use super::candidates::largest;

/// Sampling options. The fields apply in the order of their declaration, as in Hugging Face transformers. Each field after the temperature
/// restricts the tokens that the previous fields leave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits.
    pub temperature: f32,
    /// Keeps only tokens with logits of at least the k-th largest; 0 keeps all.
    pub top_k: usize,
    /// Keeps only the smallest set of most probable tokens whose probabilities sum to at least this value (nucleus sampling, Holtzman et
    /// al. 2019); 1 keeps all.
    pub top_p: f32,
    /// Keeps only tokens with at least this probability relative to the most probable one; 0 keeps
    /// all.
    pub min_p: f32,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 50,
            top_p: 1.0,
            min_p: 0.0,
        }
    }
}

/// Minimum temperature, so that logits divided by it do not overflow.
const MIN_TEMPERATURE: f32 = 1e-20;

/// Invalid sampling options.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplingError {
    #[error(
        "the temperature is {found}; expected a number of at least {MIN_TEMPERATURE:e}; for the most probable token, disable sampling"
    )]
    Temperature { found: f32 },
    #[error("top_p is {found}; expected a number above 0, up to 1")]
    TopP { found: f32 },
    #[error("min_p is {found}; expected a number from 0 to 1")]
    MinP { found: f32 },
}

impl Sampling {
    /// Checks that every option is valid.
    ///
    /// # Errors
    /// Returns an error if an option is invalid. The error names the first invalid option.
    pub fn check(&self) -> Result<(), SamplingError> {
        if !(self.temperature.is_finite() && self.temperature >= MIN_TEMPERATURE) {
            let found = self.temperature;
            return Err(SamplingError::Temperature { found });
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(SamplingError::TopP { found: self.top_p });
        }
        match (0.0..=1.0).contains(&self.min_p) {
            true => Ok(()),
            false => Err(SamplingError::MinP { found: self.min_p }),
        }
    }

    /// Returns the tokens that may be drawn, in order of their ids, with their probabilities, which sum to 1. The k-th largest logit and
    /// the nucleus are found by selection, without sorting the vocabulary.
    pub fn distribution(&self, logits: &[f32]) -> Vec<(u32, f64)> {
        let least = match self.top_k {
            0 => None,
            k => largest(logits, k).last().map(|&(_, x)| x),
        };
        // Logits equal to the k-th largest are kept.
        let least = least.unwrap_or(f32::NEG_INFINITY);
        let left: Vec<(u32, f32)> = (0u32..)
            .zip(logits)
            .filter(|&(_, &x)| x >= least && x > f32::NEG_INFINITY)
            .map(|(id, &x)| (id, x / self.temperature))
            .collect();
        let top = left
            .iter()
            .map(|&(_, x)| x)
            .fold(f32::NEG_INFINITY, f32::max);
        let mut left: Vec<(u32, f64)> = left
            .into_iter()
            .map(|(id, x)| (id, f64::from(x - top).exp()))
            .collect();
        if self.top_p < 1.0 {
            let all: f64 = left.iter().map(|(_, p)| p).sum();
            nucleus(&mut left, f64::from(self.top_p) * all);
        }
        // A weight is a probability relative to that of the most probable token, whose weight is 1.
        left.retain(|&(_, p)| p >= f64::from(self.min_p));
        left.sort_unstable_by_key(|&(id, _)| id);
        let all: f64 = left.iter().map(|(_, p)| p).sum();
        left.iter_mut().for_each(|(_, p)| *p /= all);
        left
    }

    /// Chooses the first token, in order of ids, whose cumulative probability exceeds `uniform`, a number in [0, 1).
    pub fn choose(&self, logits: &[f32], uniform: f64) -> u32 {
        let all = self.distribution(logits);
        let mut rest = uniform;
        for &(id, p) in &all {
            if rest < p {
                return id;
            }
            rest -= p;
        }
        // The probabilities may sum to less than `uniform`, because they are rounded.
        all.last().map_or(0, |&(id, _)| id)
    }
}

/// Keeps the smallest set of largest weights that sum to at least `mass`; ties go to the lower id. Uses quickselect, so each step examines
/// only the weights that are still undecided.
fn nucleus(weights: &mut Vec<(u32, f64)>, mass: f64) {
    let before = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    let (mut from, mut to, mut sum) = (0, weights.len(), 0.0);
    // Weights before `from` are kept, weights from `to` on are removed, and the weights between them are undecided.
    while to - from > 1 {
        let middle = (to - from) / 2;
        weights[from..to].select_nth_unstable_by(middle, before);
        let upper: f64 = weights[from..from + middle].iter().map(|(_, p)| p).sum();
        match sum + upper < mass {
            true => {
                sum += upper;
                from += middle;
            }
            false => to = from + middle,
        }
    }
    weights.truncate((from + 1).min(weights.len()));
}
