//! Files of kernel times measured on a card.
//!
//! A file is RON, which people can read and compare. It contains only times, not the names of kernels to use. A file can therefore not make
//! gemmule run a kernel that it would not generate itself.

mod store;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub(super) use store::{Store, refused};
pub use store::{read_timings, timings_for, write_timings};

use crate::{
    machine::{Machine, MachineError},
    runtime::cuda::DeviceInfo,
    select::Timings,
};

/// Version of the format. Files of other versions are refused.
const FORMAT: u32 = 1;
/// Digest of the sources that kernels are generated from, computed by `build.rs`. Timings in a file with another digest are refused.
const KERNELS: &str = env!("GEMMULE_KERNELS");
/// Maximum length in bytes of the name of a card or a kernel.
const MAX_NAME: usize = 512;
/// Valid range for the time of a launch, in microseconds. The range keeps corrected estimates finite and positive.
const POSSIBLE_US: std::ops::RangeInclusive<f64> = 1e-3..=1e9;
/// Maximum number of row counts that one kernel was timed at.
const MAX_TIMED: usize = 256;

/// The card and the compiler that timings were measured with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimedOn {
    /// Name of the card, as reported by the driver.
    pub card: String,
    /// Compute capability, (major, minor).
    pub capability: (u32, u32),
    /// Number of SMs. A partition of a card (MIG) has fewer than the whole card.
    pub sms: u32,
    /// Version of NVRTC, (major, minor).
    pub nvrtc: (i32, i32),
}

impl TimedOn {
    /// Describes a device and a version of NVRTC.
    pub fn new(device: &DeviceInfo, nvrtc: (i32, i32)) -> Self {
        Self {
            card: device.name.clone(),
            capability: device.capability,
            sms: device.n_sms,
            nvrtc,
        }
    }

    /// Returns the description of the timed card, with the number of SMs of the timed device; `None` if no file in `machines/` describes
    /// the card.
    ///
    /// # Errors
    /// Returns the errors of [`Machine::all`].
    pub fn machine(&self) -> Result<Option<Machine>, MachineError> {
        let own = |machine: &&Machine| {
            machine.capability == self.capability && machine.cards.contains(&self.card)
        };
        let found = Machine::all()?.iter().find(own);
        Ok(found.map(|machine| machine.with_sms(self.sms)))
    }

    /// Returns whether the timings apply to `machine`. If the timed card has no description, its timings apply to every card with the same
    /// compute capability.
    fn serves(&self, machine: &Machine) -> Result<bool, MachineError> {
        let own = self.machine()?;
        Ok(self.capability == machine.capability
            && own.is_none_or(|own| own.name == machine.name && own.sms == machine.sms))
    }
}

/// Reason why a file of timings is refused.
#[derive(Debug, thiserror::Error)]
pub enum TimingsError {
    #[error("they are not RON in gemmule's format: {0}")]
    Syntax(String),
    #[error("their format is {found}, this version of gemmule reads format {FORMAT}")]
    Format { found: u32 },
    #[error("their checksum does not match: they were damaged, or changed by hand")]
    Checksum,
    #[error(
        "they were measured on {}, and this is {}",
        said(found),
        said(expected)
    )]
    Card { found: TimedOn, expected: TimedOn },
    #[error(
        "they were measured on {}, and kernels are chosen for {card}",
        said(found)
    )]
    OtherMachine { found: TimedOn, card: String },
    #[error("they were measured with NVRTC {}.{}, and this is {}.{}", found.0, found.1, expected.0, expected.1)]
    Nvrtc {
        found: (i32, i32),
        expected: (i32, i32),
    },
    #[error("they were measured on kernels of another version of gemmule")]
    Kernels,
    #[error("{what} is {found}; expected {expected}")]
    Value {
        what: &'static str,
        found: String,
        expected: String,
    },
}

