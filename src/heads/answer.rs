//! Extractive question answering: an answer is a span of the text.

use serde::Serialize;

use super::softmax;

/// Options of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerOptions {
    /// Max number of answers.
    pub top_k: usize,
    /// Max number of tokens of an answer.
    pub max_answer_tokens: usize,
    /// Max number of tokens of a question together with a part of its text; by default 384 or the model's limit, whichever is less. Longer
    /// texts are split into parts.
    pub max_tokens: Option<usize>,
    /// Number of tokens that consecutive parts of a text share; by default 128 or half of `max_tokens`, whichever is less.
    pub stride: Option<usize>,
    /// Whether the empty answer is allowed, for texts without an answer.
    pub allows_none: bool,
    /// Whether answers are extended to whole words.
    pub aligns_to_words: bool,
}

impl Default for AnswerOptions {
    fn default() -> Self {
        Self {
            top_k: 1,
            max_answer_tokens: 15,
            max_tokens: None,
            stride: None,
            allows_none: false,
            aligns_to_words: true,
        }
    }
}

/// An answer: a span of the text, or an empty string if the text has no answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    pub score: f32,
    /// Range of the answer in the text, in characters.
    pub start: usize,
    pub end: usize,
    pub answer: String,
}

/// A token of a sequence, which consists of the question and a part of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SpanToken {
    /// Range of the token in the text, in characters.
    pub start: usize,
    pub end: usize,
    /// Whether the token may begin or end an answer.
    pub is_allowed: bool,
    /// Index of the word; `None` for tokens that are not part of the text.
    pub word: Option<u32>,
}

/// Collects answers from the parts of a text.
pub(super) struct Answers<'o> {
    options: &'o AnswerOptions,
    found: Vec<Answer>,
    /// Lowest score of the empty answer among the parts.
    none: f32,
}

impl<'o> Answers<'o> {
    pub fn new(options: &'o AnswerOptions) -> Self {
        Self {
            options,
            found: Vec::new(),
            none: 1e6,
        }
    }

    /// Adds the answers in one part of the text. `logits`, `[tokens, 2]`, has the start logit and the end logit of each token. `text(start,
    /// end)` returns the characters `start..end` of the whole text.
    pub fn add(
        &mut self,
        tokens: &[SpanToken],
        logits: &[f32],
        text: impl Fn(usize, usize) -> String,
    ) {
        let options = self.options;
        let allowed = |at: usize, logit: f32| match tokens[at].is_allowed {
            true => logit,
            false => -10_000.0,
        };
        let rows = logits.chunks_exact(2).take(tokens.len()).enumerate();
        let (mut starts, mut ends): (Vec<f32>, Vec<f32>) = rows
            .map(|(at, row)| (allowed(at, row[0]), allowed(at, row[1])))
            .unzip();
        softmax(&mut starts);
        softmax(&mut ends);
        let (Some(start), Some(end)) = (starts.first_mut(), ends.first_mut()) else {
            return;
        };
        // A span of only the first token means that there is no answer. It is scored separately.
        self.none = self.none.min(*start * *end);
        (*start, *end) = (0.0, 0.0);
        // Extending answers to whole words can make several candidates equal. These are merged, so take more candidates than answers.
        let n = match options.aligns_to_words {
            true => 2 * options.top_k + 10,
            false => options.top_k,
        };
        let mut spans = Vec::new();
        for (from, start) in starts.iter().enumerate() {
            let until = (from + options.max_answer_tokens).min(ends.len());
            for (to, end) in ends.iter().enumerate().take(until).skip(from) {
                if tokens[from].is_allowed && tokens[to].is_allowed {
                    spans.push((start * end, from, to));
                }
            }
        }
        spans.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        for (score, from, to) in spans.into_iter().take(n) {
            let (start, end) = match options.aligns_to_words {
                true => in_words(tokens, from, to),
                false => (tokens[from].start, tokens[to].end),
            };
            let answer = text(start, end);
            let lower = answer.to_lowercase();
            let same = |other: &&mut Answer| other.answer.to_lowercase() == lower;
            match self.found.iter_mut().find(same) {
                Some(other) => other.score += score,
                None => self.found.push(Answer {
                    score,
                    start,
                    end,
                    answer,
                }),
            }
        }
    }

