//! Formatting of a [`Report`] as text, with the memory traffic of one batch. Equal entries of different layers are merged.

use std::fmt;

use super::{
    all,
    report::{Entry, Part, Report},
};
use crate::{
    graph::{Iterated, alike},
    tensor::{DType, Extents},
};

/// A [`Report`] as text, with the memory traffic of one batch; see [`Report::explain`].
#[derive(Clone, Copy, Debug)]
pub struct Explanation<'a> {
    report: &'a Report,
    extents: Extents,
    dtype: DType,
}

impl<'a> Explanation<'a> {
    fn new(report: &'a Report, extents: Extents, dtype: DType) -> Self {
        Self {
            report,
            extents,
            dtype,
        }
    }
}

impl fmt::Display for Explanation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries = &self.report.entries;
        for alike in alike(entries) {
            let n = alike.n();
            write_entry(f, &alike.shown(), n)?;
            let Entry::Fused {
                moved,
                launches_saved,
                ..
            } = alike.first
            else {
                continue;
            };
            let each = moved.bytes_saved(&self.extents, self.dtype);
            match n {
                1 => writeln!(f, ", {}", bytes(each))?,
                n => {
                    let n = n as i64;
                    writeln!(
                        f,
                        ", {} each; {}, {} in all",
                        bytes(each),
                        launches(launches_saved.saturating_mul(n)),
                        bytes(each.and_then(|each| each.checked_mul(n)))
                    )?;
                }
            }
        }
        let is_fused = |entry: &&Entry| matches!(entry, Entry::Fused { .. });
        let n_fused = entries.iter().filter(is_fused).count();
        let is_refused = |entry: &&Entry| matches!(entry, Entry::Refused { .. });
        writeln!(
            f,
            "{n_fused} fused, {} refused: {}, {} for {} tokens in {} ({})",
            entries.iter().filter(is_refused).count(),
            launches(self.report.launches_saved()),
            bytes(self.report.bytes_saved(&self.extents, self.dtype)),
            self.extents.tokens,
            match self.extents.batch {
                1 => "1 sequence".to_owned(),
                n => format!("{n} sequences"),
            },
            self.dtype,
        )
    }
}

impl Report {
    /// Returns the report for display, with the memory traffic of a batch.
    pub fn explain(&self, extents: Extents, dtype: DType) -> Explanation<'_> {
        Explanation::new(self, extents, dtype)
    }
}

/// Formats the report without the sizes of a batch: the memory traffic is given as symbolic numbers of elements instead of bytes.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for entry in &self.entries {
            write_entry(f, entry, 1)?;
            if let Entry::Fused { moved, .. } = entry {
                writeln!(
                    f,
                    ", moves {} elements instead of {}",
                    moved.after, moved.before
                )?;
            }
        }
        Ok(())
    }
}

/// Writes an entry of the report without its memory traffic. A fusion ends without a newline, because the caller appends the traffic to its
/// last line. `n` is the number of equal entries that are shown as this entry.
fn write_entry(f: &mut fmt::Formatter<'_>, entry: &Entry, n: usize) -> fmt::Result {
    let times = match n {
        1 => String::new(),
        n => format!(", × {n}"),
    };
    match entry {
        Entry::Fused {
            pass,
            anchor,
            merged,
            launches_saved,
            ..
        } => {
            let merged: Vec<String> = merged.iter().map(Part::to_string).collect();
            writeln!(f, "fused `{anchor}` by {pass}{times}")?;
            writeln!(f, "    merges {}", merged.join(", "))?;
            if let Some(pass) = all().iter().find(|p| p.name() == *pass) {
                writeln!(f, "    as {}", pass.equation())?;
            }
            write!(f, "    {}", launches(*launches_saved))
        }
        Entry::Refused {
            pass,
            at,
            condition,
        } => writeln!(
            f,
            "refused `{at}` by {pass}{times}\n    because {condition}"
        ),
        Entry::Quantized {
            pass,
            at,
            what,
            format,
        } => writeln!(
            f,
            "quantized `{at}` by {pass}{times}\n    {what} stored in {format}"
        ),
    }
}

