//! Batches with random token counts, which test the choice of kernels at sizes that were not selected by hand.

use std::str::FromStr;

use crate::{kernels::trial::uniform, tensor::Extents};

use super::sets::Set;

/// Arguments of a scan: the number of batches, their token counts, and the mean sequence length.
#[derive(clap::Args)]
pub struct Scan {
    /// Instead of sets, time N batches with random token counts. The range --scan-tokens is divided into N intervals of equal length on a
    /// logarithmic scale, and each interval gives the token count of one batch
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "38", conflicts_with_all = ["workloads", "sets"],
          value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub scan: Option<u16>,
    /// Min and max token count of a batch in a scan
    #[arg(
        long,
        value_name = "FROM..TO",
        default_value = "640..16384",
        requires = "scan"
    )]
    scan_tokens: Tokens,
    /// Mean sequence length in a scan. Lengths are drawn from 0.6 to 1.4 times this mean; the last sequence has the remaining tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 100, requires = "scan",
          value_parser = clap::value_parser!(u32).range(1..=Extents::MAX_TOKENS as i64))]
    scan_length: u32,
    /// Seed for the token counts and lengths of a scan
    #[arg(long, value_name = "SEED", default_value_t = 1, requires = "scan")]
    scan_seed: u64,
}

/// Min and max number of tokens of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tokens {
    from: u32,
    to: u32,
}

impl FromStr for Tokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let most = Extents::MAX_TOKENS;
        let number = |text: &str| text.trim().parse::<u32>().ok();
        text.split_once("..")
            .and_then(|(from, to)| Some((number(from)?, number(to)?)))
            .filter(|&(from, to)| (1..=to).contains(&from) && u64::from(to) <= most)
            .map(|(from, to)| Self { from, to })
            .ok_or_else(|| {
                format!("expected FROM..TO with 1 <= FROM <= TO <= {most}, e.g. 640..16384")
            })
    }
}

impl Scan {
    /// Returns the batches, ordered by number of tokens; `None` without `--scan`.
    pub(super) fn sets(&self) -> Option<Vec<Set>> {
        let n = self.scan?;
        let mut state = self.scan_seed;
        let (from, to) = (
            f64::from(self.scan_tokens.from),
            f64::from(self.scan_tokens.to),
        );
        let count = |nth: u16, state: &mut u64| {
            let at = (f64::from(nth) + fraction(state)) / f64::from(n);
            (from * (to / from).powf(at)).round() as u32
        };
        let sets = (0..n).map(|nth| {
            let tokens = count(nth, &mut state);
            Set {
                name: format!("t{tokens}"),
                lens: self.lens(tokens, &mut state),
            }
        });
        Some(sets.collect())
    }

    fn lens(&self, tokens: u32, state: &mut u64) -> Vec<u32> {
        let mut left = tokens;
        let mut lens = Vec::new();
        while left > 0 {
            let length = f64::from(self.scan_length) * (0.6 + 0.8 * fraction(state));
            let length = (length.round() as u32).clamp(1, left);
            lens.push(length);
            left -= length;
        }
        lens
    }
}

/// Returns a number from 0 to 1, with 53 random bits.
fn fraction(state: &mut u64) -> f64 {
    (uniform(state) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(tokens: &str, length: u32, seed: u64) -> Scan {
        Scan {
            scan: Some(40),
            scan_tokens: tokens.parse().unwrap(),
            scan_length: length,
            scan_seed: seed,
        }
    }

    #[test]
    fn counts_are_uniform_in_their_logarithm_and_depend_on_the_seed() {
        let sets = scan("640..16384", 100, 1).sets().unwrap();
        let tokens: Vec<u64> = sets.iter().map(Set::tokens).collect();
        let step = (16384f64 / 640.0).powf(1.0 / 40.0);
        for (nth, &tokens) in tokens.iter().enumerate() {
            let from = 640.0 * step.powi(nth as i32);
            assert!(
                (from - 1.0..=from * step + 1.0).contains(&(tokens as f64)),
                "{tokens}"
            );
        }
        for set in &sets {
            let (last, others) = set.lens.split_last().unwrap();
            assert!(others.iter().all(|len| (60..=140).contains(len)) && *last <= 140);
            assert_eq!(set.name, format!("t{}", set.tokens()));
        }
        let of = |seed| {
            let sets = scan("640..16384", 100, seed).sets().unwrap();
            sets.into_iter().map(|set| set.lens).collect::<Vec<_>>()
        };
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
        assert!(
            Scan {
                scan: None,
                ..scan("1..2", 1, 1)
            }
            .sets()
            .is_none()
        );
    }

    #[test]
    fn min_tokens_and_sequences_of_one_token_are_valid() {
        for set in scan("1..3", 1, 7).sets().unwrap() {
            assert!((1..=3).contains(&set.tokens()));
            assert!(set.lens.iter().all(|&len| len == 1));
        }
    }

    #[test]
    fn empty_and_oversized_ranges_are_refused() {
        for text in [
            "",
            "5",
            "0..5",
            "6..5",
            "1..16777217",
            "-1..5",
            "1..x",
            "1...5",
        ] {
            assert!(
                text.parse::<Tokens>().unwrap_err().contains("FROM..TO"),
                "{text}"
            );
        }
        assert_eq!(
            "1 .. 16777216".parse(),
            Ok(Tokens {
                from: 1,
                to: 1 << 24
            })
        );
    }
}
