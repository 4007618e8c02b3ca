//! Ranges by problem, and the file that keeps them.
//!
//! The file is RON, to be read, compared and, without its line `checksum`, changed by people.
//! Whatever is in it, what is read is sound or an error: a choice is taken only where it is one of the
//! problem's candidates, so no file can bring about a kernel that gemmule would not make itself.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Effort, PicksError, Problem, Range};

/// Number of the layout; another one is refused.
const FORMAT: u32 = 1;
/// Longest text that is read: that of some five hundred problems.
pub const MOST_BYTES: usize = 1 << 20;
/// Longest name of a card or a problem.
const MOST_NAME: usize = 256;
/// Ranges of a problem, and sizes at which one was timed.
const MOST_RANGES: usize = 256;
const MOST_TIMINGS: usize = 256;

/// A card, as far as timings depend on it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// As the driver calls it.
    pub name: String,
    /// Compute capability, (major, minor).
    pub capability: (u32, u32),
    /// Multiprocessors: a part of a card has fewer than the whole.
    pub n_sms: u32,
}

/// What picks were measured with.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Made {
    pub card: Card,
    /// Version of NVRTC, (major, minor).
    pub nvrtc: (i32, i32),
}

/// The picks of some problems, measured on one card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Picks {
    pub made: Made,
    /// Version of gemmule, for people: whether the kernels are the same is asked by their digest.
    pub gemmule: String,
    /// By [`Problem::key`].
    pub problems: BTreeMap<String, Picked>,
}

/// The picks of one problem.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Picked {
    /// SHA-256, in hexadecimal, of the source and launches of all candidates.
    pub digest: String,
    pub effort: Effort,
    pub ranges: Vec<Range>,
    /// What the ranges were found from, by size; for people.
    pub timings: Vec<Timing>,
}

/// What was measured at one size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timing {
    pub size: u64,
    /// Microseconds of the choice that serves the size.
    pub us: f64,
    /// Microseconds of the first guess.
    pub guess_us: f64,
}

/// The file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    format: u32,
    gemmule: String,
    card: Card,
    nvrtc: (i32, i32),
    /// SHA-256, in hexadecimal, of all the other values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    checksum: Option<String>,
    problems: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    problem: String,
    digest: String,
    effort: Effort,
    ranges: Vec<Range>,
    timings: Vec<Timing>,
}

/// Only the number of the layout, whatever else there is.
#[derive(Deserialize)]
struct Versioned {
    format: u32,
}

impl Picks {
    /// No picks yet, for this card and NVRTC.
    pub fn new(made: Made) -> Self {
        Self {
            made,
            gemmule: env!("CARGO_PKG_VERSION").to_owned(),
            problems: BTreeMap::new(),
        }
    }

    /// Only those of `problems`.
    pub fn only(mut self, problems: &[Problem]) -> Self {
        let keys: Vec<String> = problems.iter().map(Problem::key).collect();
        self.problems.retain(|key, _| keys.contains(key));
        self
    }

    /// The ranges of a problem; `None` where there are no picks for it.
    ///
    /// # Errors
    /// Where a range is none that the problem can have.
    pub fn ranges(&self, problem: &Problem) -> Result<Option<&[Range]>, PicksError> {
        let key = problem.key();
        let Some(picked) = self.problems.get(&key) else {
            return Ok(None);
        };
        check_ranges(&key, &picked.ranges)?;
        let candidates = problem.candidates();
        for range in &picked.ranges {
            if !candidates.contains(&range.choice) {
                let names: Vec<String> = candidates.iter().map(ToString::to_string).collect();
                return Err(PicksError::NoCandidate {
                    problem: key,
                    choice: range.choice.to_string(),
                    candidates: names.join(", "),
                });
            }
            if let Some(most) = range.choice.most()
                && range.up_to.is_none_or(|limit| limit > most)
            {
                return Err(PicksError::Beyond {
                    problem: key,
                    choice: range.choice.to_string(),
                    limit: range.up_to.map_or("any".to_owned(), |n| n.to_string()),
                    most,
                });
            }
        }
        Ok(Some(&picked.ranges))
    }

