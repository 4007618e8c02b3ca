//! A cache of the token ids of words, for tokenizers that tokenize a word independently of its context.
//!
//! The tokenizers crate normalizes text character by character and tracks offsets. This takes 1 to 2 µs per word, the largest part of
//! BERT's tokenization. Words repeat, and reading a word from the cache takes a twentieth of this time.

use quick_cache::sync::Cache;
use tokenizers::{
    EncodeInput, Encoding, InputSequence, ModelWrapper, NormalizerWrapper, PreTokenizerWrapper,
    Tokenizer, TruncationDirection,
};

/// Maximum number of cached words. A full cache evicts words that are seldom used.
const N_WORDS: usize = 1 << 16;
/// Maximum size of a cached word in bytes.
const MAX_BYTES: usize = 48;

pub(super) struct WordCache {
    known: Cache<Box<str>, Ids>,
}

/// The tokens of a word. Stored by value, so that threads do not share a reference count.
#[derive(Clone, Copy)]
struct Ids {
    n: u8,
    ids: [u32; 7],
}

impl Ids {
    /// Returns `None` for a word of more than 7 tokens.
    fn of(ids: &[u32]) -> Option<Self> {
        let mut kept = [0; 7];
        kept.get_mut(..ids.len())?.copy_from_slice(ids);
        Some(Self {
            n: ids.len() as u8,
            ids: kept,
        })
    }

    fn get(&self) -> &[u32] {
        &self.ids[..usize::from(self.n)]
    }
}

