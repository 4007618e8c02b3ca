//! The papers' serving figures, simulated with cost tables: TurboTransformers' figures 8, 9 and 12
//! and table 4, and TCB's figures 9 to 16. Load is a fraction of the device's capacity, so that the
//! same command works for any card.

use std::{
    fmt::Write,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use gemmule::{
    EngineError,
    cli::{Outcome, print, write_file},
    files::{self, Kind as FileKind},
    schedule::{
        CostTable, Costs, Decision, Layout, Micros, Scheduler, Settings, View, partition, scheduler,
    },
    simulate::{Devices, Lengths, Load, Summary, simulate},
    tensor::Extents,
};
use miette::{IntoDiagnostic, Report, miette};

use crate::figure::{Figure, Kind, Series};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Cost table for BERT-base, the model in TurboTransformers' figures, written by `gemmule serve
    /// --write-costs` or `gemmule bench costs --estimated`
    #[arg(long, value_name = "FILE")]
    costs: PathBuf,
    /// Cost table for TCB's model, which has 3 layers of width 3072 (its config.json is
    /// bench/tcb.json)
    #[arg(long, value_name = "FILE")]
    tcb_costs: PathBuf,
    /// Folder for the figures and for serving.md, which compares the papers' claims with the
    /// results
    #[arg(long, value_name = "DIR")]
    figures: PathBuf,
    /// Number of simulated requests per point of a figure
    #[arg(long, value_name = "N", default_value_t = 30_000)]
    requests: usize,
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Section of the page about results of the papers that are not reproduced, and why.
const MARGINS: &str = include_str!("serving_margins.md");

/// Inputs of the simulations for the figures of one paper.
struct Bench {
    costs: CostTable,
    requests: usize,
    seed: u64,
}

/// A scheduler that measures how long the decisions of `inner` take.
struct Timed {
    inner: Box<dyn Scheduler>,
    /// For each decision to run batches, the ratio of the decision's duration to the estimated time of the batches.
    shares: Vec<f64>,
}

impl Scheduler for Timed {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let began = Instant::now();
        let decision = self.inner.decide(view);
        let spent = began.elapsed().as_secs_f64();
        let runs = decision
            .run
            .iter()
            .map(|planned| planned.estimate.seconds());
        let runs: f64 = runs.sum();
        if runs > 0.0 {
            self.shares.push(spent / runs);
        }
        decision
    }

    fn finished(&mut self, ids: &[u64], lane: usize) {
        self.inner.finished(ids, lane);
    }
}

/// Result of one simulation.
struct Point {
    summary: Summary,
    /// Median ratio of a decision's duration to the time of its batches. The median is robust against other load on the machine.
    overhead: f64,
}

impl Bench {
    fn run(&self, name: &str, settings: &Settings, load: &Load) -> Result<Point, Report> {
        let mut timed = Timed {
            inner: scheduler(name, settings).into_diagnostic()?,
            shares: Vec::new(),
        };
        let on = Devices {
            costs: &self.costs,
            bytes: vec![u64::MAX],
            depth: 2,
        };
        let arrivals = load.arrivals();
        let outcome = simulate(&arrivals, &mut timed, &on).into_diagnostic()?;
        Ok(Point {
            overhead: {
                timed.shares.sort_by(f64::total_cmp);
                let middle = timed.shares.get(timed.shares.len() / 2);
                middle.copied().unwrap_or(0.0)
            },
            summary: Summary::of(&arrivals, &outcome, 1),
        })
    }

    fn load(&self, lengths: &Lengths, rate: f64) -> Load {
        Load {
            rate,
            requests: self.requests,
            lengths: lengths.clone(),
            steps: 1,
            deadlines: None,
            seed: self.seed,
        }
    }

    fn time(&self, layout: Layout, lens: &[u32]) -> f64 {
        let computed = layout.computed(lens.iter().copied());
        self.costs.time(layout, &computed).seconds()
    }