/// Renames the values of an entry, including those in the text of a refusal.
impl Iterated for Entry {
    fn name(&self) -> &str {
        match self {
            Entry::Fused { anchor: name, .. }
            | Entry::Refused { at: name, .. }
            | Entry::Quantized { at: name, .. } => name,
        }
    }

    fn renamed(&self, name: &dyn Fn(&str) -> String) -> Self {
        let mut entry = self.clone();
        match &mut entry {
            Entry::Fused { anchor, merged, .. } => {
                *anchor = name(anchor);
                for Part { name: of, .. } in merged {
                    *of = name(of);
                }
            }
            Entry::Refused { at, condition, .. } => {
                *at = name(at);
                *condition = name(condition);
            }
            Entry::Quantized { at, .. } => *at = name(at),
        }
        entry
    }
}

fn launches(n: i64) -> String {
    let verb = if n < 0 { "adds" } else { "saves" };
    match n.unsigned_abs() {
        1 => format!("{verb} 1 launch"),
        n => format!("{verb} {n} launches"),
    }
}

fn bytes(saved: Option<i64>) -> String {
    let Some(saved) = saved else {
        return "moves more bytes than 64 bits can count".to_owned();
    };
    let than_before = if saved < 0 { "more" } else { "less" };
    // One decimal is shown, so the precision of f64 is sufficient.
    let amount = match saved.unsigned_abs() {
        n @ 0..1024 => format!("{n} bytes"),
        n @ 1024..1_048_576 => format!("{:.1} KiB", n as f64 / 1024.0),
        n => format!("{:.1} MiB", n as f64 / 1_048_576.0),
    };
    format!("moves {amount} {than_before}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(at: &str, condition: &str) -> Entry {
        Entry::Refused {
            pass: "fold_scale",
            at: at.to_owned(),
            condition: condition.to_owned(),
        }
    }

    fn explained(entries: Vec<Entry>) -> String {
        let report = Report { entries };
        let extents = Extents::of(&[8]).unwrap();
        report.explain(extents, DType::F16).to_string()
    }

    #[test]
    fn equal_entries_of_iterations_are_merged() {
        let entries = (0..4).map(|i| {
            let condition = format!("`layer.{i}.b` is also read by `layer.{}.c`", i + 1);
            refused(&format!("layer.{i}.a"), &condition)
        });
        insta::assert_snapshot!(explained(entries.collect()), @r"
        refused `layer.{0..3}.a` by fold_scale, × 4
            because `layer.{0..3}.b` is also read by `layer.{1..4}.c`
        0 fused, 4 refused: saves 0 launches, moves 0 bytes less for 8 tokens in 1 sequence (f16)
        ");
    }

    #[test]
    fn entries_that_differ_in_more_than_the_index_stay_separate() {
        let entries = vec![
            refused("layer.0.a", "`layer.0.b` is an output"),
            refused("layer.1.a", "`layer.0.b` is an output"),
            refused("layer.3.a", "`layer.3.b` is an output"),
            refused("player.4.a", "`player.4.b` is an output"),
            refused("7.a", "`7.b` is an output"),
            refused("8.a", "`8.b` is an output"),
        ];
        insta::assert_snapshot!(explained(entries), @r"
        refused `layer.{0,3}.a` by fold_scale, × 2
            because `layer.{0,3}.b` is an output
        refused `layer.1.a` by fold_scale
            because `layer.0.b` is an output
        refused `player.4.a` by fold_scale
            because `player.4.b` is an output
        refused `7.a` by fold_scale
            because `7.b` is an output
        refused `8.a` by fold_scale
            because `8.b` is an output
        0 fused, 6 refused: saves 0 launches, moves 0 bytes less for 8 tokens in 1 sequence (f16)
        ");
    }
}
