//! Estimate of the memory that parsing a body needs.

/// Bytes of a value in a list, including its part of the list's unused capacity.
const VALUE: u64 = 64;
/// Bytes of a list with one value (`LIST`) and of a map with one entry (`MAP`), not counting their contents.
const LIST: u64 = 160;
const MAP: u64 = 650;
/// Bytes of a map entry.
const ENTRY: u64 = 130;
/// Bytes of a string and its copy, not counting their characters.
const STRING: u64 = 64;

/// Returns an upper bound on the memory of a JSON body, its values, and a copy of its texts. Also works with invalid JSON.
pub(super) fn weight(body: &[u8]) -> u64 {
    let mut bytes = 3 * body.len() as u64;
    let mut is_text = false;
    let mut all = body.iter();
    while let Some(&byte) = all.next() {
        match (is_text, byte) {
            (true, b'\\') => _ = all.next(),
            (true, b'"') => is_text = false,
            (true, _) => {}
            (false, b'"') => {
                is_text = true;
                bytes += STRING;
            }
            (false, b',') => bytes += VALUE,
            (false, b'[') => bytes += LIST,
            (false, b'{') => bytes += MAP,
            (false, b':') => bytes += ENTRY,
            (false, _) => {}
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_charged_with_overhead_and_characters_in_texts_are_not() {
        assert_eq!(weight(b""), 0);
        assert_eq!(weight(br#""a,b[{\":""#), 3 * 10 + STRING);
        assert_eq!(weight(b"[1,2]"), 3 * 5 + LIST + VALUE);
        assert_eq!(weight(br#"{"a":1}"#), 3 * 7 + MAP + ENTRY + STRING);
        let texts = format!("[{}\"a\"]", "\"a\",".repeat(1 << 20));
        let heavy = weight(texts.as_bytes()) / texts.len() as u64;
        assert!((30..40).contains(&heavy), "{heavy}");
    }
}
