/// A text or a pair of texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input<'a> {
    Text(&'a str),
    /// A query and a document, for a cross-encoder.
    Pair(&'a str, &'a str),
}
