//! Breakdown of a run's time, and its floating-point operations (ByteTransformer III.B and III.D,
//! figure 3 and table II).

use std::process::ExitCode;

use gemmule::{
    Engine, EngineError,
    cli::{Outcome, Runnable, align_right, bench::sets::Set, print, table, write_file, write_json},
    engine::DeviceName,
    kernels::Class,
    measure::Breakdown,
    passes,
    program::Program,
    tensor::Extents,
};
use miette::Report;
use serde::Serialize;

use crate::{
    figure::{Figure, Kind, Series},
    subject::Args,
};

/// Names of the sets that are timed by default. Each set is a batch of 16 sequences, as in figure 3 of ByteTransformer.
const SETS: [&str; 4] = ["b16_m128", "b16_m256", "b16_m512", "b16_m1024"];

#[derive(Serialize)]
struct Measured {
    model: String,
    device: String,
    dtype: String,
    warm_up: usize,
    runs: usize,
    rows: Vec<Row>,
    counts: Vec<Count>,
}

/// Results of one program (fused or unfused) on one set of sequence lengths.
#[derive(Serialize)]
struct Row {
    set: String,
    program: &'static str,
    launches: usize,
    /// Time of a whole run (`ms`), and the sum of the times of its kernel classes (`sum_ms`), in milliseconds.
    ms: f32,
    sum_ms: f32,
    classes: Vec<Part>,
}

#[derive(Serialize)]
struct Part {
    class: &'static str,
    ms: f32,
    /// Fraction of the sum of the times of all classes.
    share: f32,
}

/// Floating-point operations of one kernel class on one set, counted as in table II of ByteTransformer.
#[derive(Serialize)]
struct Count {
    set: String,
    class: &'static str,
    /// The number of operations for any batch, as a polynomial in the batch's sizes, such as `tokens`.
    symbolic: String,
    /// Operations if all sequences are padded to the length of the longest.
    padded: u64,
    /// Operations if only attention is padded. Products with weights are computed without padding.
    zero_padding: u64,
    /// Operations without any padding, as executed here.
    packed: u64,
}

