//! Runs the functions of the fuzz targets briefly, on their seeds and on seeds with random changes. `docs/fuzzing.md` describes long runs
//! with libFuzzer.

#[path = "../../fuzz/src/lib.rs"]
mod targets;

use std::{fs, path::Path};

use gemmule::kernels::trial::uniform;

/// Number of randomly changed seeds per target.
const CHANGED: u64 = 600;

/// Reads the initial inputs of a target from `fuzz/seeds`.
fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds");
    let files = fs::read_dir(folder.join(target)).expect("the target has seeds");
    let mut files: Vec<_> = files.map(|file| file.expect("an entry").path()).collect();
    files.sort_unstable();
    let read = |file| fs::read(file).expect("it is readable");
    files.iter().map(read).collect()
}

/// Applies one to four random changes: flips a bit, removes some bytes, appends a copy of some bytes, or replaces some bytes.
fn change(bytes: &mut Vec<u8>, state: &mut u64) {
    let mut below = |n: usize| (uniform(state) % n.max(1) as u64) as usize;
    for _ in 0..=below(4) {
        let at = below(bytes.len());
        let end = (at + below(16)).min(bytes.len());
        match below(4) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << below(8),
            1 => drop(bytes.drain(at..end)),
            2 => bytes.extend_from_within(at..end),
            _ => drop(bytes.splice(at..end, *br#""0,]}({:"#)),
        }
    }
}

/// Runs a target on its seeds and on [`CHANGED`] randomly changed seeds.
fn run(seeds: &[Vec<u8>], target: impl Fn(&[u8])) {
    assert!(!seeds.is_empty());
    seeds.iter().for_each(|seed| target(seed));
    let mut state = 1;
    for _ in 0..CHANGED {
        let mut bytes = seeds[uniform(&mut state) as usize % seeds.len()].clone();
        change(&mut bytes, &mut state);
        target(&bytes);
    }
}

fn run_text(seeds: &[Vec<u8>], target: impl Fn(&str)) {
    run(seeds, |bytes| {
        if let Ok(text) = std::str::from_utf8(bytes) {
            target(text);
        }
    });
}

#[test]
fn artifacts_are_planned_or_refused() {
    run(&targets::artifact::seeds(), targets::artifact::run);
}

#[test]
fn bodies_are_answered_as_documented() {
    run(&seeds("bodies"), targets::bodies::run);
}

#[test]
fn checkpoints_are_read_or_refused() {
    run(&seeds("checkpoint"), targets::checkpoint::run);
}

#[test]
fn configs_are_built_or_refused() {
    run(&seeds("config"), |text| {
        targets::config::run(text);
    });
}

#[test]
fn descriptions_are_built_or_refused() {
    run_text(&seeds("description"), targets::description::run);
}

#[test]
fn folders_of_writers_are_read_or_refused() {
    run(&seeds("generation"), targets::generation::run);
}

#[test]
fn token_ids_are_a_batch_or_refused() {
    run_text(&seeds("ids"), targets::ids::run);
}

#[test]
fn timings_are_read_or_refused() {
    run(&seeds("timings"), targets::timings::run);
}

#[test]
fn tokenizers_are_loaded_or_refused() {
    gemmule::cli::silence_contained_panics();
    run_text(&seeds("tokenizer"), targets::tokenizer::run);
}
