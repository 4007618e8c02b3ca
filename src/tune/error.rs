use super::{Card, picks::MOST_BYTES};

/// Why picks are refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PicksError {
    #[error("they are more than {MOST_BYTES} bytes, which no tuner writes")]
    TooLarge,
    #[error("they are no text in UTF-8")]
    NotText,
    #[error("they do not read as picks: {problem}")]
    Syntax { problem: String },
    #[error("their format is {found}, this version of gemmule reads format {expected}")]
    Format { found: u32, expected: u32 },
    #[error(
        "their checksum does not fit, so they were damaged or changed; whoever changed them on purpose takes the line `checksum` out"
    )]
    Checksum,
    #[error("{what} is {found}, expected {expected}")]
    Value {
        what: String,
        found: String,
        expected: String,
    },
    #[error("they were measured on {found}, and this is {expected}")]
    Card { found: Card, expected: Card },
    #[error("they were measured on {found}, a card for which no target makes code")]
    NoTarget { found: Card },
    #[error("they were measured on {found}, whose code is for {found_target}, not for {expected}")]
    Target {
        found: Card,
        found_target: &'static str,
        expected: &'static str,
    },
    #[error(
        "they were measured with code of NVRTC {}.{}, and this is NVRTC {}.{}",
        found.0, found.1, expected.0, expected.1
    )]
    Nvrtc {
        found: (i32, i32),
        expected: (i32, i32),
    },
    #[error(
        "the kernels of `{problem}` are not those that were measured; this version of gemmule generates others"
    )]
    Kernels { problem: String },
    #[error("`{problem}` has no ranges")]
    NoRanges { problem: String },
    #[error("`{problem}` has a range up to {limit} after one up to {before}; limits ascend")]
    Descending {
        problem: String,
        before: u64,
        limit: u64,
    },
    #[error("`{problem}` has a range without a limit before its last")]
    EarlyLast { problem: String },
    #[error("the last range of `{problem}` ends at {limit}; the last has no limit")]
    NoLast { problem: String, limit: u64 },
    #[error("`{problem}` has no candidate {choice}; it has {candidates}")]
    NoCandidate {
        problem: String,
        choice: String,
        candidates: String,
    },
    #[error("`{problem}` has {choice} for more than it serves: {limit}, at most {most}")]
    Beyond {
        problem: String,
        choice: String,
        limit: String,
        most: u64,
    },
}
