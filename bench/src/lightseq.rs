//! LightSeq's figures 4 to 6, drawn from files of results. `gemmule bench generate --json` writes gemmule's results, and
//! `bench/scripts/decode_peers.py` writes those of other implementations. Both files have one object for each combination of a number of
//! sequences and a length.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::ExitCode,
};

use gemmule::cli::{Outcome, align_right, print, table, write_file};
use miette::{IntoDiagnostic, Report, WrapErr, miette};
use serde::Deserialize;

use crate::figure::{Figure, Kind, Series};

/// Our name in the figures.
const OURS: &str = "gemmule";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Files written by `gemmule bench generate --json`
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    ours: Vec<PathBuf>,
    /// Files written by `decode_peers.py --json`
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    peers: Vec<PathBuf>,
    /// Contender (implementation) that defines a speedup of 1 in figures 5 and 6; the paper uses
    /// TensorFlow and FasterTransformer
    #[arg(long, value_name = "CONTENDER", default_value = "generate")]
    baseline: String,
    /// Draw the figures into this folder
    #[arg(long, value_name = "DIR")]
    figures: Option<PathBuf>,
}

/// Times of one contender for one number of sequences and one length.
#[derive(Clone, Debug, Deserialize)]
struct Row {
    /// Name of the contender; `None` for gemmule.
    #[serde(default)]
    contender: Option<String>,
    batch: usize,
    prompt_tokens: usize,
    new: usize,
    /// Number of beams of a beam search; sampling has `top_k` and `top_p` instead.
    #[serde(default)]
    beams: Option<usize>,
    #[serde(default)]
    top_k: Option<usize>,
    #[serde(default)]
    top_p: Option<f64>,
    #[serde(default)]
    whole_ms: Option<f64>,
    /// Milliseconds by kernel class. Our results have the times of one step. Results of other implementations have the times of a whole
    /// generation.
    #[serde(default)]
    classes: Option<BTreeMap<String, f64>>,
    /// Reason for missing times.
    #[serde(default)]
    error: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum File {
    Ours(Vec<Row>),
    Peers { rows: Vec<Row> },
}

/// The work that contenders are compared on: the number of sequences, their lengths, and the way in which tokens are chosen.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    beams: Option<usize>,
    /// The k of top-k sampling, and the p of top-p sampling times 1000; 0 if not given.
    drawn: (usize, u32),
    length: (usize, usize),
    batch: usize,
}

impl Row {
    fn name(&self) -> &str {
        self.contender.as_deref().unwrap_or(OURS)
    }

    fn case(&self) -> Case {
        let p = self.top_p.map_or(0, |p| (p * 1000.0).round() as u32);
        Case {
            beams: self.beams,
            drawn: (self.top_k.unwrap_or(0), p),
            length: (self.prompt_tokens, self.new),
            batch: self.batch,
        }
    }
}

impl Case {
    /// Returns the label on the paper's axis: batch, length, and k and p for sampling.
    fn label(&self) -> String {
        let Self {
            beams,
            drawn: (k, p),
            length: (prompt, new),
            batch,
        } = self;
        let length = match prompt == new {
            true => format!("{new}"),
            false => format!("{prompt}+{new}"),
        };
        match beams {
            Some(_) => format!("({batch}, {length})"),
            None => format!("({batch}, {length}, {k}/{:.2})", f64::from(*p) / 1e3),
        }
    }
}

