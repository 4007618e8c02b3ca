//! Sets of lengths, which the benchmarks of whole models run on.

use std::path::{Path, PathBuf};

use miette::{IntoDiagnostic, Report, WrapErr, miette};
use serde::Deserialize;

use super::super::print;
use crate::{Batch, EngineError, kernels::trial::uniform, runtime::batch::Limits};

/// The sets that the project is measured on.
const SHIPPED: &str = include_str!("../../../benches/workloads.json");

/// Which sets a benchmark runs.
#[derive(clap::Args)]
pub(super) struct Choice {
    /// Sets of lengths as JSON: {"encoder": [{"name": …, "lens": […]}, …]}; the project's own
    /// otherwise
    #[arg(long, value_name = "FILE")]
    workloads: Option<PathBuf>,
    /// Names of the sets to time; those of the paper's figure, or all of FILE, otherwise
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    sets: Vec<String>,
}

#[derive(Deserialize)]
struct Workloads {
    encoder: Vec<Set>,
}

/// Lengths of the sequences of one batch.
#[derive(Deserialize)]
pub(super) struct Set {
    pub name: String,
    lens: Vec<u32>,
}

impl Choice {
    /// The chosen sets; without a choice and without a file, those named in `usual`.
    pub(super) fn read(&self, usual: &[&str]) -> Result<Vec<Set>, Report> {
        let (text, from) = match &self.workloads {
            Some(file) => (read(file)?, file.display().to_string()),
            None => (SHIPPED.to_owned(), "benches/workloads.json".to_owned()),
        };
        let Workloads { encoder: mut all } = serde_json::from_str(&text)
            .into_diagnostic()
            .wrap_err_with(|| {
                format!(
                    "`{from}` holds no sets of lengths; expected {{\"encoder\": [{{\"name\": …, \"lens\": […]}}, …]}}"
                )
            })?;
        let wanted: Vec<&str> = match (self.sets.is_empty(), &self.workloads) {
            (false, _) => self.sets.iter().map(String::as_str).collect(),
            (true, None) => usual.to_vec(),
            (true, Some(_)) => return Ok(all),
        };
        if let Some(name) = wanted.iter().find(|&w| all.iter().all(|s| s.name != *w)) {
            let known: Vec<&str> = all.iter().map(|s| s.name.as_str()).collect();
            return Err(miette!(
                "`{from}` has no set `{name}`; it has {}",
                known.join(", ")
            ));
        }
        all.retain(|s| wanted.contains(&s.name.as_str()));
        Ok(all)
    }
}

fn read(file: &Path) -> Result<String, EngineError> {
    std::fs::read_to_string(file).map_err(|source| EngineError::Read {
        file: file.to_owned(),
        source,
    })
}

impl Set {
    /// A batch of these lengths with ids drawn from the vocabulary, the same every time.
    pub(super) fn batch(&self, limits: &Limits) -> Result<Batch, EngineError> {
        let mut state = 1;
        let tokens: u64 = self.lens.iter().map(|&n| u64::from(n)).sum();
        let vocabulary = u64::from(limits.vocabulary.max(1));
        let ids = (0..tokens)
            .map(|_| (uniform(&mut state) % vocabulary) as u32)
            .collect();
        Ok(Batch::from_packed(ids, &self.lens)?)
    }
}

/// The sets that a model's position table serves; a line is printed for each that it does not.
pub(super) fn served(mut sets: Vec<Set>, limits: &Limits) -> Result<Vec<Set>, Report> {
    let Some(limit) = limits.longest else {
        return Ok(sets);
    };
    let longest = |set: &Set| set.lens.iter().copied().max().unwrap_or(0);
    for set in sets.iter().filter(|s| longest(s) > limit) {
        print(&format!(
            "{}: left out, as it has a sequence of {} tokens and the position table serves {limit}\n",
            set.name,
            longest(set)
        ))?;
    }
    sets.retain(|s| longest(s) <= limit);
    if sets.is_empty() {
        return Err(miette!(
            "no set is short enough for a position table of {limit}; choose others with --sets or --workloads, or sizes with a larger table"
        ));
    }
    Ok(sets)
}