fn said(on: &TimedOn) -> String {
    let (major, minor) = on.capability;
    format!(
        "{} (capability {major}.{minor}, {} SMs)",
        shown(&on.card),
        on.sms
    )
}

/// Content of a file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    format: u32,
    /// Version of gemmule, for information only.
    gemmule: String,
    kernels: String,
    on: TimedOn,
    /// SHA-256 of all other values, in hexadecimal.
    checksum: String,
    /// For each kernel symbol, pairs of a number of rows and the time of a launch in microseconds.
    timings: BTreeMap<String, Vec<(u64, f64)>>,
}

/// The format version alone; other fields are ignored.
#[derive(Deserialize)]
struct Versioned {
    format: u32,
}

/// Serializes timings as the content of a file. Equal timings give equal bytes.
pub fn timings_to_ron(timings: &Timings, on: &TimedOn) -> Result<String, TimingsError> {
    let mut document = Document {
        format: FORMAT,
        gemmule: env!("CARGO_PKG_VERSION").to_owned(),
        kernels: KERNELS.to_owned(),
        on: on.clone(),
        checksum: String::new(),
        timings: timings.by_symbol().clone(),
    };
    document.checksum = document.sum()?;
    let pretty = ron::ser::PrettyConfig::new().depth_limit(2);
    let text = ron::ser::to_string_pretty(&document, pretty)
        .map_err(|e| TimingsError::Syntax(e.to_string()))?;
    Ok(format!(
        "// Microseconds that kernels took in a program, by rows. gemmule's cost model is corrected by them.\n{text}\n"
    ))
}

/// Parses the content of a file into timings and the card they were measured on.
pub fn parse_timings(bytes: &[u8]) -> Result<(Timings, TimedOn), TimingsError> {
    let text = std::str::from_utf8(bytes).map_err(|e| TimingsError::Syntax(e.to_string()))?;
    let document = ron::from_str::<Document>(text).map_err(|error| {
        // For a file of another version, report the version instead of its unknown fields.
        match ron::from_str::<Versioned>(text) {
            Ok(Versioned { format }) if format != FORMAT => TimingsError::Format { found: format },
            _ => TimingsError::Syntax(shown(&error.to_string())),
        }
    })?;
    if document.format != FORMAT {
        return Err(TimingsError::Format {
            found: document.format,
        });
    }
    if document.checksum != document.sum()? {
        return Err(TimingsError::Checksum);
    }
    if document.kernels != KERNELS {
        return Err(TimingsError::Kernels);
    }
    check_name("the name of their card", &document.on.card)?;
    let mut timings = Timings::default();
    for (symbol, timed) in &document.timings {
        check_name("the name of a kernel", symbol)?;
        if timed.len() > MAX_TIMED {
            return Err(TimingsError::Value {
                what: "the number of timings of a kernel",
                found: timed.len().to_string(),
                expected: format!("at most {MAX_TIMED}"),
            });
        }
        for &(rows, us) in timed {
            if !POSSIBLE_US.contains(&us) || rows == 0 {
                return Err(TimingsError::Value {
                    what: "a timing",
                    found: format!("{us} µs for {rows} rows"),
                    expected: "0.001 µs to 1,000 s, for at least one row".to_owned(),
                });
            }
            timings.add(symbol, rows, us);
        }
    }
    Ok((timings, document.on))
}

impl Document {
    fn sum(&self) -> Result<String, TimingsError> {
        // Hash the parsed values after serializing them again. The checksum then does not depend on the layout of the file.
        let all = (
            self.format,
            &self.gemmule,
            &self.kernels,
            &self.on,
            &self.timings,
        );
        let text = ron::to_string(&all).map_err(|e| TimingsError::Syntax(e.to_string()))?;
        Ok(hex(&Sha256::digest(text)))
    }
}

