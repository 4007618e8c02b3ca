use std::fmt;

/// An access token. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Returns the token in `text`, without surrounding white space. Returns `None` if it is empty or has characters that a header cannot
    /// contain.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        let is_plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
        is_plain.then(|| Self(text.to_owned()))
    }

    /// Returns the value of the header `Authorization`.
    pub(crate) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_one_word_and_is_not_shown() {
        let token = Token::new(" hf_abc\r\n").unwrap();
        assert_eq!(token.header(), "Bearer hf_abc");
        assert_eq!(format!("{token:?}"), "Token(…)");
        for bad in ["", " \n", "hf_a\r\nX-Other: b", "hf ü"] {
            assert_eq!(Token::new(bad), None, "{bad:?}");
        }
    }
}
