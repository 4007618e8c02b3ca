//! The record of compiled sources, `snapshots/compiled.ron`. Tests do not compile sources whose current form is in the record.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use gemmule::{
    codegen::canonical,
    jit::{Source, Target, options},
    measure::Emitted,
};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The kernels whose sources have compiled without spills for every target that has their instructions.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Version of NVRTC. Another version may refuse a source that this version compiles.
    pub nvrtc: (i32, i32),
    /// The targets for which sources were compiled.
    pub targets: Vec<Target>,
    /// For each symbol, the [`digest`] of the input to NVRTC.
    pub compiled: BTreeMap<String, String>,
}

fn file() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("snapshots/compiled.ron")
}

impl Record {
    /// Reads the record, or returns the reason why it cannot be read.
    pub fn read() -> Result<Self, String> {
        let text = std::fs::read_to_string(file()).map_err(|e| e.to_string());
        let record = text.and_then(|text| ron::from_str(&text).map_err(|e| e.to_string()));
        record.map_err(|problem| {
            format!("snapshots/compiled.ron: {problem}; `GEMMULE_RECORD=1 cargo test --test kernels sources::` writes it anew")
        })
    }

    /// Returns the record after all of `sources` have compiled. `sources` are the sources of `emitted`.
    pub fn of(nvrtc: (i32, i32), emitted: &[Emitted], sources: &[Source]) -> Self {
        let compiled = emitted.par_iter().zip(sources);
        Self {
            nvrtc,
            targets: Target::ALL.to_vec(),
            compiled: compiled
                .map(|(e, s)| (s.symbol.clone(), digest(s, &targets(e), nvrtc)))
                .collect(),
        }
    }

    /// Returns the sources in `now` that have not been compiled in their current form.
    pub fn missing<'a>(&self, now: &'a Record) -> BTreeSet<&'a str> {
        let same_compiler = (self.nvrtc, &self.targets) == (now.nvrtc, &now.targets);
        let compiled =
            |symbol: &str, digest: &str| self.compiled.get(symbol).is_some_and(|d| d == digest);
        let missing = now.compiled.iter();
        missing
            .filter(|&(symbol, digest)| !(same_compiler && compiled(symbol, digest)))
            .map(|(symbol, _)| symbol.as_str())
            .collect()
    }

    pub fn write(&self) {
        std::fs::write(file(), self.to_text()).expect("the folder is there");
    }

    fn to_text(&self) -> String {
        let config = ron::ser::PrettyConfig::new().compact_arrays(true);
        let text = ron::ser::to_string_pretty(self, config).expect("names and numbers");
        format!("// Written by `GEMMULE_RECORD=1 cargo test --test kernels sources::`.\n{text}\n")
    }
}

/// Returns the targets that support the instructions of a kernel.
pub fn targets(of: &Emitted) -> Vec<Target> {
    let needed = of.kernel.as_kernel().instructions();
    let all = Target::ALL.into_iter();
    all.filter(|target| target.has(needed)).collect()
}

/// Returns the first 16 hexadecimal digits of the SHA-256 of the input to NVRTC: the canonical text, and the options for each target.
fn digest(source: &Source, targets: &[Target], nvrtc: (i32, i32)) -> String {
    let mut hash = Sha256::new();
    hash.update(canonical(&source.text));
    for &target in targets {
        hash.update([0]);
        hash.update(options(target, nvrtc).join(" "));
    }
    let digest = hash.finalize();
    digest[..8].iter().map(|b| format!("{b:02x}")).collect()
}

fn record_of(compiled: &[(&str, &str)]) -> Record {
    let owned = |&(symbol, digest): &(&str, &str)| (symbol.to_owned(), digest.to_owned());
    Record {
        nvrtc: (13, 0),
        targets: vec![Target::Sm80, Target::Sm90a],
        compiled: compiled.iter().map(owned).collect(),
    }
}

#[test]
fn what_is_new_or_changed_is_missing_and_all_is_for_another_compiler() {
    let before = record_of(&[("changed", "1"), ("gone", "2"), ("same", "3")]);
    let mut now = record_of(&[("changed", "9"), ("new", "4"), ("same", "3")]);
    assert_eq!(before.missing(&now), BTreeSet::from(["changed", "new"]));
    let all = BTreeSet::from(["changed", "new", "same"]);
    now.nvrtc = (13, 1);
    assert_eq!(before.missing(&now), all);
    now.nvrtc = before.nvrtc;
    now.targets.push(Target::Sm120);
    assert_eq!(before.missing(&now), all);
}

#[test]
fn a_digest_is_of_text_targets_and_options() {
    let source = |text: &str| Source {
        symbol: "k".to_owned(),
        text: text.to_owned(),
    };
    let all = [Target::Sm80, Target::Sm90a];
    let digests = [
        digest(&source("a"), &all, (13, 0)),
        digest(&source("b"), &all, (13, 0)),
        digest(&source("a"), &all[1..], (13, 0)),
        // NVRTC 12.3 lacks the option `--minimal`, so the options differ.
        digest(&source("a"), &all, (12, 3)),
    ];
    assert_eq!(BTreeSet::from(digests.clone()).len(), digests.len());
    assert_eq!(digest(&source("a"), &all, (13, 1)), digests[0]);
}

#[test]
fn a_record_is_written_sorted_with_a_line_for_each_source() {
    let record = record_of(&[("b", "2"), ("a", "1")]);
    let text = record.to_text();
    insta::assert_snapshot!(text, @r#"
    // Written by `GEMMULE_RECORD=1 cargo test --test kernels sources::`.
    (
        nvrtc: (13, 0),
        targets: [sm_80, sm_90a],
        compiled: {
            "a": "1",
            "b": "2",
        },
    )
    "#);
    assert_eq!(ron::from_str::<Record>(&text), Ok(record));
}
