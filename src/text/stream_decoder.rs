//! Incremental decoding of generated tokens, with stop strings.

use std::ops::Range;

/// The text of a sequence that is being generated.
#[derive(Clone, Debug, Default)]
pub struct StreamDecoder {
    pub tokens: Vec<u32>,
    pub text: String,
    /// Number of bytes of `text` that were already shown to the user.
    pub shown: usize,
    /// Whether a stop string was found.
    pub stopped: bool,
    /// Tokens that are decoded again together with new ones, since the text of a token depends on the tokens before it.
    context: Range<usize>,
    /// The text of the context tokens, decoded alone.
    context_text: String,
    /// Length in bytes of the text of all tokens up to the end of `context`.
    settled: usize,
    /// Last tokens of the prompt. Empty once the context no longer includes them.
    before: Vec<u32>,
}

/// Maximum number of the prompt's last tokens that are decoded with the first new tokens.
const BEFORE: usize = 8;

impl StreamDecoder {
    /// Creates a decoder for the text after a prompt. The last tokens of the prompt are decoded together with the first new tokens, because
    /// SentencePiece decoders drop a space at the beginning of a text.
    ///
    /// # Errors
    /// Returns the errors of `decode`.
    pub fn after<E>(
        prompt: &[u32],
        decode: impl Fn(&[u32]) -> Result<String, E>,
    ) -> Result<Self, E> {
        let before = prompt[prompt.len().saturating_sub(BEFORE)..].to_vec();
        Ok(Self {
            context_text: decode(&before)?,
            before,
            ..Self::default()
        })
    }

    /// Adds a token. Only the last few tokens before it are decoded again.
    ///
    /// # Errors
    /// Returns the errors of `decode`.
    pub fn push<E>(
        &mut self,
        id: u32,
        decode: impl Fn(&[u32]) -> Result<String, E>,
    ) -> Result<(), E> {
        self.tokens.push(id);
        let open = &self.tokens[self.context.start..];
        let now = match self.before.is_empty() {
            true => decode(open)?,
            false => decode(&[&self.before, open].concat())?,
        };
        let Some(new) = now.strip_prefix(self.context_text.as_str()) else {
            // A decoder that changes its earlier output needs all tokens.
            self.text = decode(&self.tokens)?;
            self.context = 0..0;
            self.context_text.clear();
            self.before.clear();
            self.settled = 0;
            return Ok(());
        };
        self.text.truncate(self.settled);
        self.text.push_str(new);
        // Incomplete characters and tokens without text are decoded with the next tokens.
        if !new.is_empty() && !new.ends_with('\u{fffd}') {
            self.settled = self.text.len();
            self.context = self.context.end..self.tokens.len();
            self.before.clear();
            self.context_text = decode(&self.tokens[self.context.clone()])?;
        }
        Ok(())
    }

    /// Truncates the text where the first stop string begins, and returns whether there is one. [`ready`](Self::ready) ensures that no stop
    /// string begins in the part that has been shown.
    pub fn cut(&mut self, stops: &[String]) -> bool {
        let open = self.text.get(self.shown..).unwrap_or_default();
        let found = stops.iter().filter_map(|stop| open.find(stop.as_str()));
        if let Some(at) = found.min() {
            self.text.truncate(self.shown + at);
            self.stopped = true;
        }
        self.stopped
    }

