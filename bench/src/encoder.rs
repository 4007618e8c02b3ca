//! `gemmule bench encoder`, extended by a comparison with PyTorch and by charts.

use std::{collections::BTreeMap, path::PathBuf, process::ExitCode};

use gemmule::{
    Engine,
    cli::{
        Bars, Outcome, align_right,
        bench::{
            encoder::{self, Row},
            sets::Set,
        },
        print, say, table, write_file, write_json,
    },
    engine::DeviceName,
    program::Program,
    tensor::Extents,
};
use miette::{IntoDiagnostic, Report, WrapErr, miette};
use serde::Serialize;

use crate::{
    figure::{Figure, Kind, Series},
    peers::{self, PeerTime, Peers},
};

#[derive(clap::Args)]
#[group(skip)]
pub(crate) struct Args {
    #[command(flatten)]
    ours: encoder::Args,
    /// Also time the peers (other implementations in PyTorch): auto (with python3, if it has
    /// PyTorch), off, or the path of a Python interpreter
    #[arg(long, value_name = "auto|off|PYTHON", default_value = "off", num_args = 0..=1, default_missing_value = "auto")]
    peers: peers::Choice,
    /// Peers to time: compile (Hugging Face's model with torch.compile on the padded batch), packed
    /// (BERT's layers on packed tokens, compiled, in a CUDA graph), floor (only the program's
    /// GEMMs, by cuBLAS)
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "compile,packed,floor"
    )]
    peer_variants: Vec<PeerVariant>,
    /// Draw the times of gemmule and the peers by set, as SVG; for a scan, microseconds per token
    #[arg(long, value_name = "FILE")]
    figure: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum PeerVariant {
    Compile,
    Packed,
    Floor,
}

impl PeerVariant {
    /// Returns the name of the variant in the peer script.
    fn name(self) -> &'static str {
        match self {
            PeerVariant::Compile => "compile",
            PeerVariant::Packed => "packed",
            PeerVariant::Floor => "floor",
        }
    }
}

/// Result of gemmule on one set, and the results of the peers (other implementations).
#[derive(Serialize)]
struct Compared {
    #[serde(flatten)]
    ours: Row,
    /// Time of each peer, by name.
    peers_ms: BTreeMap<String, f64>,
    /// Time of each peer divided by ours, by name. Above 1, ours is faster.
    ratios: BTreeMap<String, f64>,
    /// Our time divided by the time of the GEMMs alone with cuBLAS, which is a lower bound (`floor`).
    time_to_floor: Option<f64>,
    /// Time of the fastest peer that computes the whole encoder, divided by ours.
    best_peer_to_time: Option<f64>,
}

impl From<Row> for Compared {
    fn from(ours: Row) -> Self {
        Self {
            ours,
            peers_ms: BTreeMap::new(),
            ratios: BTreeMap::new(),
            time_to_floor: None,
            best_peer_to_time: None,
        }
    }
}

/// Request to the script that times the peers, `encoder_peers.py`.
#[derive(Serialize)]
struct Request<'a> {
    dtype: &'static str,
    config: serde_json::Value,
    contenders: Vec<&'static str>,
    warm_up: usize,
    runs: usize,
    /// Numbers of outputs and inputs of every linear layer that is computed for each token.
    weights: Vec<[u32; 2]>,
    sets: Vec<Lens<'a>>,
}

#[derive(Serialize)]
struct Lens<'a> {
    name: &'a str,
    lens: &'a [u32],
}

