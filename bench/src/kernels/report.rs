//! Results as rows, as a table and as the papers' figures.

use gemmule::{
    DType,
    cli::{align_right, print, table},
    runtime::cuda::Lap,
};
use miette::Report;
use serde::Serialize;

use super::problem::{Contender, Problem, Task, Work};
use crate::{
    figure::{Figure, Kind, Series},
    launched::ChosenBy,
    peers::PeerTime,
};

/// Accepted difference for each rounding of an intermediate result, in ulps of 1. Unfused launches round the result of every launch except
/// the last to the storage type. A fused launch does not round these intermediate results. Values are at most 4 in magnitude, so the error
/// of a rounding is below 4 ulps of 1.
const ALLOWED_IN_PIECES: f32 = 4.0;
/// Maximum length in the figure of short sequences (ByteTransformer III.E).
const SHORT: u32 = 384;

/// Result of one of our variants, or of one peer, on one shape.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub op: &'static str,
    pub shape: String,
    pub who: String,
    /// Whether this is a peer rather than one of our kernels.
    pub peer: bool,
    pub us: f64,
    pub rate: f64,
    pub unit: &'static str,
    /// Whether a model launches this kernel.
    pub picked: bool,
    /// Whether the cost model, timings or a rule selected this kernel; `None` if a model does not launch it.
    pub chosen_by: Option<ChosenBy>,
    /// Time of the fastest peer divided by the time of this row.
    pub ratio_to_best_peer: Option<f64>,
    /// Max difference from the result of the selected kernel; `None` for peers, which have other inputs.
    pub max_difference: Option<f32>,
    pub agrees: Option<bool>,
    /// Index of the problem.
    #[serde(skip)]
    pub problem: usize,
}

/// Returns whether a peer computes only a part of the task. Such a peer is shown but not used for comparisons.
fn does_less(who: &str) -> bool {
    who.ends_with("product only")
}

/// Returns one row per contender and peer, in the order of the problems.
pub(super) fn rows(
    problems: &[Problem],
    laps: &[Vec<Lap>],
    peers: &[PeerTime],
    dtype: DType,
) -> Vec<Row> {
    let mut rows = Vec::new();
    for (at, (problem, laps)) in problems.iter().zip(laps).enumerate() {
        let work = problem.task.work(dtype);
        let of_peers = || peers.iter().filter(|p| p.item == at);
        let best_peer = of_peers()
            .filter(|p| !does_less(&p.who))
            .map(|p| p.us)
            .min_by(f64::total_cmp);
        let row = |who: String, us: f64| Row {
            op: problem.task.op(),
            shape: problem.task.to_string(),
            who,
            peer: true,
            us,
            rate: work.rate(us),
            unit: work.unit(),
            picked: false,
            chosen_by: None,
            ratio_to_best_peer: best_peer.map(|best| best / us),
            max_difference: None,
            agrees: None,
            problem: at,
        };
        rows.extend(problem.contenders.iter().zip(laps).map(|(ours, lap)| {
            Row {
                peer: false,
                picked: ours.picked,
                chosen_by: ours.chosen_by,
                max_difference: lap.difference.map(|d| d.max),
                agrees: lap
                    .difference
                    .map(|d| d.worst <= 1.0 || d.max <= of_pieces(ours, dtype)),
                ..row(ours.label.to_owned(), lap.us)
            }
        }));
        rows.extend(of_peers().map(|p| row(p.who.clone(), p.us)));
    }
    rows
}

/// Returns the max difference from the result of the selected kernel that is always accepted, even if it exceeds that kernel's tolerance.
/// It is 0 for a contender with one launch and grows with the number of launches.
fn of_pieces(contender: &Contender, dtype: DType) -> f32 {
    let unit = dtype.epsilon();
    let rounded = contender.chain.launches.len().saturating_sub(1);
    ALLOWED_IN_PIECES * unit * rounded as f32
}

/// Prints a line per problem, or a line per row if `all` is set.
pub(super) fn show(rows: &[Row], all: bool) -> Result<(), Report> {
    let text = if all { every_row(rows) } else { summary(rows) };
    print(&format!("{text}\n"))?;
    for row in rows.iter().filter(|r| r.agrees == Some(false)) {
        print(&format!(
            "{} {}: the result of `{}` differs from that of the picked kernel by up to {:.1e}\n",
            row.op,
            row.shape,
            row.who,
            row.max_difference.unwrap_or_default()
        ))?;
    }
    Ok(())
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "—".to_owned())
}

