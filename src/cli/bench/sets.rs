//! Sets of sequence lengths for benchmarks.

use std::path::Path;

use miette::{IntoDiagnostic, Report, WrapErr, miette};
use serde::Deserialize;

use crate::{
    Batch, EngineError,
    files::{self, Kind},
    kernels::trial::uniform,
    names::nearest,
    runtime::batch::Limits,
    tensor::Extents,
};

/// Built-in sets: sequences of mixed lengths up to a max length, and single sequences.
const SHIPPED: &str = include_str!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/benches/workloads.json"
));

/// A named list of sequence lengths.
#[derive(Clone, Debug, Deserialize)]
pub struct Set {
    pub name: String,
    pub lens: Vec<u32>,
}

#[derive(Deserialize)]
struct Workloads {
    encoder: Vec<Set>,
}

impl Set {
    /// Returns a batch of these lengths with pseudorandom token ids. The ids are the same at each call.
    pub fn batch(&self, limits: &Limits) -> Result<Batch, EngineError> {
        let mut state = 1;
        let ids = (0..self.tokens())
            .map(|_| limits.token_id(uniform(&mut state)))
            .collect();
        Ok(Batch::from_packed(ids, &self.lens)?.with_required_ends(limits))
    }

    /// Returns the length of the longest sequence.
    pub fn longest(&self) -> u32 {
        self.lens.iter().copied().max().unwrap_or(0)
    }

    /// Returns the total number of tokens.
    pub fn tokens(&self) -> u64 {
        self.lens.iter().map(|&n| u64::from(n)).sum()
    }
}

/// Reads the sets of a file, or the built-in sets: `{"encoder": [{"name": …, "lens": […]}, …]}`.
pub fn load(file: Option<&Path>) -> Result<Vec<Set>, Report> {
    let Some(file) = file else {
        return parse(SHIPPED);
    };
    let text = files::text(file, Kind::Batch).map_err(EngineError::from)?;
    parse(&text).wrap_err_with(|| {
        format!(
            "`{}` has no sets of lengths; expected {{\"encoder\": [{{\"name\": …, \"lens\": […]}}, …]}}",
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

/// Returns the sets with these names, in the order of the file. Returns all sets if `names` is empty.
pub fn named(sets: Vec<Set>, names: &[String]) -> Result<Vec<Set>, Report> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_sets_are_valid_and_found_by_name() {
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