impl WordCache {
    /// Creates a cache for a tokenizer. Returns `None` if the tokenizer is not known to split text at spaces into independent words.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let parts_at_spaces = matches!(
            tokenizer.get_pre_tokenizer(),
            Some(
                PreTokenizerWrapper::BertPreTokenizer(_)
                    | PreTokenizerWrapper::Whitespace(_)
                    | PreTokenizerWrapper::WhitespaceSplit(_)
            )
        );
        let mut added = tokenizer
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .values();
        // BPE and Unigram models of the tokenizers crate already cache words.
        let suits = parts_at_spaces
            && matches!(tokenizer.get_model(), ModelWrapper::WordPiece(_))
            && tokenizer.get_normalizer().is_none_or(is_local)
            && !added.any(|token| token.content.contains(char::is_whitespace));
        suits.then(|| Self {
            known: Cache::new(N_WORDS),
        })
    }

    /// Tokenizes an input. `tokenizer` must be the one for which the cache was created. Returns the token ids and the overflow (the tokens
    /// that were cut off), without token names and offsets. Returns `None` if the tokenizer must process the input as a whole, for example
    /// because a pair is too long.
    ///
    /// # Errors
    /// Returns the errors of the tokenizer.
    pub(super) fn encode(
        &self,
        tokenizer: &Tokenizer,
        input: &EncodeInput<'_>,
        adds_special: bool,
    ) -> tokenizers::Result<Option<Encoding>> {
        let (first, second) = match input {
            EncodeInput::Single(InputSequence::Raw(text)) => (text, None),
            EncodeInput::Dual(InputSequence::Raw(a), InputSequence::Raw(b)) => (a, Some(b)),
            _ => return Ok(None),
        };
        let Some(first) = self.ids(tokenizer, first)? else {
            return Ok(None);
        };
        let second = match second.map(|text| self.ids(tokenizer, text)) {
            Some(ids) => match ids? {
                Some(ids) => Some(encoding(ids, 1)),
                None => return Ok(None),
            },
            None => None,
        };
        // The tokenizers crate truncates and adds special tokens.
        let is_pair = second.is_some();
        let whole = tokenizer.post_process(encoding(first, 0), second, adds_special)?;
        // If a pair is too long, the crate stops tokenizing each text at the limit, compares the numbers of tokens so far, and truncates.
        // Here, both texts were tokenized completely, so truncation could keep different tokens.
        let cuts_a_pair = is_pair && !whole.get_overflowing().is_empty();
        Ok((!cuts_a_pair).then_some(whole))
    }

    /// Returns the token ids of a text, without special tokens; `None` if the tokenizer stops at its token limit.
    fn ids(&self, tokenizer: &Tokenizer, text: &str) -> tokenizers::Result<Option<Vec<u32>>> {
        // BERT's normalizer turns these characters into spaces. It removes other ASCII characters that Unicode counts as spaces.
        let words = text
            .split([' ', '\t', '\n', '\r'])
            .filter(|w| !w.is_empty());
        let words: Vec<(&str, Option<Ids>)> = words.map(|w| (w, self.known.get(w))).collect();
        let new = words.iter().filter(|(_, known)| known.is_none());
        let new: Vec<&str> = new.map(|&(word, _)| word).collect();
        let made = match new.is_empty() {
            true => Vec::new(),
            false => match self.learn(tokenizer, &new)? {
                Some(made) => made,
                None => return Ok(None),
            },
        };
        let mut made = made.iter();
        let mut ids = Vec::with_capacity(2 * words.len());
        for (_, known) in &words {
            match known {
                Some(known) => ids.extend_from_slice(known.get()),
                None => ids.extend(made.next().into_iter().flatten()),
            }
        }
        Ok(Some(ids))
    }

    /// Tokenizes words and adds them to the cache. Returns `None` if the tokenizer stopped before the last word. The words are joined
    /// into one text, since a call of the tokenizer costs as much as tokenizing several words.
    fn learn(
        &self,
        tokenizer: &Tokenizer,
        words: &[&str],
    ) -> tokenizers::Result<Option<Vec<Vec<u32>>>> {
        let made = tokenizer.encode(words.join(" "), false)?;
        // The crate stops at the limit, and does not always report that it did.
        let stopped = tokenizer.get_truncation();
        let stopped = stopped.filter(|limit| made.len() >= limit.max_length);
        let mut ids = vec![Vec::new(); words.len()];
        let (mut at, mut end) = (0, words[0].len());
        for (&id, &(start, _)) in made.get_ids().iter().zip(made.get_offsets()) {
            while start >= end && at + 1 < words.len() {
                at += 1;
                end += 1 + words[at].len();
            }
            ids[at].push(id);
        }
        let n_whole = match stopped {
            None => words.len(),
            Some(limit) if limit.direction == TruncationDirection::Right => at,
            Some(_) => 0,
        };
        for (&word, ids) in words.iter().zip(&ids).take(n_whole) {
            if word.len() <= MAX_BYTES
                && let Some(kept) = Ids::of(ids)
            {
                self.known.insert(word.into(), kept);
            }
        }
        Ok(stopped.is_none().then_some(ids))
    }
}

/// Returns whether the normalized form of a text consists of the normalized forms of its words, separated by spaces.
fn is_local(normalizer: &NormalizerWrapper) -> bool {
    match normalizer {
        NormalizerWrapper::BertNormalizer(_) | NormalizerWrapper::Lowercase(_) => true,
        NormalizerWrapper::Sequence(all) => all.as_ref().iter().all(is_local),
        _ => false,
    }
}

