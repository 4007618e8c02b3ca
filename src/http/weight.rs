//! The memory that reading a body takes, before it is read.

/// Bytes of a value in a list, which grows by doubling.
const VALUE: u64 = 64;
/// Bytes of a list of one value, and of a map of one entry, beside what is in them.
const LIST: u64 = 160;
const MAP: u64 = 650;
/// Bytes of each entry of a map.
const ENTRY: u64 = 130;
/// Bytes of a string and its copy, beside their characters.
const STRING: u64 = 64;

/// An upper estimate of the memory of a body in JSON, its values, and a copy of its texts. What is no JSON has one, too.
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
    fn small_values_weigh_more_than_their_bytes_and_characters_in_texts_do_not() {
        assert_eq!(weight(b""), 0);
        assert_eq!(weight(br#""a,b[{\":""#), 3 * 10 + STRING);
        assert_eq!(weight(b"[1,2]"), 3 * 5 + LIST + VALUE);
        assert_eq!(weight(br#"{"a":1}"#), 3 * 7 + MAP + ENTRY + STRING);
        let texts = format!("[{}\"a\"]", "\"a\",".repeat(1 << 20));
        let heavy = weight(texts.as_bytes()) / texts.len() as u64;
        assert!((30..40).contains(&heavy), "{heavy}");
    }
}
