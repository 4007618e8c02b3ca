//! The ledger `snapshots/gpu.ron`, which records the kernel sources that have run on a GPU.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use miette::{IntoDiagnostic, Report, WrapErr};
use serde::{Deserialize, Serialize};

use crate::{
    files::{self, Kind, ReadError},
    jit::Source,
};

/// Contents of the ledger.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Ledger {
    /// Results by symbol.
    pub(super) checked: BTreeMap<String, Checked>,
    /// Reasons why sources have not run yet, by symbol.
    #[serde(default)]
    pub(super) deferred: BTreeMap<String, String>,
}

/// A source that has run, with results that agree with its reference.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Checked {
    /// Digest of the source, from [`Source::digest`].
    pub(super) sha256: String,
    pub(super) card: String,
    /// UTC date of the run.
    pub(super) date: String,
    /// Max difference from the reference over all cases.
    pub(super) max_error: f32,
}

impl Ledger {
    /// Reads the ledger. Returns an empty ledger if there is no file.
    fn read(file: &Path) -> Result<Self, Report> {
        let text = match files::text(file, Kind::Ledger) {
            Err(ReadError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Self::default());
            }
            text => text
                .into_diagnostic()
                .wrap_err_with(|| format!("cannot read the ledger `{}`", file.display()))?,
        };
        ron::from_str(&text)
            .into_diagnostic()
            .wrap_err_with(|| format!("`{}` is not a ledger; leave --changed out", file.display()))
    }

    /// Reads the ledger, and keeps only the results of sources that have not changed.
    pub(super) fn still_true(file: &Path, sources: &[Source]) -> Result<Self, Report> {
        let mut checked = Self::read(file)?.checked;
        let digests: HashMap<&str, String> = sources
            .iter()
            .map(|source| (source.symbol.as_str(), source.digest()))
            .collect();
        checked.retain(|symbol, checked| digests.get(symbol.as_str()) == Some(&checked.sha256));
        Ok(Self {
            checked,
            deferred: BTreeMap::new(),
        })
    }

    pub(super) fn write(&self, file: &Path) -> Result<(), Report> {
        let config = ron::ser::PrettyConfig::new().depth_limit(2);
        let text = ron::ser::to_string_pretty(self, config)
            .into_diagnostic()
            .wrap_err("the ledger cannot be written as RON")?;
        if let Some(folder) = file.parent() {
            std::fs::create_dir_all(folder).into_diagnostic()?;
        }
        super::write_file(
            file,
            format!("// Written by `gemmule kernels check --record`.\n{text}\n").as_bytes(),
        )
    }
}

/// Returns the UTC date as YYYY-MM-DD.
pub(super) fn today() -> String {
    jiff::Timestamp::now().strftime("%F").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(symbol: &str, text: &str) -> Source {
        Source {
            symbol: symbol.to_owned(),
            text: text.to_owned(),
        }
    }

    fn checked(text: &str) -> Checked {
        Checked {
            sha256: source("", text).digest(),
            card: "a card".to_owned(),
            date: "2026-11-21".to_owned(),
            max_error: 0.25,
        }
    }

    #[test]
    fn results_are_kept_while_their_source_is_unchanged() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("gpu.ron");
        let sources = [
            source("same", "a"),
            source("changed", "b"),
            source("new", "c"),
        ];
        let none = Ledger::still_true(&file, &sources).expect("no file is an empty ledger");
        assert!(none.checked.is_empty());

        let mut ledger = Ledger::default();
        for (symbol, text) in [("same", "a"), ("changed", "before"), ("gone", "d")] {
            ledger.checked.insert(symbol.to_owned(), checked(text));
        }
        ledger
            .deferred
            .insert("new".to_owned(), "not run".to_owned());
        ledger.write(&file).expect("it is written");
        let held = Ledger::still_true(&file, &sources).expect("it is read");
        assert_eq!(held.checked.keys().collect::<Vec<_>>(), ["same"]);
        assert_eq!(held.checked["same"].max_error, 0.25);
        assert!(held.deferred.is_empty());
    }

    #[test]
    fn a_file_that_is_not_a_ledger_is_an_error_with_its_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("gpu.ron");
        std::fs::write(&file, "(checked: 3)").expect("it is written");
        let error = Ledger::still_true(&file, &[]).expect_err("it is no ledger");
        let text = error.to_string();
        assert!(
            text.contains("gpu.ron` is not a ledger; leave --changed out"),
            "{text}"
        );
    }
}
