//! Masked language modeling: the most probable tokens for masks.

use serde::Serialize;

use super::softmax;

/// Options of a request to fill masks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaskOptions {
    /// Max number of tokens for each mask.
    pub top_k: usize,
    /// Words to which the result is limited. If empty, all tokens are considered. A word of several tokens is represented by its first
    /// token.
    pub targets: Vec<String>,
}

impl Default for MaskOptions {
    fn default() -> Self {
        Self {
            top_k: 5,
            targets: Vec::new(),
        }
    }
}

/// A token that replaces a mask.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Filled {
    pub score: f32,
    pub token: u32,
    /// The token as text.
    pub token_str: String,
    /// The text with the mask replaced by the token.
    pub sequence: String,
}

/// Returns the ids and probabilities of the `top_k` most probable tokens, most probable first. If `targets` is not empty, only these ids
/// are considered.
pub(super) fn best(mut logits: Vec<f32>, top_k: usize, targets: &[u32]) -> Vec<(u32, f32)> {
    softmax(&mut logits);
    let all = (0_u32..).zip(logits.iter().copied());
    let is_target = |id: &u32| targets.is_empty() || targets.contains(id);
    let mut all: Vec<(u32, f32)> = all.filter(|(id, _)| is_target(id)).collect();
    let by_score = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if top_k < all.len() && top_k > 0 {
        all.select_nth_unstable_by(top_k - 1, by_score);
    }
    all.truncate(top_k);
    all.sort_unstable_by(by_score);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_probable_tokens_come_first() {
        let logits: Vec<f32> = [1.0, 3.0, 2.0, 3.0].map(f32::ln).to_vec();
        let near = |found: Vec<(u32, f32)>, expected: &[(u32, f32)]| {
            assert_eq!(found.len(), expected.len());
            for (a, b) in found.iter().zip(expected) {
                assert!(a.0 == b.0 && (a.1 - b.1).abs() < 1e-6, "{found:?}");
            }
        };
        near(
            best(logits.clone(), 3, &[]),
            &[(1, 3.0 / 9.0), (3, 3.0 / 9.0), (2, 2.0 / 9.0)],
        );
        near(
            best(logits.clone(), 9, &[2, 0]),
            &[(2, 2.0 / 9.0), (0, 1.0 / 9.0)],
        );
        near(best(logits, 0, &[]), &[]);
    }
}