fn ratio(row: &Row) -> String {
    or_dash(row.ratio_to_best_peer.map(|r| format!("{r:.2}")))
}

/// Returns the mark in the table for a kernel that a model launches.
fn picked_by(by: ChosenBy) -> &'static str {
    match by {
        ChosenBy::CostModel => "picked: cost model",
        ChosenBy::Timings => "picked: timings",
        ChosenBy::Rule => "picked: rule",
    }
}

fn every_row(rows: &[Row]) -> comfy_table::Table {
    let mut shown = table(&["op", "shape", "who", "us", "rate", "", "ratio", ""]);
    for row in rows {
        let mark = match (row.agrees, row.picked, row.peer) {
            (Some(false), ..) => "differs",
            (_, true, _) => row.chosen_by.map_or("picked", picked_by),
            (_, _, true) => "peer",
            _ => "",
        };
        shown.add_row([
            row.op.to_owned(),
            row.shape.clone(),
            row.who.clone(),
            format!("{:.2}", row.us),
            format!("{:.1}", row.rate),
            row.unit.to_owned(),
            ratio(row),
            mark.to_owned(),
        ]);
    }
    align_right(&mut shown, [3, 4, 6]);
    shown
}

/// Returns a table with the selected kernel, the fastest other variant and the fastest peer for every problem.
fn summary(rows: &[Row]) -> comfy_table::Table {
    let mut shown = table(&[
        "op", "shape", "picked", "by", "us", "rate", "", "other", "us", "peer", "us", "ratio",
    ]);
    for of_problem in rows.chunk_by(|a, b| a.problem == b.problem) {
        let Some(picked) = of_problem.iter().find(|r| r.picked) else {
            continue;
        };
        let best = |wanted: &dyn Fn(&&Row) -> bool| {
            of_problem
                .iter()
                .filter(wanted)
                .min_by(|a, b| a.us.total_cmp(&b.us))
        };
        let other = best(&|r| !r.peer && !r.picked);
        let peer = best(&|r| r.peer && !does_less(&r.who));
        let who = |row: Option<&Row>| or_dash(row.map(|r| r.who.clone()));
        let us = |row: Option<&Row>| or_dash(row.map(|r| format!("{:.2}", r.us)));
        shown.add_row([
            picked.op.to_owned(),
            picked.shape.clone(),
            picked.who.clone(),
            or_dash(picked.chosen_by.map(|by| by.name().to_owned())),
            format!("{:.2}", picked.us),
            format!("{:.1}", picked.rate),
            picked.unit.to_owned(),
            who(other),
            us(other),
            who(peer),
            us(peer),
            ratio(picked),
        ]);
    }
    align_right(&mut shown, [4, 5, 8, 10, 11]);
    shown
}

/// A paper's figure, and the problems in it.
struct Drawing {
    file: &'static str,
    title: &'static str,
    x_label: &'static str,
    of: fn(&Task) -> bool,
    /// Whether the figure shows time on a logarithmic axis instead of the rate.
    time: bool,
}

