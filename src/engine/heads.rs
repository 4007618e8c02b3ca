//! Methods of [`Engine`] that run task heads: classification, entity recognition, masked tokens and question answering.

use super::{Engine, EngineError};
use crate::{
    engine::LOGITS,
    heads::{
        Answer, AnswerOptions, Entity, EntityOptions, Filled, LabelScore, MASK_LOGITS, MaskJob,
        MaskOptions, QuestionJob, TOKEN_LOGITS, TokenJob, ZeroShotJob, ZeroShotOptions,
    },
    text::{Encoded, Input, Prompt},
};

/// Max number of tokens in a batch.
pub(super) const BATCH_TOKENS: usize = 16_384;
/// Max number of tokens in a batch if the output has a logit for each token and vocabulary entry.
const MASK_BATCH_TOKENS: usize = 1024;

impl Engine {
    /// Returns the scores of all labels for each text, best first, like the `text-classification` pipeline of Hugging Face transformers.
    ///
    /// # Errors
    /// Returns an error if the engine has no checkpoint folder or no output `sequence_logits`, if config.json has an unsupported
    /// `problem_type`, if the tokenizer refuses a text, or if a batch fails.
    pub fn classify<S: AsRef<str>>(
        &self,
        texts: &[S],
    ) -> Result<Vec<Vec<LabelScore>>, EngineError> {
        let encoder = self.text_encoder()?;
        let inputs: Vec<Input<'_>> = texts
            .iter()
            .map(|text| Input::Text(text.as_ref()))
            .collect();
        let encode = |&input: &Input<'_>| encoder.encode_one(input, Prompt::Default);
        let inputs = self.encode_all::<_, EngineError>(&inputs, encode, || Ok(()))?;
        let inputs: Vec<&Encoded> = inputs.iter().collect();
        let rows = self.head(&inputs, LOGITS, BATCH_TOKENS, |_, logits| logits.to_vec())?;
        let scored = rows.into_iter().map(|mut scores| {
            let folder = encoder.folder();
            folder.class_score(scores.len())?.apply(&mut scores);
            Ok(LabelScore::ranked(&folder.labels(scores.len()), scores))
        });
        scored.collect()
    }