/// Checks that timings measured on `found` apply to `expected`.
pub(super) fn check_on(found: &TimedOn, expected: &TimedOn) -> Result<(), TimingsError> {
    let without_nvrtc = |on: &TimedOn| (on.card.clone(), on.capability, on.sms);
    if without_nvrtc(found) != without_nvrtc(expected) {
        return Err(TimingsError::Card {
            found: found.clone(),
            expected: expected.clone(),
        });
    }
    match found.nvrtc == expected.nvrtc {
        true => Ok(()),
        false => Err(TimingsError::Nvrtc {
            found: found.nvrtc,
            expected: expected.nvrtc,
        }),
    }
}

/// Checks that a name from a file can be shown in an error message: it is short and has no control characters.
fn check_name(what: &'static str, name: &str) -> Result<(), TimingsError> {
    match name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
        false => Ok(()),
        true => Err(TimingsError::Value {
            what,
            found: format!("`{}`", shown(name)),
            expected: format!("1 to {MAX_NAME} bytes without control characters"),
        }),
    }
}

/// Truncates text of a file for an error message, and replaces control characters.
fn shown(text: &str) -> String {
    const MAX: usize = 160;
    let plain = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    let mut shown: String = text.chars().take(MAX).map(plain).collect();
    if text.chars().nth(MAX).is_some() {
        shown.push('…');
    }
    shown
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on() -> TimedOn {
        TimedOn {
            card: "Card".to_owned(),
            capability: (9, 0),
            sms: 20,
            nvrtc: (13, 0),
        }
    }

    fn timings() -> Timings {
        let mut timings = Timings::default();
        timings.add("gemm_f16_n768_k768_wgmma128x128", 1024, 9.25);
        timings.add("gemm_f16_n768_k768_wgmma128x128", 256, 4.5);
        timings
    }

    #[test]
    fn a_file_reads_back_as_it_was_written() {
        let text = timings_to_ron(&timings(), &on()).expect("a text");
        let (read, found) = parse_timings(text.as_bytes()).expect("it reads back");
        assert_eq!((read, found), (timings(), on()));
    }

    #[test]
    fn invalid_and_foreign_files_are_refused_with_the_reason() {
        let text = timings_to_ron(&timings(), &on()).expect("a text");
        let refused = |text: &str| {
            parse_timings(text.as_bytes())
                .expect_err("refused")
                .to_string()
        };
        insta::assert_snapshot!(refused("(format: 7)"), @"their format is 7, this version of gemmule reads format 1");
        insta::assert_snapshot!(refused(&text.replace("9.25", "0.25")), @"their checksum does not match: they were damaged, or changed by hand");
        assert!(refused("no RON").starts_with("they are not RON in gemmule's format"));
        let other = TimedOn { sms: 10, ..on() };
        insta::assert_snapshot!(check_on(&other, &on()).expect_err("refused"), @"they were measured on Card (capability 9.0, 10 SMs), and this is Card (capability 9.0, 20 SMs)");
        let other = TimedOn {
            nvrtc: (12, 8),
            ..on()
        };
        insta::assert_snapshot!(check_on(&other, &on()).expect_err("refused"), @"they were measured with NVRTC 12.8, and this is 13.0");
        let document = |timings: &[(u64, f64)]| {
            let mut document = Document {
                format: FORMAT,
                gemmule: "0".to_owned(),
                kernels: KERNELS.to_owned(),
                on: on(),
                checksum: String::new(),
                timings: [("k".to_owned(), timings.to_vec())].into(),
            };
            document.checksum = document.sum().expect("a sum");
            ron::to_string(&document).expect("a text")
        };
        insta::assert_snapshot!(refused(&document(&[(8, -1.0)])), @"a timing is -1 µs for 8 rows; expected 0.001 µs to 1,000 s, for at least one row");
        insta::assert_snapshot!(refused(&document(&[(0, 1.0)])), @"a timing is 1 µs for 0 rows; expected 0.001 µs to 1,000 s, for at least one row");
    }
}