const DRAWINGS: [Drawing; 10] = [
    Drawing {
        file: "softmax.svg",
        title: "Softmax of attention scores, 12 heads",
        x_label: "sequences x length",
        of: |task| matches!(task, Task::Softmax { .. }),
        time: true,
    },
    Drawing {
        file: "layernorm.svg",
        title: "LayerNorm",
        x_label: "rows x width",
        of: |task| matches!(task, Task::LayerNorm { .. }),
        time: true,
    },
    Drawing {
        file: "bias_residual_layernorm.svg",
        title: "Bias, residual and LayerNorm, fused and unfused",
        x_label: "rows x width",
        of: |task| matches!(task, Task::BiasResidualLayerNorm { .. }),
        time: true,
    },
    Drawing {
        file: "gemm_bias_gelu.svg",
        title: "GEMM, bias and GELU, fused and unfused",
        x_label: "rows x outputs x inputs",
        of: |task| matches!(task, Task::GemmBiasGelu { .. }),
        time: false,
    },
    Drawing {
        file: "gemm.svg",
        title: "GEMM",
        x_label: "rows x outputs x inputs",
        of: |task| matches!(task, Task::Gemm { .. }),
        time: false,
    },
    Drawing {
        file: "attention_short.svg",
        title: "Attention, longest sequence at most 384 tokens",
        x_label: "lengths, heads x head size",
        of: |task| longest(task).is_some_and(|n| n <= SHORT),
        time: false,
    },
    Drawing {
        file: "attention_long.svg",
        title: "Attention, longest sequence above 384 tokens",
        x_label: "lengths, heads x head size",
        of: |task| longest(task).is_some_and(|n| n > SHORT),
        time: false,
    },
    Drawing {
        file: "attention_equal.svg",
        title: "Attention, 8,192 tokens in sequences of equal length",
        x_label: "sequences x length, heads x head size",
        of: |task| matches!(task, Task::Attention { lens, window: None, .. } if is_equal(lens)),
        time: false,
    },
    Drawing {
        file: "attention_cached.svg",
        title: "Attention to a KV cache",
        x_label: "sequences x new tokens of all keys, heads x head size",
        of: |task| {
            matches!(
                task,
                Task::CachedAttention {
                    window: None,
                    e4m3: false,
                    ..
                }
            )
        },
        time: true,
    },
    Drawing {
        file: "attention_windows.svg",
        title: "Attention with windows, and to a KV cache in E4M3",
        x_label: "sequences x length, heads x head size, window",
        of: |task| match task {
            Task::Attention { window, .. } => window.is_some(),
            Task::CachedAttention { window, e4m3, .. } => window.is_some() || *e4m3,
            _ => false,
        },
        time: true,
    },
];

fn longest(task: &Task) -> Option<u32> {
    match task {
        Task::Attention {
            lens, window: None, ..
        } if !is_equal(lens) => lens.iter().copied().max(),
        _ => None,
    }
}

/// Returns whether `lens` has several sequences, all of the same length.
fn is_equal(lens: &[u32]) -> bool {
    lens.len() > 1 && lens.iter().all(|&n| n == lens[0])
}

/// Returns the papers' figures for the problems, by file name.
pub(super) fn figures(
    problems: &[Problem],
    rows: &[Row],
    device: &str,
    dtype: DType,
) -> Vec<(&'static str, Figure)> {
    DRAWINGS
        .iter()
        .filter_map(|drawing| {
            let groups: Vec<usize> = (0..problems.len())
                .filter(|&at| (drawing.of)(&problems[at].task))
                .collect();
            let first = problems.get(*groups.first()?)?;
            let unit = match first.task.work(dtype) {
                _ if drawing.time => "time in microseconds (lower is better)",
                Work::Bytes(_) => "GB/s (higher is better)",
                Work::Flop(_) => "TFLOP/s on valid tokens (higher is better)",
            };
            let figure = Figure {
                title: format!("{}: {dtype}, {device}", drawing.title),
                x_label: format!("{}; marked: launched", drawing.x_label),
                y_label: unit.to_owned(),
                groups: groups
                    .iter()
                    .map(|&at| problems[at].task.to_string())
                    .collect(),
                series: series(rows, &groups, drawing.time),
                kind: Kind::Bars,
                log_y: drawing.time,
            };
            Some((drawing.file, figure))
        })
        .collect()
}

/// Returns a series for each of our variants (those named `X=…` first), followed by a series for each peer in order of appearance.
fn series(rows: &[Row], groups: &[usize], time: bool) -> Vec<Series> {
    let shown = || rows.iter().filter(|r| groups.contains(&r.problem));
    let mut names: Vec<(bool, &str)> = Vec::new();
    for row in shown() {
        if !names.contains(&(row.peer, &row.who)) {
            names.push((row.peer, &row.who));
        }
    }
    // Sort the variants named `X=…` by X. Otherwise, their order would depend on which of them was selected for the first shape.
    names.sort_by_key(|&(peer, who)| (peer, !who.starts_with("X="), who.strip_prefix("X=")));
    names
        .into_iter()
        .map(|(peer, who)| {
            let value = |&at: &usize| {
                shown()
                    .find(|r| r.problem == at && r.peer == peer && r.who == who)
                    .map(|r| if time { r.us } else { r.rate })
            };
            let marked = |&at: &usize| shown().any(|r| r.problem == at && r.who == who && r.picked);
            let name = match peer {
                true => who.to_owned(),
                false => format!("gemmule: {who}"),
            };
            Series {
                marked: (0..groups.len()).filter(|&g| marked(&groups[g])).collect(),
                ..Series::new(name, groups.iter().map(value).collect())
            }
        })
        .collect()
}