pub(crate) fn run(args: Args) -> Outcome {
    let mut rows = Vec::new();
    for file in args.ours.iter().chain(&args.peers) {
        rows.extend(read(file)?);
    }
    let all = [
        (4, "lightseq4.svg", occupation(&rows)),
        (5, "lightseq5.svg", speedups(&rows, &args.baseline, true)?),
        (6, "lightseq6.svg", speedups(&rows, &args.baseline, false)?),
    ];
    for (number, name, figure) in all {
        let Some(figure) = figure else {
            print(&format!("there are no results for figure {number}\n"))?;
            continue;
        };
        print(&format!("{}\n{}\n", summary(&figure), claim(number)))?;
        if let Some(folder) = &args.figures {
            let file = folder.join(name);
            write_file(&file, figure.svg()?.as_bytes())?;
            print(&format!("drawn in {}\n", file.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn read(file: &Path) -> Result<Vec<Row>, Report> {
    let text = std::fs::read_to_string(file).into_diagnostic();
    let text = text.wrap_err_with(|| format!("`{}` cannot be read", file.display()))?;
    let rows = match serde_json::from_str(&text) {
        Ok(File::Ours(rows) | File::Peers { rows }) => rows,
        Err(_) => {
            return Err(miette!(
                "`{}` was written neither by `gemmule bench generate --json` nor by decode_peers.py; expected a list of rows, or an object with `rows`",
                file.display()
            ));
        }
    };
    for row in rows.iter().filter(|row| row.error.is_some()) {
        let problem = row.error.as_deref().unwrap_or_default();
        print(&format!(
            "{} has no result for {}: {problem}\n",
            row.name(),
            row.case().label()
        ))?;
    }
    Ok(rows)
}

/// Returns the paper's claim about a figure.
const fn claim(figure: u32) -> &'static str {
    match figure {
        4 => {
            "The paper, on a T4: GEMMs take 87 % of a translation in f16 (82 % in f32), refreshing the cache 6 % (10 %); GEMMs of TensorFlow 25 %."
        }
        5 => {
            "The paper, on a P4 and a T4: faster than TensorFlow, PyTorch and, but for small batches, FasterTransformer; most at small batches and short sequences."
        }
        _ => {
            "The paper, on a T4: faster than FasterTransformer in most cases, most at small batches and short sequences, and by less than in translation."
        }
    }
}

/// Returns the contenders in order of appearance, ours first.
fn contenders<'r>(rows: &[&'r Row]) -> Vec<&'r str> {
    let mut names = vec![OURS];
    for row in rows {
        if !names.contains(&row.name()) {
            names.push(row.name());
        }
    }
    names
}

/// Returns figure 5 (`translates`) or figure 6: the speedup of each contender over the baseline, by batch and length.
fn speedups(rows: &[Row], baseline: &str, translates: bool) -> Result<Option<Figure>, Report> {
    let rows: Vec<&Row> = rows
        .iter()
        .filter(|row| row.beams.is_some() == translates && row.whole_ms.is_some())
        .collect();
    let of = |name: &str| -> BTreeMap<Case, f64> {
        let own = rows.iter().filter(|row| row.name() == name);
        own.filter_map(|row| Some((row.case(), row.whole_ms?)))
            .collect()
    };
    let slowest = of(baseline);
    let ours = of(OURS);
    if ours.is_empty() || rows.iter().all(|row| row.name() == OURS) {
        return Ok(None);
    }
    // Keep only cases that were measured for both the baseline and gemmule.
    let cases: Vec<&Case> = slowest
        .keys()
        .filter(|case| ours.contains_key(case))
        .collect();
    if cases.is_empty() {
        return Err(miette!(
            "`{baseline}` and ours have no batch and length in common; expected the same --batch, lengths and beams or top-k and top-p in both"
        ));
    }
    let series = contenders(&rows)
        .into_iter()
        .filter(|&name| name != baseline)
        .map(|name| {
            let own = of(name);
            let values = cases
                .iter()
                .map(|case| Some(slowest[case] / own.get(case)?));
            Series::new(name, values.collect())
        });
    let (what, axis) = match translates {
        true => (
            "Translation by beam search (LightSeq, figure 5)",
            "batch, length",
        ),
        false => (
            "Generation by sampling (LightSeq, figure 6)",
            "batch, length, top-k/top-p",
        ),
    };
    Ok(Some(Figure {
        title: what.to_owned(),
        x_label: axis.to_owned(),
        y_label: format!("speedup over `{baseline}`"),
        groups: cases.iter().map(|case| case.label()).collect(),
        series: series.collect(),
        kind: Kind::Bars,
        log_y: false,
    }))
}

/// The parts of each bar in LightSeq's figure 4. The time of a part is the sum of the times of the listed kernel classes.
const PARTS: [(&str, &[&str]); 4] = [
    ("GEMM", &["GEMM"]),
    ("attention", &["attention", "softmax"]),
    ("copies and gathers", &["copies"]),
    ("choosing and others", &["LayerNorm", "choosing", "other"]),
];

/// Returns figure 4: for each translation, the percentages of the kernels' time that [`PARTS`] take. Returns `None` without such times.
fn occupation(rows: &[Row]) -> Option<Figure> {
    let measured: Vec<(&Row, &BTreeMap<String, f64>)> = rows
        .iter()
        .filter(|row| row.beams.is_some())
        .filter_map(|row| Some((row, row.classes.as_ref()?)))
        .filter(|(_, classes)| classes.values().sum::<f64>() > 0.0)
        .collect();
    let batches: BTreeSet<Case> = measured.iter().map(|(row, _)| row.case()).collect();
    let mut bars = Vec::new();
    for case in batches {
        bars.extend(measured.iter().filter(|(row, _)| row.case() == case));
    }
    let share = |classes: &BTreeMap<String, f64>, of: &[&str]| {
        let times = of.iter().filter_map(|&class| classes.get(class));
        let sum = times.fold(0.0, |sum, ms| sum + ms);
        100.0 * sum / classes.values().sum::<f64>()
    };
    let series = PARTS.map(|(name, of)| {
        let values = bars.iter().map(|(_, classes)| Some(share(classes, of)));
        Series::new(name, values.collect())
    });
    (!bars.is_empty()).then(|| Figure {
        title: "Breakdown of a translation's time (LightSeq, figure 4)".to_owned(),
        x_label: "contender, batch and length".to_owned(),
        y_label: "% of the kernels' time".to_owned(),
        groups: bars
            .iter()
            .map(|(row, _)| format!("{} {}", row.name(), row.case().label()))
            .collect(),
        series: series.into(),
        kind: Kind::Stacked,
        log_y: false,
    })
}

/// Returns a figure's values as a table.
fn summary(figure: &Figure) -> String {
    let names = figure.series.iter().map(|series| series.name.as_str());
    let header: Vec<&str> = [figure.x_label.as_str()].into_iter().chain(names).collect();
    let mut rows = table(&header);
    for (at, group) in figure.groups.iter().enumerate() {
        let values = figure.series.iter().map(|series| match series.values[at] {
            Some(value) => format!("{value:.2}"),
            None => "–".to_owned(),
        });
        rows.add_row([group.clone()].into_iter().chain(values));
    }
    align_right(&mut rows, 1..header.len());
    format!("{}: {}\n{rows}", figure.title, figure.y_label)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rows(value: serde_json::Value) -> Vec<Row> {
        match serde_json::from_value(value).expect("rows") {
            File::Ours(rows) | File::Peers { rows } => rows,
        }
    }

    fn measured() -> Vec<Row> {
        let mut all = rows(json!([
            {"batch": 8, "prompt_tokens": 64, "new": 64, "beams": 4, "whole_ms": 10.0, "step_ms": 0.15,
             "classes": {"GEMM": 0.06, "attention": 0.03, "softmax": 0.0, "LayerNorm": 0.0, "other": 0.01, "choosing": 0.02}},
            {"batch": 1, "prompt_tokens": 64, "new": 64, "beams": 4, "whole_ms": 8.0, "step_ms": 0.12},
            {"batch": 1, "prompt_tokens": 32, "new": 128, "top_k": 50, "top_p": 0.9, "whole_ms": 30.0, "step_ms": 0.2},
        ]));
        all.extend(rows(json!({"torch": "2", "device": "a card", "rows": [
            {"task": "translator", "contender": "generate", "batch": 1, "prompt_tokens": 64, "new": 64, "beams": 4, "whole_ms": 400.0},
            {"task": "translator", "contender": "generate", "batch": 8, "prompt_tokens": 64, "new": 64, "beams": 4, "whole_ms": 420.0},
            {"task": "translator", "contender": "compiled", "batch": 8, "prompt_tokens": 64, "new": 64, "beams": 4, "whole_ms": 42.0,
             "classes": {"GEMM": 5.0, "attention": 2.0, "copies": 2.0, "other": 1.0}},
            {"task": "translator", "contender": "ct2", "batch": 8, "prompt_tokens": 64, "new": 64, "beams": 4, "error": "ImportError: none"},
            {"task": "writer", "contender": "generate", "batch": 1, "prompt_tokens": 32, "new": 128, "top_k": 50, "top_p": 0.9, "whole_ms": 900.0},
        ]})));
        all
    }

    #[test]
    fn figures_are_of_what_both_sides_measured() {
        let rows = measured();
        let figures = [
            occupation(&rows),
            speedups(&rows, "generate", true).expect("a figure"),
            speedups(&rows, "generate", false).expect("a figure"),
        ];
        let figures = figures.map(|figure| figure.expect("it was measured"));
        for figure in &figures {
            figure.svg().expect("it can be drawn");
        }
        insta::assert_snapshot!(figures.map(|figure| summary(&figure)).join("\n\n"));
    }

    #[test]
    fn missing_comparisons_are_reported() {
        let rows = measured();
        let refused = speedups(&rows, "ct2", true).expect_err("an error");
        insta::assert_snapshot!(refused, @"`ct2` and ours have no batch and length in common; expected the same --batch, lengths and beams or top-k and top-p in both");
        let ours: Vec<Row> = rows
            .into_iter()
            .filter(|row| row.contender.is_none())
            .collect();
        assert!(
            speedups(&ours, "generate", true)
                .expect("no error")
                .is_none()
        );
    }
}