    /// Returns the length of the text that can be shown: the part that later tokens cannot change. If the text ends with the beginning of a
    /// stop string, this beginning is left out.
    pub fn ready(&self, stops: &[String]) -> usize {
        let whole = self.text.trim_end_matches('\u{fffd}');
        let begun = |stop: &String| {
            let ends = (1..stop.len()).rev().filter(|&n| stop.is_char_boundary(n));
            let mut ends = ends.filter(|&n| whole.ends_with(&stop[..n]));
            ends.next().unwrap_or(0)
        };
        let held = stops.iter().map(begun).max().unwrap_or(0);
        (whole.len() - held).max(self.shown)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;

    fn text(all: &str) -> StreamDecoder {
        StreamDecoder {
            text: all.to_owned(),
            ..StreamDecoder::default()
        }
    }

    #[test]
    fn a_stop_cuts_the_text_where_it_begins() {
        let stops = ["\n\n".to_owned(), "END".to_owned()];
        let mut cut = text("one END two\n\n");
        assert!(cut.cut(&stops));
        assert_eq!(cut.text, "one ");
        assert!(!text("one EN").cut(&stops));
    }

    /// Decodes byte-level tokens, skipping special ones and a leading space, as SentencePiece's decoder does.
    fn decode(tokens: &[u32]) -> Result<String, Infallible> {
        let bytes = tokens.iter().filter_map(|&t| u8::try_from(t).ok());
        let text = String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned();
        Ok(text.strip_prefix(' ').map_or(text.clone(), str::to_owned))
    }

    proptest! {
        #[test]
        fn incremental_text_equals_the_decoded_whole(whole in "[a-c é文\u{301}😀]{0,40}", marks in prop::collection::vec(0usize..60, 0..9)) {
            let mut tokens: Vec<u32> = whole.bytes().map(u32::from).collect();
            let n_marks = marks.len();
            for at in marks {
                tokens.insert(at.min(tokens.len()), 1000);
            }
            let mut text = StreamDecoder::default();
            for token in tokens {
                text.push(token, decode).expect("it decodes anything");
                let n = text.context.end - text.context.start;
                prop_assert!(n <= 8 + n_marks, "{n} tokens are decoded again");
                let known = decode(&text.tokens).expect("it decodes anything");
                // An incomplete character may be decoded to one replacement character or several.
                let whole = |text: &str| text.trim_end_matches('\u{fffd}').to_owned();
                prop_assert_eq!(whole(&text.text), whole(&known));
            }
        }
    }

    #[test]
    fn a_decoder_that_changes_earlier_output_is_followed() {
        let sums = |tokens: &[u32]| Ok::<_, Infallible>(tokens.iter().sum::<u32>().to_string());
        let mut text = StreamDecoder::default();
        for (token, sum) in [(7, "7"), (8, "15"), (90, "105"), (1, "106")] {
            text.push(token, sums).expect("numbers");
            assert_eq!(text.text, sum);
        }
    }

    #[test]
    fn partial_stops_and_characters_are_held_back() {
        let stops = ["END".to_owned()];
        assert_eq!(text("one EN").ready(&stops), 4);
        assert_eq!(text("one ENt").ready(&stops), 7);
        assert_eq!(text("é\u{fffd}").ready(&stops), 2);
        // The end of a stop string may arrive in tokens that are parts of a character.
        assert_eq!(text("one a\u{fffd}\u{fffd}").ready(&["aé".to_owned()]), 4);
    }

    #[test]
    fn a_stop_is_found_across_partial_characters() {
        for (whole, stop, left) in [
            ("one aé two", "aé", "one "),
            ("o 😀 two", " 😀", "o"),
            ("o é", "é", "o "),
        ] {
            let stops = [stop.to_owned()];
            let mut text = StreamDecoder::default();
            for byte in whole.bytes() {
                text.push(byte.into(), decode).expect("it decodes anything");
                if text.cut(&stops) {
                    break;
                }
                text.shown = text.ready(&stops);
            }
            assert_eq!((text.text.as_str(), text.stopped), (left, true));
        }
    }

    #[test]
    fn text_after_a_prompt_keeps_its_first_space() {
        let of = |text: &str| text.bytes().map(u32::from).collect::<Vec<u32>>();
        for prompt in ["One cold morning", " a", "é"] {
            let mut text = StreamDecoder::after(&of(prompt), decode).expect("it decodes anything");
            for token in of(" Anna walked") {
                text.push(token, decode).expect("it decodes anything");
            }
            assert_eq!(text.text, " Anna walked");
            assert_eq!(text.tokens, of(" Anna walked"));
        }
    }
}
