//! Tests of the ledger `snapshots/gpu.ron`, which lists the kernels that ran on a GPU, with digests of their sources. If a source changes,
//! the tests fail until the kernel runs on a GPU again.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use gemmule::jit::Source;
use rayon::prelude::*;
use serde::Deserialize;

use crate::catalogue::SOURCES;

#[derive(Deserialize)]
struct Ledger {
    checked: BTreeMap<String, Checked>,
    deferred: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Checked {
    sha256: String,
    card: String,
    max_error: f32,
}

#[test]
fn every_source_ran_on_a_gpu_as_it_is_now() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("snapshots/gpu.ron");
    let text = std::fs::read_to_string(&file).expect("the ledger is there");
    let ledger: Ledger = ron::from_str(&text).expect("the ledger is RON");
    let mut wrong = Vec::new();
    let mut symbols = BTreeSet::new();
    let digests: Vec<String> = SOURCES.par_iter().map(Source::digest).collect();
    for (source, digest) in SOURCES.iter().zip(digests) {
        match ledger.checked.get(&source.symbol) {
            Some(checked) if checked.sha256 == digest => {
                assert!(!checked.card.is_empty() && checked.max_error.is_finite());
            }
            _ if ledger
                .deferred
                .get(&source.symbol)
                .is_some_and(|reason| !reason.is_empty()) => {}
            Some(_) => wrong.push(format!("{} changed since it ran", source.symbol)),
            None => wrong.push(format!("{} never ran", source.symbol)),
        }
        symbols.insert(&source.symbol);
    }
    assert!(
        wrong.is_empty(),
        "{} sources are not as they ran on a GPU; run `gemmule kernels check --record` there:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    let gone: Vec<&String> = ledger
        .checked
        .keys()
        .filter(|s| !symbols.contains(*s))
        .collect();
    assert!(
        gone.is_empty(),
        "the ledger names kernels that are gone: {gone:?}"
    );
}