/// Creates an encoding from ids alone.
fn encoding(ids: Vec<u32>, type_id: u32) -> Encoding {
    let n = ids.len();
    Encoding::new(
        ids,
        vec![type_id; n],
        vec![String::new(); n],
        vec![None; n],
        vec![(0, 0); n],
        vec![0; n],
        vec![1; n],
        Vec::new(),
        Default::default(),
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;
    use tokenizers::{AddedToken, TruncationParams};

    use super::*;

    fn tokenizer(file: &str) -> Tokenizer {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let mut tokenizer = Tokenizer::from_file(file).expect("a tokenizer");
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).expect("no limit");
        tokenizer
    }

    fn bert() -> Tokenizer {
        tokenizer("tests/checkpoints/st-mean/tokenizer.json")
    }

    /// Returns ids and segment ids.
    fn seen(encoding: &Encoding) -> (Vec<u32>, Vec<u32>) {
        (
            encoding.get_ids().to_vec(),
            encoding.get_type_ids().to_vec(),
        )
    }

    #[test]
    fn context_dependent_tokenizers_get_no_cache() {
        assert!(WordCache::of(&bert()).is_some());
        for file in ["st-xlmr", "st-qwen", "writer", "hf-t5", "hf-clip"] {
            let file = format!("tests/checkpoints/{file}/tokenizer.json");
            assert!(WordCache::of(&tokenizer(&file)).is_none(), "{file}");
        }
        let mut spaced = bert();
        let token = AddedToken::from("new york".to_owned(), false);
        spaced.add_tokens([token]).expect("a token");
        assert!(WordCache::of(&spaced).is_none());
    }

    #[test]
    fn a_full_cache_returns_correct_tokens() {
        let tokenizer = bert();
        let words = WordCache {
            known: Cache::new(8),
        };
        let text: String = (0..200).map(|i| format!("word{} ", i % 40)).collect();
        let input = EncodeInput::from(text.as_str());
        for _ in 0..3 {
            let ours = words.encode(&tokenizer, &input, true).expect("a text");
            let whole = tokenizer.encode_fast(text.as_str(), true).expect("a text");
            assert_eq!(seen(&ours.expect("it is parted")), seen(&whole));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        /// Generates words of letters, marks, CJK, control characters, spaces of all kinds and special tokens.
        #[test]
        fn cached_words_give_the_tokens_of_the_text(
            parts in prop::collection::vec(
                prop_oneof![
                    4 => "[a-zA-Z,.'-]{1,9}",
                    2 => "\\PC{0,6}",
                    1 => ".{0,4}",
                    1 => "[ \\t\\n\\r\\x0b\\x0c\u{a0}\u{85}\u{2003}\u{3000}\u{200b}\u{0}]{1,3}",
                    1 => "[ae\u{301}\u{308}\u{fffd}文字ßİΣ]{1,5}",
                    1 => Just("[SEP]".to_owned()),
                    1 => Just("[MASK]x".to_owned()),
                    1 => "[a-z]{90,130}",
                ],
                0..24,
            ),
            joint in prop_oneof![Just(" "), Just("\n"), Just("")],
            second in prop::option::of("[a-z ]{0,20}"),
            limit in prop::option::of(3usize..40),
            adds_special: bool,
            of_the_seed: bool,
        ) {
            let mut tokenizer = match of_the_seed {
                true => tokenizer("fuzz/seeds/tokenizer/wordpiece.json"),
                false => bert(),
            };
            let truncation = limit.map(|max_length| TruncationParams { max_length, ..Default::default() });
            tokenizer.with_truncation(None).expect("no limit");
            let unlimited = tokenizer.clone();
            tokenizer.with_truncation(truncation).expect("a limit");
            let words = WordCache::of(&tokenizer).expect("a tokenizer of words");
            let text = parts.join(joint);
            let input = match &second {
                None => EncodeInput::from(text.as_str()),
                Some(second) => EncodeInput::from((text.as_str(), second.as_str())),
            };
            let whole = tokenizer.encode_fast(input.clone(), adds_special).expect("a text");
            let is_cut = unlimited.encode_fast(input.clone(), adds_special).expect("a text").len() > whole.len();
            for _ in 0..2 {
                match words.encode(&tokenizer, &input, adds_special).expect("a text") {
                    Some(ours) => {
                        prop_assert_eq!(seen(&ours), seen(&whole));
                        prop_assert_eq!(!ours.get_overflowing().is_empty(), is_cut);
                    }
                    // The result may be `None` only if there is a token limit, which the input can exceed.
                    None => prop_assert!(limit.is_some()),
                }
            }
        }
    }
}