    /// Whether they were measured on this card, with this NVRTC.
    pub fn check_made(&self, expected: &Made) -> Result<(), PicksError> {
        if self.made.card != expected.card {
            return Err(PicksError::Card {
                found: self.made.card.clone(),
                expected: expected.card.clone(),
            });
        }
        self.check_nvrtc(expected.nvrtc)
    }

    /// Whether they were measured with this NVRTC.
    pub fn check_nvrtc(&self, expected: (i32, i32)) -> Result<(), PicksError> {
        let found = self.made.nvrtc;
        if found != expected {
            return Err(PicksError::Nvrtc { found, expected });
        }
        Ok(())
    }

    /// Whether the picks of a problem, if there are any, were measured on kernels of this digest
    /// and are picks that it can have.
    pub fn check_problem(&self, problem: &Problem, digest: &str) -> Result<(), PicksError> {
        let key = problem.key();
        match self.problems.get(&key) {
            Some(picked) if picked.digest != digest => Err(PicksError::Kernels { problem: key }),
            _ => self.ranges(problem).map(drop),
        }
    }

    /// What no picks may be, whichever problems they are of.
    pub fn check(&self) -> Result<(), PicksError> {
        check_name("the name of their card", &self.made.card.name)?;
        check_name("their version of gemmule", &self.gemmule)?;
        for (key, picked) in &self.problems {
            check_name("the name of a problem", key)?;
            let hex = |c: char| c.is_ascii_hexdigit() && !c.is_ascii_uppercase();
            if picked.digest.len() != 64 || !picked.digest.chars().all(hex) {
                return Err(PicksError::Value {
                    what: format!("the digest of `{key}`"),
                    found: plain(&picked.digest),
                    expected: "64 hexadecimal digits".to_owned(),
                });
            }
            check_ranges(key, &picked.ranges)?;
            check_timings(key, &picked.timings)?;
        }
        Ok(())
    }

    /// The picks in a file's content.
    pub fn parse(bytes: &[u8]) -> Result<Self, PicksError> {
        if bytes.len() > MOST_BYTES {
            return Err(PicksError::TooLarge);
        }
        let text = std::str::from_utf8(bytes).map_err(|_| PicksError::NotText)?;
        let syntax = |e: ron::error::SpannedError| PicksError::Syntax {
            problem: plain(&e.to_string()),
        };
        let document = ron::from_str::<Document>(text).map_err(|error| {
            // Another layout has other fields: its number says more than they do.
            match ron::from_str::<Versioned>(text) {
                Ok(other) if other.format != FORMAT => wrong_format(other.format),
                _ => syntax(error),
            }
        })?;
        if document.format != FORMAT {
            return Err(wrong_format(document.format));
        }
        if let Some(checksum) = &document.checksum
            && *checksum != document.checksum()?
        {
            return Err(PicksError::Checksum);
        }
        let mut picks = Self {
            made: Made {
                card: document.card,
                nvrtc: document.nvrtc,
            },
            gemmule: document.gemmule,
            problems: BTreeMap::new(),
        };
        for entry in document.problems {
            let picked = Picked {
                digest: entry.digest,
                effort: entry.effort,
                ranges: entry.ranges,
                timings: entry.timings,
            };
            if picks.problems.contains_key(&entry.problem) {
                return Err(PicksError::Value {
                    what: "a problem".to_owned(),
                    found: format!("`{}` for the second time", plain(&entry.problem)),
                    expected: "each once".to_owned(),
                });
            }
            picks.problems.insert(entry.problem, picked);
        }
        picks.check()?;
        Ok(picks)
    }

    /// The file's content. Equal picks give equal bytes.
    ///
    /// # Errors
    /// [`PicksError::Syntax`], which picks that [`Picks::check`] passes do not meet.
    pub fn to_ron(&self) -> Result<String, PicksError> {
        let mut document = Document {
            format: FORMAT,
            gemmule: self.gemmule.clone(),
            card: self.made.card.clone(),
            nvrtc: self.made.nvrtc,
            checksum: None,
            problems: self
                .problems
                .iter()
                .map(|(key, picked)| Entry {
                    problem: key.clone(),
                    digest: picked.digest.clone(),
                    effort: picked.effort,
                    ranges: picked.ranges.clone(),
                    timings: picked.timings.clone(),
                })
                .collect(),
        };
        document.checksum = Some(document.checksum()?);
        let pretty = ron::ser::PrettyConfig::new().depth_limit(4);
        let text = ron::ser::to_string_pretty(&document, pretty).map_err(unwritable)?;
        Ok(format!(
            "// Kernels that gemmule's tuner measured as the fastest, by problem and size.\n{text}\n"
        ))
    }
}

