//! Sets of lengths that the benchmarks run on.

use std::path::{Path, PathBuf};

use miette::{IntoDiagnostic, Report, WrapErr, miette};
use serde::Deserialize;

use super::super::print;
use crate::{
    Batch, EngineError,
    files::{self, Kind},
    kernels::trial::uniform,
    names::nearest,
    runtime::batch::Limits,
    tensor::Extents,
};

/// The project's sets: mixed lengths up to a longest one, and single sequences.
const SHIPPED: &str = include_str!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/benches/workloads.json"
));

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Set {
    pub name: String,
    pub lens: Vec<u32>,
}

#[derive(Deserialize)]
struct Workloads {
    encoder: Vec<Set>,
}

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

impl Choice {
    /// The chosen sets; without a choice and without a file, those named in `usual`.
    pub(super) fn read(&self, usual: &[&str]) -> Result<Vec<Set>, Report> {
        let all = load(self.workloads.as_deref())?;
        let usual = || usual.iter().map(|&name| name.to_owned()).collect();
        let names = match (self.sets.is_empty(), &self.workloads) {
            (true, None) => usual(),
            _ => self.sets.clone(),
        };
        named(all, &names)
    }
}

impl Set {
    /// A batch of these lengths with ids drawn from the vocabulary, the same every time.
    pub(super) fn batch(&self, limits: &Limits) -> Result<Batch, EngineError> {
        let mut state = 1;
        let ids = (0..self.tokens())
            .map(|_| limits.token_id(uniform(&mut state)))
            .collect();
        Ok(Batch::from_packed(ids, &self.lens)?)
    }

    pub fn longest(&self) -> u32 {
        self.lens.iter().copied().max().unwrap_or(0)
    }

    pub fn tokens(&self) -> u64 {
        self.lens.iter().map(|&n| u64::from(n)).sum()
    }
}

/// The sets of a file, or the project's: `{"encoder": [{"name": …, "lens": […]}, …]}`.
pub(super) fn load(file: Option<&Path>) -> Result<Vec<Set>, Report> {
    let Some(file) = file else {
        return parse(SHIPPED);
    };
    let text = files::text(file, Kind::Batch).map_err(EngineError::from)?;
    parse(&text).wrap_err_with(|| {
        format!(
            "`{}` holds no sets of lengths; expected {{\"encoder\": [{{\"name\": …, \"lens\": […]}}, …]}}",
            file.display()
        )
    })
}

fn parse(text: &str) -> Result<Vec<Set>, Report> {
    let workloads: Workloads = serde_json::from_str(text).into_diagnostic()?;
    for set in &workloads.encoder {
        Extents::of(&set.lens)
            .into_diagnostic()
            .wrap_err_with(|| format!("the set `{}`", set.name))?;
    }
    if workloads.encoder.is_empty() {
        return Err(miette!("`encoder` is empty; expected at least one set"));
    }
    Ok(workloads.encoder)
}

/// The sets of these names, in the order of the file; all where there are no names.
pub(super) fn named(sets: Vec<Set>, names: &[String]) -> Result<Vec<Set>, Report> {
    let known = || sets.iter().map(|s| s.name.as_str());
    if let Some(name) = names.iter().find(|n| known().all(|k| k != n.as_str())) {
        let near = nearest(name, known())
            .map(|near| format!(" (did you mean `{near}`?)"))
            .unwrap_or_default();
        let all = known().collect::<Vec<_>>().join(", ");
        return Err(miette!("there is no set `{name}`{near}; there are {all}"));
    }
    let mut sets = sets;
    sets.retain(|set| names.is_empty() || names.contains(&set.name));
    Ok(sets)
}

/// The sets that a model's position table serves; a line is printed for each that it does not.
pub(super) fn served(mut sets: Vec<Set>, limits: &Limits) -> Result<Vec<Set>, Report> {
    let Some(limit) = limits.longest else {
        return Ok(sets);
    };
    for set in sets.iter().filter(|s| s.longest() > limit) {
        print(&format!(
            "{}: left out, as it has a sequence of {} tokens and the position table serves {limit}\n",
            set.name,
            set.longest()
        ))?;
    }
    sets.retain(|s| s.longest() <= limit);
    if sets.is_empty() {
        return Err(miette!(
            "no set is short enough for a position table of {limit}; choose others with --sets or --workloads, or sizes with a larger table"
        ));
    }
    Ok(sets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_sets_are_sound_and_found_by_name() {
        let sets = load(None).unwrap();
        assert!(sets.len() > 20);
        let chosen = named(sets, &["b16_m128".to_owned()]).unwrap();
        assert_eq!(chosen.len(), 1);
        assert_eq!((chosen[0].longest(), chosen[0].tokens()), (128, 1229));
    }

    #[test]
    fn an_unknown_set_names_the_nearest_and_all() {
        let error = named(load(None).unwrap(), &["b16_m129".to_owned()]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("`b16_m129` (did you mean `b16_m12"), "{text}");
        assert!(text.contains("b64_m256"), "{text}");
    }

    #[test]
    fn sets_without_tokens_are_refused_by_name() {
        for lens in ["[]", "[0]", "[4294967295, 4294967295]"] {
            let text = format!(r#"{{"encoder": [{{"name": "odd", "lens": {lens}}}]}}"#);
            assert!(format!("{:?}", parse(&text).unwrap_err()).contains("odd"));
        }
        for text in [
            "",
            "[]",
            "{}",
            r#"{"encoder": []}"#,
            r#"{"encoder": [{"lens": [1]}]}"#,
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
