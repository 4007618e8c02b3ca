//! Tasks of model heads. Token classification, masked tokens, zero-shot classification and questions about a text work as in the pipelines
//! of Hugging Face transformers. Late interaction works as in PyLate. Late chunking runs the model on a whole text and then pools the token
//! vectors of each chunk.
//!
//! A job tokenizes its texts and returns the sequences that a model must compute ([`TokenJob::input`] and so on). It then turns the model's
//! logits into results. Jobs do not depend on an engine, so both an engine and a server use them.

mod answer;
mod chunks;
mod entity;
mod job;
mod late;
mod mask;
mod zero_shot;

pub use answer::{Answer, AnswerOptions};
pub use chunks::pool_chunks;
pub use entity::{Aggregation, Entity, EntityOptions};
pub use job::{HeadError, MaskJob, QuestionJob, TokenJob, ZeroShotJob};
pub use late::{TokenVectors, max_sim};
pub use mask::{Filled, MaskOptions};
pub use zero_shot::{Entailment, LabelScore, ZeroShotOptions};

/// Name of the output with the logits of all labels for each token. If the model answers questions, the labels are the start and the end of
/// an answer.
pub const TOKEN_LOGITS: &str = "token_logits";
/// Name of the output of masked language models: the logits of the vocabulary for each token.
pub const MASK_LOGITS: &str = "mlm_logits";

/// Replaces logits with probabilities.
fn softmax(logits: &mut [f32]) {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter_mut().for_each(|x| *x = (*x - top).exp());
    let sum: f32 = logits.iter().sum();
    logits.iter_mut().for_each(|x| *x /= sum);
}

/// Returns the index of the largest value; the first if several are equal.
fn argmax(values: &[f32]) -> usize {
    let mut best = 0;
    for (at, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = at;
        }
    }
    best
}