    /// Returns the capacity: the max number of requests per second that the device can process, with lengths from the distribution
    /// `lengths`.
    fn capacity(&self, lengths: &Lengths) -> f64 {
        let arrivals = self.load(lengths, 1.0).arrivals();
        let sum =
            |of: fn(f64) -> f64| -> f64 { arrivals.iter().map(|w| of(f64::from(w.tokens))).sum() };
        let n = arrivals.len() as f64;
        let (mean, mean_square) = (sum(|t| t) / n, sum(|t| t * t) / n);
        let rate = |tokens: f64| {
            let batch = tokens / mean;
            let extents = Extents {
                tokens: tokens as u64,
                batch: batch as u64,
                longest: mean as u64,
                pairs: (batch * mean_square) as u64,
                slots: tokens as u64,
                rows: tokens as u64,
                ..Extents::default()
            };
            batch / self.costs.time(Layout::Packed, &extents).seconds()
        };
        (10..32)
            .map(|i| rate(2_f64.powf(f64::from(i) / 2.0)))
            .fold(0.0, f64::max)
    }

    /// Simulates each scheduler at each of [`LOADS`], and returns the results by scheduler. `names` has the name of each scheduler and its
    /// label in the figure.
    fn by_load(
        &self,
        names: &[(&str, &str)],
        settings: &Settings,
        lengths: &Lengths,
        deadlines: Option<(Micros, Micros)>,
    ) -> Result<Vec<(String, Vec<Point>)>, Report> {
        let capacity = self.capacity(lengths);
        let mut lines = Vec::new();
        for (name, shown) in names {
            let points = LOADS.iter().map(|share| {
                let load = Load {
                    deadlines,
                    ..self.load(lengths, share * capacity)
                };
                self.run(name, settings, &load)
            });
            lines.push(((*shown).to_owned(), points.collect::<Result<_, _>>()?));
        }
        Ok(lines)
    }
}

/// Loads as fractions of the device's capacity.
const LOADS: [f64; 12] = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.3];

/// A claim of a paper and the corresponding result, for the page of results.
struct Claim {
    figure: &'static str,
    of: &'static str,
    paper: String,
    here: String,
}

/// The page with figures and claims.
struct Page<'a> {
    folder: &'a Path,
    about: String,
    claims: Vec<Claim>,
}

impl Page<'_> {
    fn draw(
        &mut self,
        file: &'static str,
        of: &'static str,
        figure: &Figure,
        paper: &str,
        here: &str,
    ) -> Result<(), Report> {
        let notes = [
            format!("The paper: {paper}"),
            format!("Here: {here}"),
            format!("Costs: {}", self.about),
        ];
        let svg = with_notes(&figure.svg()?, &notes);
        write_file(&self.folder.join(file), svg.as_bytes())?;
        self.claims.push(Claim {
            figure: file,
            of,
            paper: paper.to_owned(),
            here: here.to_owned(),
        });
        Ok(())
    }
}

