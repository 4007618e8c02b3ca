use super::candidates::largest;

/// How a token is drawn of its logits. Each field narrows what the one before left, as in transformers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits.
    pub temperature: f32,
    /// Only tokens whose logits are at least the k-th largest; 0 for all.
    pub top_k: usize,
    /// Only the most probable tokens that have this probability together (nucleus sampling, Holtzman et al. 2019); 1 for all.
    pub top_p: f32,
    /// Only tokens that are this probable beside the most probable one; 0 for all.
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

/// Logits over a temperature below this are no numbers any more.
const LEAST_TEMPERATURE: f32 = 1e-20;

/// A setting that samples nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplingError {
    #[error(
        "the temperature is {found}; expected a number above 0, at least {LEAST_TEMPERATURE:e} (for the most probable token, do not sample)"
    )]
    Temperature { found: f32 },
    #[error("top_p is {found}; expected a number above 0, up to 1")]
    TopP { found: f32 },
    #[error("min_p is {found}; expected a number from 0 to 1")]
    MinP { found: f32 },
}

impl Sampling {
    /// Whether every setting can be.
    pub fn check(&self) -> Result<(), SamplingError> {
        if !(self.temperature.is_finite() && self.temperature >= LEAST_TEMPERATURE) {
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

    /// The tokens that may be drawn, by id, with their probabilities, which add up to 1. The vocabulary is not sorted: the
    /// k-th largest and the nucleus are found by selection.
    pub fn distribution(&self, logits: &[f32]) -> Vec<(u32, f64)> {
        let least = match self.top_k {
            0 => None,
            k => largest(logits, k).last().map(|&(_, x)| x),
        };
        // Those that equal the k-th largest stay.
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
        // The most probable one has 1.
        left.retain(|&(_, p)| p >= f64::from(self.min_p));
        left.sort_unstable_by_key(|&(id, _)| id);
        let all: f64 = left.iter().map(|(_, p)| p).sum();
        left.iter_mut().for_each(|(_, p)| *p /= all);
        left
    }

    /// The token at `uniform`, from 0 to below 1, of the probabilities one after another.
    pub fn choose(&self, logits: &[f32], uniform: f64) -> u32 {
        let all = self.distribution(logits);
        let mut rest = uniform;
        for &(id, p) in &all {
            if rest < p {
                return id;
            }
            rest -= p;
        }
        // Rounding may leave a little beyond the last.
        all.last().map_or(0, |&(id, _)| id)
    }
}

/// Keeps the fewest largest weights that add up to `mass` at least; of equal ones those of lower ids. Selection by halves: each
/// step looks at what is still open only.
fn nucleus(weights: &mut Vec<(u32, f64)>, mass: f64) {
    let before = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    let (mut from, mut to, mut sum) = (0, weights.len(), 0.0);
    // What is before `from` stays, what is from `to` on goes.
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