    /// Labels the tokens of texts, or finds entities in them, like the `token-classification` pipeline of Hugging Face transformers. The
    /// engine must have the output `token_logits`. A text that is too long is truncated.
    ///
    /// # Errors
    /// Returns an error if the engine has no checkpoint folder or no output `token_logits`, if the tokenizer refuses a text, or if a batch
    /// fails.
    pub fn classify_tokens<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: &EntityOptions,
    ) -> Result<Vec<Vec<Entity>>, EngineError> {
        let encoder = self.text_encoder()?;
        let jobs = texts.iter().enumerate();
        let jobs = jobs.map(|(index, text)| TokenJob::new(encoder, index, text.as_ref()));
        let jobs: Vec<TokenJob> = jobs.collect::<Result<_, _>>()?;
        let inputs: Vec<&Encoded> = jobs.iter().map(TokenJob::input).collect();
        let rows = self.head(&inputs, TOKEN_LOGITS, BATCH_TOKENS, |_, logits| {
            logits.to_vec()
        })?;
        let done = jobs.iter().zip(&rows).map(|(job, logits)| {
            let labels = logits.len() / job.input().ids.len().max(1);
            let labels = encoder.folder().labels(labels);
            Ok(job.finish(encoder, logits, &labels, options)?)
        });
        done.collect()
    }

    /// Returns the most probable tokens for each mask of each text, like the `fill-mask` pipeline of Hugging Face transformers. The engine
    /// must have the output `mlm_logits`.
    ///
    /// # Errors
    /// Returns an error if the engine has no checkpoint folder or no output `mlm_logits`, if a text has no mask, if a word in
    /// `options.targets` has no token, if the tokenizer refuses a text, or if a batch fails.
    pub fn fill_masks<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: &MaskOptions,
    ) -> Result<Vec<Vec<Vec<Filled>>>, EngineError> {
        let encoder = self.text_encoder()?;
        let targets = MaskJob::targets(encoder, options)?;
        let jobs = texts.iter().enumerate();
        let jobs = jobs.map(|(index, text)| MaskJob::new(encoder, index, text.as_ref()));
        let jobs: Vec<MaskJob> = jobs.collect::<Result<_, _>>()?;
        let inputs: Vec<&Encoded> = jobs.iter().map(MaskJob::input).collect();
        let rows = self.head(&inputs, MASK_LOGITS, MASK_BATCH_TOKENS, |at, logits| {
            let width = logits.len() / inputs[at].ids.len().max(1);
            let rows = logits.chunks_exact(width.max(1));
            let rows: Vec<&[f32]> = rows.collect();
            let own = jobs[at].masks().iter().filter_map(|&mask| rows.get(mask));
            own.map(|row| row.to_vec()).collect::<Vec<Vec<f32>>>()
        })?;
        let done = jobs.iter().zip(&rows).map(|(job, rows)| {
            let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
            Ok(job.finish(encoder, &rows, options.top_k, &targets)?)
        });
        done.collect()
    }

    /// Scores labels for a text with a model of natural language inference, like the `zero-shot-classification` pipeline of Hugging Face
    /// transformers.
    ///
    /// # Errors
    /// Returns an error if the engine has no checkpoint folder or no output `sequence_logits`, if the model has no entailment label, if
    /// `labels` is empty, if the template does not contain `{}`, if the tokenizer refuses a text, or if a batch fails.
    pub fn classify_zero_shot<S: AsRef<str>>(
        &self,
        text: &str,
        labels: &[S],
        options: &ZeroShotOptions,
    ) -> Result<Vec<LabelScore>, EngineError> {
        let encoder = self.text_encoder()?;
        let names = encoder.folder().label_names();
        let labels: Vec<String> = labels
            .iter()
            .map(|label| label.as_ref().to_owned())
            .collect();
        let job = ZeroShotJob::new(encoder, &names, text, &labels, &options.template)?;
        let inputs: Vec<&Encoded> = job.inputs().iter().collect();
        let rows = self.head(&inputs, LOGITS, BATCH_TOKENS, |_, logits| logits.to_vec())?;
        let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        Ok(job.finish(&rows, options))
    }

    /// Finds answers to a question in a text, best first, like the `question-answering` pipeline of Hugging Face transformers 4. The engine
    /// must have the output `token_logits`, with a start label and an end label.
    ///
    /// # Errors
    /// Returns an error if [`classify_tokens`](Self::classify_tokens) would, if an option is out of range, or if the model does not have
    /// two labels.
    pub fn answer(
        &self,
        question: &str,
        text: &str,
        options: &AnswerOptions,
    ) -> Result<Vec<Answer>, EngineError> {
        let encoder = self.text_encoder()?;
        let job = QuestionJob::new(encoder, question, text, options)?;
        let inputs: Vec<&Encoded> = job.inputs().collect();
        let rows = self.head(&inputs, TOKEN_LOGITS, BATCH_TOKENS, |_, logits| {
            logits.to_vec()
        })?;
        let labels =
            (inputs.iter().zip(&rows)).map(|(input, row)| row.len() / input.ids.len().max(1));
        if let Some(labels) = labels.into_iter().find(|&labels| labels != 2) {
            return Err(EngineError::AnswersNothing { labels });
        }
        let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        Ok(job.finish(&rows, options)?)
    }

    /// Runs sequences in batches of similar lengths. Calls `row` with the index of each sequence in `inputs` and the values of its rows of
    /// `output`. Returns the results in the order of `inputs`.
    pub(super) fn head<T>(
        &self,
        inputs: &[&Encoded],
        output: &str,
        batch_tokens: usize,
        row: impl Fn(usize, &[f32]) -> T,
    ) -> Result<Vec<T>, EngineError> {
        warn_of_cut(inputs.iter().copied());
        self.in_order(inputs, batch_tokens, |outputs, at, index| {
            Ok(row(index, outputs.sequence(output, at)?))
        })
    }
}

/// Logs a warning for each text that was truncated.
pub(super) fn warn_of_cut<'a>(inputs: impl IntoIterator<Item = &'a Encoded>) {
    for (index, input) in inputs.into_iter().enumerate() {
        if input.is_cut {
            let n = input.ids.len();
            tracing::warn!("text {index} is cut to {n} tokens, the checkpoint's maximum");
        }
    }
}