/// Adds lines of text under a figure, wrapped to its width.
fn with_notes(svg: &str, notes: &[String]) -> String {
    let number = |name: &str| -> Option<(usize, usize, f64)> {
        let at = svg.find(&format!("{name}=\""))? + name.len() + 2;
        let end = at + svg[at..].find('"')?;
        Some((at, end, svg[at..end].parse().ok()?))
    };
    let (Some((_, _, width)), Some((_, _, height))) = (number("width"), number("height")) else {
        return svg.to_owned();
    };
    const LINE: f64 = 18.0;
    let most = ((width - 24.0) / 7.0) as usize;
    let mut lines: Vec<String> = Vec::new();
    for note in notes {
        let mut line = String::new();
        for word in note.split(' ') {
            if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > most {
                lines.push(std::mem::take(&mut line));
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line += word;
        }
        lines.push(line);
    }
    let taller = height + LINE * lines.len() as f64 + 10.0;
    let mut text = String::new();
    for (at, line) in lines.iter().enumerate() {
        let escaped = line.replace('&', "&amp;").replace('<', "&lt;");
        let y = height + LINE * (at as f64 + 0.7);
        let _ = writeln!(
            text,
            "<text x=\"12\" y=\"{y}\" font-family=\"sans-serif\" font-size=\"13\" fill=\"#333333\">{escaped}</text>"
        );
    }
    let under = format!(
        "<rect x=\"0\" y=\"{height}\" width=\"{width}\" height=\"{}\" fill=\"#ffffff\"/>\n{text}</svg>",
        taller - height
    );
    let svg = svg
        .replacen(
            &format!("height=\"{height}\""),
            &format!("height=\"{taller}\""),
            1,
        )
        .replacen(
            &format!("viewBox=\"0 0 {width} {height}\""),
            &format!("viewBox=\"0 0 {width} {taller}\""),
            1,
        );
    match svg.rfind("</svg>") {
        Some(end) => format!("{}{under}\n", &svg[..end]),
        None => svg,
    }
}

pub(crate) fn run(args: Args) -> Outcome {
    let read = |file: &Path| -> Result<CostTable, Report> {
        let text = files::text(file, FileKind::Costs).map_err(EngineError::from)?;
        CostTable::parse(&text).map_err(|e| miette!("`{}`: {e}", file.display()))
    };
    if args.requests < 1000 {
        return Err(miette!(
            "--requests is {}; expected at least 1000",
            args.requests
        ));
    }
    let bench = |file: &Path| {
        Ok::<_, Report>(Bench {
            costs: read(file)?,
            requests: args.requests,
            seed: args.seed,
        })
    };
    let (turbo, tcb) = (bench(&args.costs)?, bench(&args.tcb_costs)?);
    let mut page = Page {
        folder: &args.figures,
        about: turbo.costs.about.clone(),
        claims: Vec::new(),
    };
    let table = of_turbo(&turbo, &mut page)?;
    page.about.clone_from(&tcb.costs.about);
    of_tcb(&tcb, &mut page)?;
    let text = shown(&page, &turbo, &tcb, &table);
    write_file(&args.figures.join("serving.md"), text.as_bytes())?;
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn shown(page: &Page<'_>, turbo: &Bench, tcb: &Bench, table: &str) -> String {
    let mut text = format!(
        "# The papers' figures of serving, simulated\n\n\
         `gemmule-bench serving` simulates the schedulers of TurboTransformers and TCB ([papers](../papers.md)), and writes this page and its\n\
         figures. The costs of TurboTransformers' figures were {}. The costs of TCB's figures were {}.\n\n\
         - **Load** is relative to the *capacity*, the device's best rate: {:.0} requests a second of TurboTransformers' lengths (normal, 5 to\n  \
           500). The papers' rates do not load a modern card.\n\
         - **TurboTransformers.** *No batches* runs each request alone, *naive* makes padded batches in order of arrival, and *DP* divides the\n  \
           requests into padded batches by dynamic programming.\n\
         - **TCB** selects requests by DAS, a mix of the highest utility and the earliest deadlines, and puts several requests into one row of\n  \
           a batch. *Slotted* TCB cuts rows into slots of one length. *TNB* puts the selected requests into naive batches, and *TTB* into\n  \
           DP batches. SJF selects the shortest requests, FCFS the first ones, and EDF those with the earliest deadlines. *Utility* is the\n  \
           sum of 1 / length over the requests completed in time.\n\
         - **`packed`** is gemmule's default scheduler. Its batches have no rows: each request is a sequence that attends only to its own tokens.\n\n\
         TCB's model has 12 heads of 256 instead of 8 of 384, because heads of 384 exceed the maximum of fused attention. Only its three encoder\n\
         layers are computed. The papers give no deadlines. Here, a deadline is 2 to 10 times the time of a batch of 64 rows of 400 tokens. A\n\
         batch of rows is assumed to take as long as the same number of packed sequences of a slot's length. This includes padding, but not the\n\
         masks that rows would need, so it is a lower bound for TCB's layout. Figures 13 and 14 compare such batches.\n\n",
        turbo.costs.about,
        tcb.costs.about,
        turbo.capacity(&turbo_lengths()),
    );
    text += "| figure | the paper | here |\n|---|---|---|\n";
    for claim in &page.claims {
        let _ = writeln!(
            text,
            "| [{}]({}) | {} | {} |",
            claim.of, claim.figure, claim.paper, claim.here
        );
    }
    let _ = write!(text, "\n{MARGINS}");
    text += "## Latency (TurboTransformers, table 4)\n\nMilliseconds from the arrival of a request to its response: mean (min, max). +∞ means that the queue grows without limit.\n\n";
    text += table;
    for claim in &page.claims {
        let _ = write!(
            text,
            "\n## {}\n\n![{}]({})\n",
            claim.of, claim.of, claim.figure
        );
    }
    text
}

fn turbo_lengths() -> Lengths {
    Lengths::Normal {
        least: 5,
        most: 500,
        mean: 250.0,
        deviation: 90.0,
    }
}

fn series(lines: &[(String, Vec<Point>)], value: impl Fn(&Point) -> Option<f64>) -> Vec<Series> {
    let of = |(name, points): &(String, Vec<Point>)| {
        Series::new(name.as_str(), points.iter().map(&value).collect())
    };
    lines.iter().map(of).collect()
}

fn best(lines: &[(String, Vec<Point>)], name: &str, value: impl Fn(&Point) -> f64) -> f64 {
    let line = lines.iter().find(|(n, _)| n == name);
    line.map_or(0.0, |(_, points)| {
        points.iter().map(&value).fold(0.0, f64::max)
    })
}

fn loads() -> Vec<String> {
    LOADS.iter().map(|share| format!("{share}")).collect()
}

fn answered(point: &Point) -> f64 {
    point.summary.answered
}

/// Draws TurboTransformers' figures, and returns the rows of its table 4.
fn of_turbo(bench: &Bench, page: &mut Page<'_>) -> Result<String, Report> {
    // Figure 8.
    let lens = [10, 40, 100, 200, 300, 500];
    let sizes: Vec<usize> = (1..=20).collect();
    let each = |len: u32, n: usize| bench.time(Layout::Padded, &vec![len; n]) / n as f64;
    let lines = lens.map(|len| {
        let of = sizes.iter().map(|&n| Some(each(len, n) / each(len, 1)));
        Series::new(format!("{len} tokens"), of.collect())
    });
    let gain = |len| each(len, 1) / each(len, 20);
    page.draw(
        "serving_turbo8.svg",
        "TurboTransformers, figure 8",
        &Figure {
            title: "Benefit of batching: time per request relative to a batch of one".to_owned(),
            x_label: "requests in a batch, all of the same length".to_owned(),
            y_label: "relative time per request".to_owned(),
            groups: sizes.iter().map(usize::to_string).collect(),
            series: lines.into(),
            kind: Kind::Lines,
            log_y: false,
        },
        "batches bring a significant speedup, most on short sequences (a curve, no numbers)",
        &format!(
            "a request in a batch of 20 takes 1/{:.1} of its time alone at 10 tokens, 1/{:.1} at 100, 1/{:.1} at 500",
            gain(10),
            gain(100),
            gain(500)
        ),
    )?;
    // Figure 9.
    let five = [17_u32, 18, 52, 63, 77];
    let alone: f64 = five
        .iter()
        .map(|&len| bench.time(Layout::Padded, &[len]))
        .sum();
    let together = bench.time(Layout::Padded, &five);
    let runs = partition(&five, 20, u64::MAX, &bench.costs).unwrap_or_default();
    let (mut at, mut parted) = (0, 0.0);
    for n in &runs {
        parted += bench.time(Layout::Padded, &five[at..at + n]);
        at += n;
    }
    let packed = bench.time(Layout::Packed, &five);
    let ways = [
        ("no batches", alone),
        ("one batch", together),
        ("DP", parted),
        ("packed", packed),
    ];
    let of = ways.iter().map(|(_, time)| Some(5.0 / time)).collect();
    page.draw(
        "serving_turbo9.svg",
        "TurboTransformers, figure 9",
        &Figure {
            title: "Five requests of 17, 18, 52, 63 and 77 tokens".to_owned(),
            x_label: "batching".to_owned(),
            y_label: "responses a second".to_owned(),
            groups: ways.iter().map(|(name, _)| (*name).to_owned()).collect(),
            series: vec![Series::new("five requests", of)],
            kind: Kind::Bars,
            log_y: false,
        },
        "three batches are best, 35 % more responses a second than one batch, which is slower than none",
        &format!(
            "DP makes {}, {:+.0} % against one batch and {:+.0} % against no batches; packed {:+.0} % against DP. Five short requests do \
             not fill a modern card, so batches that the paper splits are faster together",
            match runs.len() {
                1 => "one batch".to_owned(),
                n => format!("{n} batches"),
            },
            (together / parted - 1.0) * 100.0,
            (alone / parted - 1.0) * 100.0,
            (parted / packed - 1.0) * 100.0
        ),
    )?;
    // Figure 12.
    let names = [
        ("no-batch", "no batches"),
        ("naive", "naive"),
        ("dp", "DP"),
        ("packed", "packed"),
    ];
    let lengths = turbo_lengths();
    let settings = Settings::default();
    let lines = bench.by_load(&names, &settings, &lengths, None)?;
    let top = |name: &str| best(&lines, name, answered);
    page.draw(
        "serving_turbo12.svg",
        "TurboTransformers, figure 12",
        &Figure {
            title: "Responses a second by load, batches of at most 20".to_owned(),
            x_label: "load relative to the capacity".to_owned(),
            y_label: "responses a second".to_owned(),
            groups: loads(),
            series: series(&lines, |p| Some(answered(p))),
            kind: Kind::Lines,
            log_y: false,
        },
        "DP 144 responses a second, no batches 120, naive 98: DP is 1.20 times no batches and 1.47 times naive",
        &format!(
            "DP {:.0}, no batches {:.0}, naive {:.0}, packed {:.0}: DP is {:.2} times no batches and {:.2} times naive, packed {:.2} times DP",
            top("DP"),
            top("no batches"),
            top("naive"),
            top("packed"),
            top("DP") / top("no batches"),
            top("DP") / top("naive"),
            top("packed") / top("DP"),
        ),
    )?;
    // Table 4, at loads just below the saturation of each scheduler.
    let mut rates = vec![0.5 * top("naive"), 0.98 * top("naive")];
    rates.extend(["no batches", "DP", "packed"].map(|name| 0.98 * top(name)));
    rates.sort_by(f64::total_cmp);
    let mut table =
        "| requests/s | naive | no batches | DP | packed |\n|---|---|---|---|---|\n".to_owned();
    for rate in rates {
        let _ = write!(table, "| {rate:.0} |");
        for name in ["naive", "no-batch", "dp", "packed"] {
            let s = bench
                .run(name, &settings, &bench.load(&lengths, rate))?
                .summary;
            let cell = match s.is_saturated() {
                true => "+∞".to_owned(),
                false => format!("{:.2} ({:.2}, {:.2})", s.mean, s.least, s.most),
            };
            let _ = write!(table, " {cell} |");
        }
        table.push('\n');
    }
    Ok(table)
}

fn of_tcb(bench: &Bench, page: &mut Page<'_>) -> Result<(), Report> {
    let lengths = |variance: f64| Lengths::Normal {
        least: 3,
        most: 100,
        mean: 20.0,
        deviation: variance.sqrt(),
    };
    let settings = |rows: u32, length: u32| Settings {
        rows,
        length,
        most: rows as usize,
        ..Settings::default()
    };
    let rows = Layout::Rows {
        length: 400,
        slot: 400,
    };
    let batch = Micros::of_seconds(bench.time(rows, &[400; 64])).0;
    let deadlines = Some((Micros(2 * batch), Micros(10 * batch)));
    let usual = settings(64, 400);
    let das = [
        ("tnb", "TNB"),
        ("ttb", "TTB"),
        ("concat-das", "TCB"),
        ("slotted-das", "TCB, slotted"),
        ("packed", "packed"),
    ];
    let lines = bench.by_load(&das, &usual, &lengths(20.0), deadlines)?;
    let utility = |p: &Point| p.summary.utility;
    let in_time = |p: &Point| p.summary.in_time;
    let answers_in_time = |p: &Point| p.summary.in_time * p.summary.offered;
    let ratios = |lines: &[(String, Vec<Point>)], value: &dyn Fn(&Point) -> f64| {
        let top = |name: &str| best(lines, name, value);
        format!(
            "TCB is {:.2} times TNB and {:.2} times TTB; packed {:.2} times TCB",
            top("TCB") / top("TNB"),
            top("TCB") / top("TTB"),
            top("packed") / top("TCB"),
        )
    };
    // Compares schedulers at the largest load, where they differ.
    let last = |value: fn(&Point) -> f64| {
        let at_end: Vec<(String, f64)> = lines
            .iter()
            .map(|(name, points)| (name.clone(), points.last().map_or(0.0, value)))
            .collect();
        let of = |name: &str| {
            let found = at_end.iter().find(|(n, _)| n == name);
            found.map_or(f64::NAN, |(_, v)| *v)
        };
        format!(
            "at 1.3 × the capacity, TCB has {:.2} times TNB's and {:.2} times TTB's, packed {:.2} times TCB's",
            of("TCB") / of("TNB"),
            of("TCB") / of("TTB"),
            of("packed") / of("TCB"),
        )
    };
    let by_load = |title: &str, y: &str, series: Vec<Series>| Figure {
        title: title.to_owned(),
        x_label: "load relative to the capacity".to_owned(),
        y_label: y.to_owned(),
        groups: loads(),
        series,
        kind: Kind::Lines,
        log_y: false,
    };
    page.draw(
        "serving_tcb9.svg",
        "TCB, figure 9",
        &by_load(
            "Utility by load (lengths 3 to 100, mean 20, variance 20, 64 rows of 400)",
            "sum of 1/length over the requests completed in time",
            series(&lines, |p| Some(utility(p))),
        ),
        "after saturation TCB's utility is 2.20 times TNB's and 1.29 times TTB's",
        &last(utility),
    )?;
    page.draw(
        "serving_tcb10.svg",
        "TCB, figure 10",
        &by_load(
            "Responses in time a second by load (variance 20)",
            "responses by their deadlines, a second",
            series(&lines, |p| Some(answers_in_time(p))),
        ),
        "TCB's throughput is at most 2.22 times TNB's and 1.48 times TTB's",
        &ratios(&lines, &answers_in_time),
    )?;
    page.draw(
        "serving_tcb10_deadlines.svg",
        "Deadlines met, on TCB's load",
        &by_load(
            "Fraction of deadlines met (variance 20)",
            "fraction of requests completed in time",
            series(&lines, |p| Some(in_time(p))),
        ),
        "no figure",
        &last(in_time),
    )?;
    let fcfs = [
        ("naive", "TNB"),
        ("dp", "TTB"),
        ("concat-fcfs", "TCB"),
        ("packed", "packed"),
    ];
    for (file, of, variance, paper) in [
        (
            "serving_tcb11.svg",
            "TCB, figure 11",
            20.0,
            "in order of arrival TCB's highest throughput is 3.33 times TNB's and 1.52 times TTB's",
        ),
        (
            "serving_tcb12.svg",
            "TCB, figure 12",
            100.0,
            "with variance 100 TCB's highest throughput is 1.72 times TTB's",
        ),
    ] {
        let lines = bench.by_load(&fcfs, &usual, &lengths(variance), None)?;
        let title =
            format!("Responses a second by load, in order of arrival (variance {variance})");
        let figure = by_load(
            &title,
            "responses a second",
            series(&lines, |p| Some(answered(p))),
        );
        page.draw(file, of, &figure, paper, &ratios(&lines, &answered))?;
    }
    for (file, of, rows, paper) in [
        (
            "serving_tcb13.svg",
            "TCB, figure 13",
            10_u32,
            "10 rows of 400: at most 1.18 times as fast",
        ),
        (
            "serving_tcb14.svg",
            "TCB, figure 14",
            32,
            "32 rows of 400: 2.31 times as fast with 7 slots, and little more with more",
        ),
    ] {
        let slots: Vec<u32> = (1..=20).collect();
        let time = |slots: u32| {
            let slot = 400 / slots;
            let layout = Layout::Rows { length: 400, slot };
            // The whole row is computed, including the remainder after its last slot.
            let lens = vec![slot; (rows * slots) as usize];
            bench.time(layout, &lens) * f64::from(400) / f64::from(slot * slots)
        };
        let faster: Vec<f64> = slots.iter().map(|&n| time(1) / time(n)).collect();
        let most = faster.iter().copied().fold(0.0, f64::max);
        let figure = Figure {
            title: format!("A batch of {rows} rows of 400 tokens, divided into slots"),
            x_label: "slots per row".to_owned(),
            y_label: "speedup over no slots".to_owned(),
            groups: slots.iter().map(u32::to_string).collect(),
            series: vec![Series::new(
                "slotted over pure",
                faster.iter().map(|&v| Some(v)).collect(),
            )],
            kind: Kind::Lines,
            log_y: false,
        };
        let here = format!(
            "at most {most:.2} times as fast. At this width, attention takes a small part of a batch's time, and a fused kernel does not store its scores"
        );
        page.draw(file, of, &figure, paper, &here)?;
    }
    of_tcb_schedulers(bench, page, batch)?;
    // Figure 16.
    let names = [
        ("concat-das", "DAS"),
        ("slotted-das", "slotted DAS"),
        ("packed", "packed"),
    ];
    let lines = bench.by_load(&names, &usual, &lengths(20.0), deadlines)?;
    let most = |name: &str| best(&lines, name, |p| p.overhead) * 100.0;
    page.draw(
        "serving_tcb16.svg",
        "TCB, figure 16",
        &by_load(
            "Median time of a decision relative to its batch",
            "percent",
            series(&lines, |p| Some(p.overhead * 100.0)),
        ),
        "2 % of a batch at 400 requests a second, which saturate its GPU",
        &format!(
            "on this machine's CPU, at most {:.2} % with DAS, {:.2} % slotted, {:.2} % packed",
            most("DAS"),
            most("slotted DAS"),
            most("packed")
        ),
    )
}

/// Draws TCB's figure 15, by number of rows, variance of lengths and row length. It compares DAS, the scheduler of TCB, with schedulers
/// that order requests in other ways. Deadlines are computed from `batch`, the time in microseconds of a batch of 64 rows of 400 tokens.
fn of_tcb_schedulers(bench: &Bench, page: &mut Page<'_>, batch: u64) -> Result<(), Report> {
    let orders = [
        ("concat-sjf", "SJF"),
        ("concat-fcfs", "FCFS"),
        ("concat-edf", "EDF"),
        ("concat-das", "DAS"),
        ("packed", "packed"),
    ];
    let lengths = |variance: f64| Lengths::Normal {
        least: 3,
        most: 100,
        mean: 20.0,
        deviation: variance.sqrt(),
    };
    let rate = 1.3 * bench.capacity(&lengths(20.0));
    let utility = |name: &str, rows: u32, length: u32, variance: f64| {
        let settings = Settings {
            rows,
            length,
            ..Settings::default()
        };
        let load = Load {
            deadlines: Some((Micros(2 * batch), Micros(10 * batch))),
            ..bench.load(&lengths(variance), rate)
        };
        Ok::<_, Report>(bench.run(name, &settings, &load)?.summary.utility)
    };
    type Axis = (
        &'static str,
        &'static str,
        &'static str,
        &'static str,
        Vec<(String, u32, u32, f64)>,
    );
    let axes: [Axis; 3] = [
        (
            "serving_tcb15a.svg",
            "TCB, figure 15 (a)",
            "rows of 400",
            "DAS has the highest utility at each number of rows",
            [8, 16, 32, 64]
                .map(|rows| (rows.to_string(), rows, 400, 20.0))
                .into(),
        ),
        (
            "serving_tcb15b.svg",
            "TCB, figure 15 (b)",
            "variance of lengths (16 rows of 400)",
            "DAS has the highest utility at each variance",
            [20.0, 50.0, 100.0, 200.0]
                .map(|variance: f64| (variance.to_string(), 16, 400, variance))
                .into(),
        ),
        (
            "serving_tcb15c.svg",
            "TCB, figure 15 (c)",
            "tokens of a row (16 rows)",
            "DAS has about 40 % more utility than SJF, and more than others",
            [100, 200, 300, 400]
                .map(|length| (length.to_string(), 16, length, 20.0))
                .into(),
        ),
    ];
    for (file, of, x_label, paper, points) in axes {
        let mut all = Vec::new();
        for (name, shown) in orders {
            let values = points.iter().map(|(_, rows, length, variance)| {
                utility(name, *rows, *length, *variance).map(Some)
            });
            all.push(Series::new(shown, values.collect::<Result<Vec<_>, _>>()?));
        }
        let sum = |name: &str| -> f64 {
            let of = all.iter().find(|s| s.name == name);
            of.map_or(f64::NAN, |s| s.values.iter().flatten().sum())
        };
        let here = format!(
            "over these points DAS has {:.2} times SJF's utility, {:.2} times FCFS's, {:.2} times EDF's; packed {:.2} times DAS's",
            sum("DAS") / sum("SJF"),
            sum("DAS") / sum("FCFS"),
            sum("DAS") / sum("EDF"),
            sum("packed") / sum("DAS"),
        );
        let figure = Figure {
            title: "Utility by order, at 1.3 × the capacity".to_owned(),
            x_label: x_label.to_owned(),
            y_label: "sum of 1/length over the requests completed in time".to_owned(),
            groups: points.iter().map(|(name, ..)| name.clone()).collect(),
            series: all,
            kind: Kind::Lines,
            log_y: false,
        };
        page.draw(file, of, &figure, paper, &here)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_under_a_figure_within_its_width() {
        let figure = Figure {
            title: "t".to_owned(),
            x_label: "x".to_owned(),
            y_label: "y".to_owned(),
            groups: vec!["1".to_owned(), "2".to_owned()],
            series: vec![Series::new("s", vec![Some(1.0), Some(2.0)])],
            kind: Kind::Lines,
            log_y: false,
        };
        let plain = figure.svg().unwrap();
        let noted = with_notes(&plain, &["a < b & c ".repeat(60), "end".to_owned()]);
        assert!(noted.contains("a &lt; b &amp; c") && noted.contains(">end</text>"));
        assert!(noted.trim_end().ends_with("</svg>"));
        assert_eq!(noted.matches("</svg>").count(), 1);
        let height = |svg: &str| -> f64 {
            let at = svg.find("height=\"").unwrap() + 8;
            svg[at..at + svg[at..].find('"').unwrap()].parse().unwrap()
        };
        assert!(height(&noted) > height(&plain) + 60.0);
    }

    #[test]
    fn all_figures_are_drawn_with_any_valid_costs() {
        let folder = tempfile::tempdir().unwrap();
        let costs = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/costs.ron");
        let args = Args {
            costs: costs.into(),
            tcb_costs: costs.into(),
            figures: folder.path().to_owned(),
            requests: 1000,
            seed: 1,
        };
        run(args).unwrap();
        let page = std::fs::read_to_string(folder.path().join("serving.md")).unwrap();
        for line in page.lines().filter(|line| line.starts_with("![")) {
            let file = line.rsplit('(').next().unwrap().trim_end_matches(')');
            let svg = std::fs::read_to_string(folder.path().join(file)).unwrap();
            assert!(
                !svg.contains("NaN") && svg.contains("The paper: "),
                "{file}"
            );
        }
        assert_eq!(page.matches("![").count(), 14);
        // The page also contains table 4 of TurboTransformers.
        assert!(page.contains("| requests/s | naive | no batches | DP | packed |"));
    }

    #[test]
    fn decisions_of_a_scheduler_are_timed() {
        let mut timed = Timed {
            inner: scheduler("packed", &Settings::default()).unwrap(),
            shares: Vec::new(),
        };
        let costs = CostTable::parse(include_str!("../../examples/costs.ron")).unwrap();
        let decision = timed.decide(&View {
            now: Micros(0),
            waiting: [gemmule::schedule::Waiting::new(5, Micros(0))]
                .as_slice()
                .into(),
            lanes: &[gemmule::schedule::Lane {
                in_flight: 0,
                depth: 1,
                free_at: Micros(0),
                bytes: u64::MAX,
            }],
            costs: &costs,
        });
        assert!(decision.run.len() == 1 && timed.shares[0] > 0.0);
    }
}