pub(crate) fn run(args: Args) -> Outcome {
    let ready = args.ours.prepare()?;
    let engine = &ready.engine;
    // Find PyTorch first. If the user names a Python without PyTorch, the error is then reported before anything is timed.
    let peers = find_peers(&args, engine)?;
    let rows = ready.time(&args.ours)?;
    let mut rows: Vec<Compared> = rows.into_iter().map(Compared::from).collect();
    let keep = |rows: &Vec<Compared>| match &args.ours.json {
        Some(file) => write_json(file, rows),
        None => Ok(()),
    };
    // Save our times before the peers are timed, which takes minutes and may be interrupted.
    keep(&rows)?;
    let mut remarks = Vec::new();
    if let Some((peers, config)) = &peers
        && !ready.sets.is_empty()
    {
        let request = Request {
            dtype: engine.precision().name(),
            config: config.clone(),
            contenders: args.peer_variants.iter().map(|v| v.name()).collect(),
            warm_up: args.ours.warm_up,
            runs: args.ours.runs,
            weights: weights(engine.program(), &ready.sets[0])?,
            sets: ready.sets.iter().map(lens).collect(),
        };
        let names: Vec<String> = ready.sets.iter().map(|s| s.name.clone()).collect();
        let bars = Bars::new();
        let answers = peers.time(&request, &names, &|done| {
            bars.show("peers", done, names.len())
        })?;
        join(&mut rows, &answers.times);
        remarks = answers.remarks;
    }
    print(&format!("{}\n", shown(&rows)))?;
    let beside = peers.map_or_else(String::new, |(p, _)| {
        format!(
            "; compared with {}; time/floor: our time over that of the GEMMs alone, by cuBLAS; best peer/time: the fastest other peer's time over ours: above 1, ours is faster",
            p.what
        )
    });
    let ours = rows.iter().map(|row| &row.ours);
    print(&ready.in_words(&args.ours, ours, &beside))?;
    for remark in remarks {
        say(&remark);
    }
    keep(&rows)?;
    if let Some(file) = &args.figure {
        let (by, draw): (_, fn(&[Compared], String) -> Figure) = match args.ours.scan.scan {
            Some(_) => ("tokens", curve),
            None => ("set", figure),
        };
        let title = format!(
            "Encoder by {by}: {}, {}",
            engine.precision(),
            engine.device()
        );
        write_file(file, draw(&rows, title).svg()?.as_bytes())?;
        print(&format!("drew {}\n", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the peers and the config.json that they need; `None` if there are no peers.
fn find_peers(args: &Args, engine: &Engine) -> Result<Option<(Peers, serde_json::Value)>, Report> {
    if args.peers == peers::Choice::Off {
        return Ok(None);
    }
    let DeviceName::Cuda(device) = engine.device() else {
        return Err(miette!(
            "the peers are timed on a CUDA device, and the model runs on the {}; give --device cuda:N, or --peers off",
            engine.device()
        ));
    };
    let config = args
        .ours
        .config()
        .into_diagnostic()
        .wrap_err("the peers are built from the model's config.json")?;
    let peers = Peers::find(&args.peers, peers::ENCODER, device.ordinal)?;
    Ok(peers.map(|peers| (peers, config)))
}

/// Returns the number of outputs and the number of inputs of each linear layer that processes all tokens of a batch. `set` contains the
/// sequence lengths of the batch.
fn weights(program: &Program, set: &Set) -> Result<Vec<[u32; 2]>, Report> {
    let batch = Extents::of(&set.lens).into_diagnostic()?;
    let mut all = Vec::new();
    for step in &program.steps {
        let Some((kernel, rows)) = step.launch(&batch).into_diagnostic()? else {
            continue;
        };
        let of_tokens = rows.rows == batch.tokens;
        all.extend(
            program.kernels[kernel]
                .as_kernel()
                .weight()
                .filter(|_| of_tokens),
        );
    }
    Ok(all)
}

fn lens(set: &Set) -> Lens<'_> {
    Lens {
        name: &set.name,
        lens: &set.lens,
    }
}

/// Adds the peers' times to the rows of their sets.
fn join(rows: &mut [Compared], times: &[PeerTime]) {
    for time in times {
        if let Some(row) = rows.get_mut(time.item) {
            let ms = time.us / 1e3;
            row.ratios.insert(time.who.clone(), ms / row.ours.ms);
            row.peers_ms.insert(time.who.clone(), ms);
        }
    }
    for row in rows {
        let floor = PeerVariant::Floor.name();
        row.time_to_floor = row.ratios.get(floor).map(|ratio| 1.0 / ratio);
        let whole = row.ratios.iter().filter(|(who, _)| *who != floor);
        row.best_peer_to_time = whole.map(|(_, ratio)| *ratio).min_by(f64::total_cmp);
    }
}

/// Returns the geometric mean of the values that are not `None`, if there are at least two.
fn geometric_mean(values: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    let logs: Vec<f64> = values.flatten().map(f64::ln).collect();
    let mean = logs.iter().sum::<f64>() / logs.len() as f64;
    (logs.len() > 1).then(|| mean.exp())
}

/// Returns the names of the peers with a time.
fn peers_of<'a>(rows: impl IntoIterator<Item = &'a Compared>) -> Vec<&'a str> {
    let mut names: Vec<&str> = rows
        .into_iter()
        .flat_map(|r| r.ratios.keys())
        .map(String::as_str)
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn shown(rows: &[Compared]) -> comfy_table::Table {
    let peers = peers_of(rows);
    let mut header = Row::HEADER.map(str::to_owned).to_vec();
    header.extend(peers.iter().map(|who| format!("{who} ms")));
    if !peers.is_empty() {
        header.extend(["time/floor", "best peer/time"].map(str::to_owned));
    }
    let mut shown = table(&header.iter().map(String::as_str).collect::<Vec<_>>());
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "—".to_owned());
    let ratio = |value: Option<f64>| or_dash(value.map(|r| format!("{r:.3}")));
    for row in rows {
        let mut cells = row.ours.cells().to_vec();
        for &who in &peers {
            cells.push(or_dash(row.peers_ms.get(who).map(|ms| format!("{ms:.4}"))));
        }
        if !peers.is_empty() {
            cells.extend([ratio(row.time_to_floor), ratio(row.best_peer_to_time)]);
        }
        shown.add_row(cells);
    }
    let of = |each: fn(&Compared) -> Option<f64>| rows.iter().map(each);
    let to_floor = || of(|r| r.time_to_floor);
    let to_peer = || of(|r| r.best_peer_to_time);
    let means = [geometric_mean(to_floor()), geometric_mean(to_peer())];
    if means.iter().any(Option::is_some) {
        let worst = [
            to_floor().flatten().max_by(f64::total_cmp),
            to_peer().flatten().min_by(f64::total_cmp),
        ];
        for (name, values) in [("geometric mean", means), ("worst", worst)] {
            let mut cells = vec![name.to_owned()];
            cells.resize(header.len() - 2, String::new());
            cells.extend(values.map(ratio));
            shown.add_row(cells);
        }
    }
    align_right(&mut shown, 1..header.len());
    shown
}

/// Draws bars by set, as in figures 10 and 11 of TurboTransformers and figure 14 of ByteTransformer.
fn figure(rows: &[Compared], title: String) -> Figure {
    let ours = rows.iter().map(|r| Some(r.ours.ms)).collect();
    let mut series = vec![Series::new("gemmule", ours)];
    for who in peers_of(rows) {
        let theirs = rows.iter().map(|r| r.peers_ms.get(who).copied());
        series.push(Series::new(peer_name(who), theirs.collect()));
    }
    Figure {
        title,
        x_label: "set of lengths".to_owned(),
        y_label: "time in milliseconds (lower is better)".to_owned(),
        groups: rows.iter().map(|r| r.ours.set.clone()).collect(),
        series,
        kind: Kind::Bars,
        log_y: true,
    }
}

/// Draws a line of the time per token over the number of tokens, so that a batch with a slow kernel stands out.
fn curve(rows: &[Compared], title: String) -> Figure {
    let mut rows: Vec<&Compared> = rows.iter().collect();
    rows.sort_by_key(|row| row.ours.tokens);
    let us_a_token = |row: &Compared, ms: f64| ms * 1e3 / row.ours.tokens as f64;
    let ours = rows.iter().map(|r| Some(us_a_token(r, r.ours.ms)));
    let mut series = vec![Series::new("gemmule", ours.collect())];
    for who in peers_of(rows.iter().copied()) {
        let ms = |row: &&Compared| row.peers_ms.get(who).map(|&ms| us_a_token(row, ms));
        series.push(Series::new(peer_name(who), rows.iter().map(ms).collect()));
    }
    Figure {
        title,
        x_label: "tokens of the batch".to_owned(),
        y_label: "microseconds per token (lower is better)".to_owned(),
        groups: rows.iter().map(|r| r.ours.tokens.to_string()).collect(),
        series,
        kind: Kind::Lines,
        log_y: false,
    }
}

fn peer_name(who: &str) -> String {
    match who {
        "floor" => "the GEMMs alone, by cuBLAS".to_owned(),
        who => format!("PyTorch, {who}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Compared> {
        let row = |set: &str, ms| {
            Compared::from(Row {
                set: set.to_owned(),
                tokens: 1000,
                ms,
                host_us: Some(15.0),
                bytes: 1,
            })
        };
        vec![row("short", 1.0), row("long", 4.0)]
    }

    fn times() -> Vec<PeerTime> {
        let time = |item, who: &str, us| PeerTime {
            item,
            who: who.to_owned(),
            us,
        };
        vec![
            time(0, "packed", 1500.0),
            time(1, "floor", 3000.0),
            time(1, "packed", 8000.0),
        ]
    }

    #[test]
    fn the_ratio_is_the_peers_time_over_ours() {
        let mut rows = rows();
        join(&mut rows, &times());
        assert_eq!(rows[0].ratios["packed"], 1.5);
        assert_eq!(
            (rows[1].ratios["packed"], rows[1].ratios["floor"]),
            (2.0, 0.75)
        );
        assert_eq!(
            (rows[0].time_to_floor, rows[1].time_to_floor),
            (None, Some(4.0 / 3.0))
        );
        // `floor` computes only the GEMMs and not the whole encoder, so it is not counted as a peer.
        assert_eq!(
            (rows[0].best_peer_to_time, rows[1].best_peer_to_time),
            (Some(1.5), Some(2.0))
        );
        let text = shown(&rows).to_string();
        assert!(text.contains("floor ms") && text.contains('—'), "{text}");
        // √(1.5 · 2).
        assert!(
            text.contains("geometric mean") && text.contains("1.732"),
            "{text}"
        );
        assert_eq!(geometric_mean([Some(2.0), None].into_iter()), None);
        assert!(!shown(&super::tests::rows()).to_string().contains("floor"));
    }

    #[test]
    fn bars_of_peers_are_beside_ours() {
        let mut rows = rows();
        join(&mut rows, &times());
        let figure = figure(&rows, String::new());
        let names: Vec<&str> = figure.series.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(
            names,
            ["gemmule", "the GEMMs alone, by cuBLAS", "PyTorch, packed"]
        );
        assert_eq!(figure.series[1].values, [None, Some(3.0)]);
        assert!(figure.svg().is_ok());
        assert!(super::figure(&[], String::new()).svg().is_ok());
    }

    #[test]
    fn a_scan_is_drawn_as_time_per_token_by_token_count() {
        let mut rows = rows();
        rows[0].ours.tokens = 2000;
        join(&mut rows, &times());
        let figure = curve(&rows, String::new());
        assert_eq!(figure.groups, ["1000", "2000"]);
        let values: Vec<_> = figure.series.iter().map(|s| s.values.clone()).collect();
        assert_eq!(values[0], [Some(4.0), Some(0.5)]);
        assert_eq!(values[1], [Some(3.0), None]);
        assert!(figure.svg().is_ok());
    }

    #[test]
    fn the_script_knows_every_variant() {
        for variant in <PeerVariant as clap::ValueEnum>::value_variants() {
            let definition = format!("def {}(request, lens)", variant.name());
            assert!(peers::ENCODER.text.contains(&definition), "{definition}");
        }
    }
}