    /// Returns the `top_k` answers with the highest scores, highest first.
    pub fn best(mut self) -> Vec<Answer> {
        if self.options.allows_none {
            self.found.push(Answer {
                score: self.none,
                start: 0,
                end: 0,
                answer: String::new(),
            });
        }
        self.found.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.found.truncate(self.options.top_k);
        self.found
    }
}

/// Returns the character range of the tokens `from..=to`, extended to whole words unless token `from` or `to` has no word.
fn in_words(tokens: &[SpanToken], from: usize, to: usize) -> (usize, usize) {
    let (Some(first), Some(last)) = (tokens[from].word, tokens[to].word) else {
        return (tokens[from].start, tokens[to].end);
    };
    let of = |word: u32| move |token: &&SpanToken| token.word == Some(word);
    let start = tokens.iter().find(of(first)).map(|token| token.start);
    let end = tokens.iter().rfind(of(last)).map(|token| token.end);
    (
        start.unwrap_or(tokens[from].start),
        end.unwrap_or(tokens[to].end),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "It rained in Springfield";

    /// Returns the tokens of `[CLS] where [SEP] it rained in spring ##field [SEP]`.
    fn tokens() -> Vec<SpanToken> {
        let none = SpanToken {
            start: 0,
            end: 0,
            is_allowed: false,
            word: None,
        };
        let own = |start, end, word| SpanToken {
            start,
            end,
            is_allowed: true,
            word: Some(word),
        };
        let first = SpanToken {
            is_allowed: true,
            ..none
        };
        vec![
            first,
            none,
            none,
            own(0, 2, 0),
            own(3, 9, 1),
            own(10, 12, 2),
            own(13, 19, 3),
            own(19, 24, 3),
            none,
        ]
    }

    fn found(options: &AnswerOptions, peak: [usize; 2]) -> Vec<Answer> {
        let mut logits = vec![0f32; 18];
        logits[2 * peak[0]] = 5.0;
        logits[2 * peak[1] + 1] = 5.0;
        let mut answers = Answers::new(options);
        answers.add(&tokens(), &logits, |start, end| TEXT[start..end].to_owned());
        answers.best()
    }

    #[test]
    fn answers_are_whole_words_within_their_length() {
        let options = AnswerOptions::default();
        let best = found(&options, [6, 6]);
        assert_eq!(
            (best[0].answer.as_str(), best[0].start, best[0].end),
            ("Springfield", 13, 24)
        );
        let parts = AnswerOptions {
            aligns_to_words: false,
            ..options.clone()
        };
        assert_eq!(found(&parts, [6, 6])[0].answer, "Spring");
        assert_eq!(found(&parts, [4, 7])[0].answer, "rained in Springfield");
        let short = AnswerOptions {
            max_answer_tokens: 2,
            top_k: 3,
            ..parts
        };
        let all = found(&short, [4, 7]);
        assert_eq!(all.len(), 3);
        assert!(
            all.iter()
                .all(|answer| answer.answer.split(' ').count() <= 2),
            "{all:?}"
        );
        // Tokens of the question and `[SEP]` cannot begin or end an answer, so logits that peak there give answers with low scores.
        assert!(found(&options, [1, 8])[0].score < 0.2);
    }

    #[test]
    fn no_answer_competes_with_answers() {
        let options = AnswerOptions {
            allows_none: true,
            ..AnswerOptions::default()
        };
        let best = found(&options, [0, 0]);
        assert_eq!((best[0].answer.as_str(), best[0].end), ("", 0));
        assert!(best[0].score > 0.5);
        assert_eq!(found(&options, [5, 6])[0].answer, "in Springfield");
        let without = found(&AnswerOptions::default(), [0, 0]);
        assert_ne!(without[0].answer, "");
    }
}