impl Document {
    fn checksum(&self) -> Result<String, PicksError> {
        // Numbers and strings have one form here, however the file was laid out.
        #[derive(Serialize)]
        struct Summed<'a>(u32, &'a str, &'a Card, (i32, i32), &'a [Entry]);
        let summed = Summed(
            self.format,
            &self.gemmule,
            &self.card,
            self.nvrtc,
            &self.problems,
        );
        Ok(sha256(&ron::to_string(&summed).map_err(unwritable)?))
    }
}

fn wrong_format(found: u32) -> PicksError {
    PicksError::Format {
        found,
        expected: FORMAT,
    }
}

fn unwritable(error: ron::Error) -> PicksError {
    PicksError::Syntax {
        problem: plain(&error.to_string()),
    }
}

/// SHA-256 in hexadecimal.
fn sha256(text: &str) -> String {
    Sha256::digest(text.as_bytes())
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn check_ranges(key: &str, ranges: &[Range]) -> Result<(), PicksError> {
    let problem = || key.to_owned();
    let Some((last, others)) = ranges.split_last() else {
        return Err(PicksError::NoRanges { problem: problem() });
    };
    if ranges.len() > MOST_RANGES {
        return Err(PicksError::Value {
            what: format!("the number of ranges of `{key}`"),
            found: ranges.len().to_string(),
            expected: format!("at most {MOST_RANGES}"),
        });
    }
    let mut before: Option<u64> = None;
    for range in others {
        let Some(limit) = range.up_to else {
            return Err(PicksError::EarlyLast { problem: problem() });
        };
        if let Some(before) = before.filter(|&before| before >= limit) {
            return Err(PicksError::Descending {
                problem: problem(),
                before,
                limit,
            });
        }
        before = Some(limit);
    }
    match last.up_to {
        None => Ok(()),
        Some(limit) => Err(PicksError::NoLast {
            problem: problem(),
            limit,
        }),
    }
}

fn check_timings(key: &str, timings: &[Timing]) -> Result<(), PicksError> {
    let wrong = |what: &str, found: String, expected: &str| PicksError::Value {
        what: format!("{what} of `{key}`"),
        found,
        expected: expected.to_owned(),
    };
    if timings.len() > MOST_TIMINGS {
        let n = timings.len().to_string();
        return Err(wrong("the number of timings", n, "at most 256"));
    }
    for timing in timings {
        for us in [timing.us, timing.guess_us] {
            if !us.is_finite() || us <= 0.0 {
                let expected = "a number above 0";
                return Err(wrong("a time", format!("{us} µs"), expected));
            }
        }
    }
    match timings.windows(2).find(|pair| pair[0].size >= pair[1].size) {
        None => Ok(()),
        Some(pair) => Err(wrong(
            "a size",
            format!("{} after {}", pair[1].size, pair[0].size),
            "ascending sizes",
        )),
    }
}

/// Names are shown to people: on one line, and not long.
fn check_name(what: &str, name: &str) -> Result<(), PicksError> {
    if name.is_empty() || name.len() > MOST_NAME || name.chars().any(char::is_control) {
        return Err(PicksError::Value {
            what: what.to_owned(),
            found: format!("`{}`", plain(name)),
            expected: format!("1 to {MOST_NAME} bytes without control characters"),
        });
    }
    Ok(())
}

/// What came from a file, fit to stand in a message.
fn plain(text: &str) -> String {
    const MOST: usize = 160;
    let mut shown: String = text
        .chars()
        .take(MOST)
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect();
    if text.chars().nth(MOST).is_some() {
        shown.push('…');
    }
    shown
}

impl fmt::Display for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.capability;
        write!(
            f,
            "{} (capability {major}.{minor}, {} multiprocessors)",
            self.name, self.n_sms
        )
    }
}

#[cfg(test)]
mod tests;
