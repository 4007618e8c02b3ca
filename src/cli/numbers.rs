//! Parsers of whole numbers in arguments.

use clap::builder::RangedU64ValueParser;

/// Returns a parser for positive whole numbers.
pub(super) fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

/// Returns a parser for whole numbers from 1 up to and including `max`.
pub(super) fn from_one_to(max: usize) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=max as u64)
}

/// Returns a parser for whole numbers up to and including `max`.
pub(super) fn up_to(max: usize) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(..=max as u64)
}