pub(crate) fn run(args: Args) -> Outcome {
    let all: Vec<&str> = passes::all().iter().map(|p| p.name()).collect();
    let programs = [("unfused", all), ("fused", Vec::new())]
        .into_iter()
        .map(|(name, without)| {
            Ok((
                name,
                Runnable::build(args.subject.builder()?.without(without))?,
            ))
        })
        .collect::<Result<Vec<(&str, Engine)>, EngineError>>()?;
    let Some((_, fused)) = programs.last() else {
        return Ok(ExitCode::SUCCESS);
    };
    let sets = args.sets.read(&SETS, &fused.limits())?;
    let (mut rows, mut counts) = (Vec::new(), Vec::new());
    for set in &sets {
        let batch = set.batch(&fused.limits())?;
        for (name, engine) in &programs {
            let breakdown = engine
                .session()?
                .breakdown(&batch, args.warm_up, args.runs)?;
            let launches = engine.launched(&batch)?.len();
            rows.push(Row::of(set, name, launches, &breakdown));
        }
        for class in [Class::Gemm, Class::Attention] {
            counts.push(Count::of(set, class, fused.program(), batch.extents())?);
        }
    }
    let measured = Measured {
        model: args.subject.name()?,
        device: fused.device().to_string(),
        dtype: fused.precision().to_string(),
        warm_up: args.warm_up,
        runs: args.runs,
        rows,
        counts,
    };
    measured.show(fused.device())?;
    if let Some(file) = &args.json {
        write_json(file, &measured)?;
    }
    if let Some(file) = &args.figure {
        write_file(file, measured.figure().svg()?.as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Row {
    fn of(set: &Set, name: &'static str, launches: usize, breakdown: &Breakdown) -> Self {
        let sum = breakdown.sum_ms();
        let parts = breakdown.shares.iter().map(|share| Part {
            class: share.class.name(),
            ms: share.ms,
            share: share.ms / sum.max(f32::MIN_POSITIVE),
        });
        Self {
            set: set.name.clone(),
            program: name,
            launches,
            ms: breakdown.whole_ms,
            sum_ms: sum,
            classes: parts.collect(),
        }
    }
}

impl Count {
    fn of(set: &Set, class: Class, program: &Program, e: Extents) -> Result<Self, Report> {
        let flop = program.flop(class);
        let tokens = e.batch * e.longest;
        let pairs = tokens * e.longest;
        let of = |extents: Extents| {
            flop.eval(&extents).ok_or_else(|| {
                miette::miette!(
                    "the operations of {class} on {}, {flop}, do not fit in 64 bits",
                    set.name
                )
            })
        };
        Ok(Self {
            set: set.name.clone(),
            class: class.name(),
            symbolic: flop.to_string(),
            padded: of(Extents { tokens, pairs, ..e })?,
            zero_padding: of(Extents { pairs, ..e })?,
            packed: of(e)?,
        })
    }
}

impl Measured {
    fn show(&self, device: &DeviceName) -> Result<(), Report> {
        let mut header = vec!["set", "program", "launches", "ms", "sum ÷ ms"];
        header.extend(Class::ALL.map(Class::name));
        let mut times = table(&header);
        for row in &self.rows {
            let mut cells = vec![
                row.set.clone(),
                row.program.to_owned(),
                row.launches.to_string(),
                format!("{:.4}", row.ms),
                format!("{:.3}", row.sum_ms / row.ms),
            ];
            let percent = |part: &Part| format!("{:.1} %", 100.0 * part.share);
            cells.extend(row.classes.iter().map(percent));
            times.add_row(cells);
        }
        align_right(&mut times, 2..header.len());
        let mut counts = table(&[
            "set",
            "class",
            "for any batch",
            "padded",
            "zero padding",
            "and in attention",
            "saved",
        ]);
        for count in &self.counts {
            let giga = |flop: u64| format!("{:.3}", flop as f64 / 1e9);
            let saved = 1.0 - count.packed as f64 / count.padded.max(1) as f64;
            counts.add_row([
                count.set.clone(),
                count.class.to_owned(),
                count.symbolic.clone(),
                giga(count.padded),
                giga(count.zero_padding),
                giga(count.packed),
                format!("{:.1} %", 100.0 * saved),
            ]);
        }
        align_right(&mut counts, 3..7);
        let method = match device {
            DeviceName::Cpu { .. } => {
                "every step is timed separately; the time between steps belongs to no class"
            }
            DeviceName::Cuda(_) => {
                "the launches of one class are replayed as a separate CUDA graph after a whole run; overlap between launches of different classes is lost, so the sum may exceed the whole"
            }
        };
        print(&format!(
            "{times}\n{}, {}, {}; medians of {} runs after {} warm-up runs; percentages are of the sum of the classes\nmethod: {method}\nattention: the products of attention, including softmax in the fused program; LayerNorm: including operators fused with it\n{counts}\nGFLOP of the products: with everything padded; with padding only in attention, as batched GEMMs need it; and without padding, as executed\n",
            self.model, self.device, self.dtype, self.runs, self.warm_up,
        ))
    }

    fn figure(&self) -> Figure {
        let series = |(index, class): (usize, Class)| {
            let parts = self.rows.iter().map(|row| row.classes.get(index));
            let shares = parts.map(|part| part.map(|p| 100.0 * f64::from(p.share)));
            Series::new(class.name(), shares.collect())
        };
        Figure {
            title: format!(
                "Breakdown of a run's time: {}, {}, {}",
                self.model, self.device, self.dtype
            ),
            x_label: "set of lengths and program".to_owned(),
            y_label: "percentage of the run".to_owned(),
            groups: self
                .rows
                .iter()
                .map(|row| format!("{} {}", row.set, row.program))
                .collect(),
            series: Class::ALL.into_iter().enumerate().map(series).collect(),
            kind: Kind::Stacked,
            log_y: false,
        }
    }
}
