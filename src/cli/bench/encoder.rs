use std::{collections::BTreeMap, path::PathBuf, process::ExitCode, time::Duration};

use miette::{IntoDiagnostic, Report, WrapErr, miette};
use serde::Serialize;

use super::{
    super::{
        Outcome, align_right, human,
        model::{Runnable, chosen_by},
        print,
        progress::Bars,
        say, since_start, table, write_file,
    },
    figure::{Figure, Kind, Series},
    peers::{self, PeerTime, Peers},
    sets::{self, Set},
};
use crate::{
    Batch, EngineError,
    engine::{DeviceName, Engine},
    kernels::trial::uniform,
};

/// Before each set, ours and the peers': under lasting load the card is at the limit of its power and its
/// clock falls, so that a set would be slower for what ran before it.
const REST: Duration = Duration::from_millis(500);

#[derive(clap::Args)]
pub(in crate::cli) struct Args {
    #[command(flatten)]
    model: Runnable,
    /// Sets of lengths as JSON, {"encoder": [{"name": …, "lens": […]}, …]}, instead of the
    /// project's own
    #[arg(long, value_name = "FILE")]
    workloads: Option<PathBuf>,
    /// Names of the sets to time; all of them otherwise
    #[arg(long, value_delimiter = ',')]
    sets: Vec<String>,
    /// PyTorch beside ours, in the same call: auto (python3, if it has PyTorch), off, or a Python
    #[arg(long, value_name = "auto|off|PYTHON", default_value = "off", num_args = 0..=1, default_missing_value = "auto")]
    peers: peers::Choice,
    /// compile: Hugging Face's model under torch.compile on the padded batch; packed: BERT's layers
    /// on packed tokens, compiled, in a CUDA graph; floor: nothing but the GEMMs, by cuBLAS
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "compile,packed,floor"
    )]
    peer_variants: Vec<PeerVariant>,
    /// Write one row a set: set, tokens, ms, and those of the peers
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the times by set, ours beside the peers', as SVG
    #[arg(long, value_name = "FILE")]
    figure: Option<PathBuf>,
    #[arg(long, default_value_t = 8)]
    warm_up: usize,
    #[arg(long, default_value_t = 60, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    runs: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum PeerVariant {
    Compile,
    Packed,
    Floor,
}

impl PeerVariant {
    /// As the script names it.
    fn name(self) -> &'static str {
        match self {
            PeerVariant::Compile => "compile",
            PeerVariant::Packed => "packed",
            PeerVariant::Floor => "floor",
        }
    }
}

#[derive(Serialize)]
struct Row {
    set: String,
    tokens: u64,
    ms: f64,
    /// Microseconds of the host, from the batch to the last launch enqueued.
    host_us: Option<f64>,
    /// By peer: its time.
    peers_ms: BTreeMap<String, f64>,
    /// By peer: its time over ours; above 1, ours is faster.
    ratios: BTreeMap<String, f64>,
    /// Our time over that of the GEMMs alone, by cuBLAS.
    time_to_floor: Option<f64>,
    /// The time of the fastest peer that computes the whole encoder over ours.
    best_peer_to_time: Option<f64>,
    /// Bytes of intermediate tensors.
    #[serde(skip)]
    bytes: u64,
}

/// What the peers are asked for.
#[derive(Serialize)]
struct Request<'a> {
    dtype: &'static str,
    config: serde_json::Value,
    contenders: Vec<&'static str>,
    warm_up: usize,
    runs: usize,
    sets: Vec<Lens<'a>>,
}

#[derive(Serialize)]
struct Lens<'a> {
    name: &'a str,
    lens: &'a [u32],
}

pub(in crate::cli) fn run(args: Args) -> Outcome {
    let sets = sets::named(sets::load(args.workloads.as_deref())?, &args.sets)?;
    let engine = Runnable::build(args.model.builder()?.outputs(["last_hidden_state"]))?;
    let started = first_result(&engine, &sets)?;
    // Asked before anything is timed: a Python that was named and has no PyTorch ends the run.
    let peers = find_peers(&args, &engine)?;
    let (sets, skipped) = served(sets, engine.limits().longest);
    let mut rows = time(&args, &engine, &sets)?;
    let keep = |rows: &[_]| match &args.json {
        Some(file) => write_file(file, &serde_json::to_vec_pretty(rows).into_diagnostic()?),
        None => Ok(()),
    };
    // PyTorch takes minutes: what was timed is kept where it is cut off.
    keep(&rows)?;
    let mut remarks = Vec::new();
    if let Some((peers, config)) = &peers
        && !sets.is_empty()
    {
        let request = Request {
            dtype: engine.program().dtype.name(),
            config: config.clone(),
            contenders: args.peer_variants.iter().map(|v| v.name()).collect(),
            warm_up: args.warm_up,
            runs: args.runs,
            sets: sets
                .iter()
                .map(|s| Lens {
                    name: &s.name,
                    lens: &s.lens,
                })
                .collect(),
        };
        let names: Vec<String> = sets.iter().map(|s| s.name.clone()).collect();
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
            "; beside it {}; time/floor: our time over that of the GEMMs alone, by cuBLAS; best peer/time: the fastest other peer's time over ours: above 1, ours is faster",
            p.what
        )
    });
    print(&format!(
        "{}, {}; median of {} runs after half a second of rest and {} to warm up, ids to last hidden state{beside}\n",
        engine.device(),
        engine.program().dtype,
        args.runs,
        args.warm_up
    ))?;
    if let Some(line) = chosen_by(&engine) {
        print(&format!("kernels: {line}\n"))?;
    }
    print(&started)?;
    for line in &skipped {
        print(&format!("{line}\n"))?;
    }
    for remark in remarks {
        say(&remark);
    }
    keep(&rows)?;
    if let Some(file) = &args.figure {
        let title = format!(
            "Encoder by set: {}, {}",
            engine.program().dtype,
            engine.device()
        );
        write_file(file, figure(&rows, title).svg()?.as_bytes())?;
        print(&format!("drew {}\n", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the first set once and says when after the process started its result was there.
fn first_result(engine: &Engine, sets: &[Set]) -> Result<String, Report> {
    let Some(set) = served(sets.to_vec(), engine.limits().longest)
        .0
        .into_iter()
        .next()
    else {
        return Ok(String::new());
    };
    engine.session()?.run(&set.batch(&engine.limits())?)?;
    let seconds = since_start().as_secs_f64();
    let times = engine.load_times();
    let part = |time: Duration| time.as_secs_f64();
    Ok(format!(
        "first result, of {}, {seconds:.3} s after the start: program {:.3} s, choosing kernels {:.3} s, source {:.3} s, {} kernels compiled and {} from the cache {:.3} s, weights {:.3} s\n",
        set.name,
        part(times.compile),
        part(times.tune),
        part(times.emit),
        times.compiled,
        times.cached,
        part(times.jit),
        part(times.weights),
    ))
}

/// The peers, and the sizes that they need.
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
        .model
        .config()
        .into_diagnostic()
        .wrap_err("the peers are built from the model's config.json")?;
    let peers = Peers::find(&args.peers, peers::ENCODER, device.ordinal)?;
    Ok(peers.map(|peers| (peers, config)))
}

/// The sets that the model's position table serves, and a line for each of the others.
fn served(sets: Vec<Set>, limit: Option<u32>) -> (Vec<Set>, Vec<String>) {
    let limit = limit.unwrap_or(u32::MAX);
    let (served, longer): (Vec<Set>, Vec<Set>) =
        sets.into_iter().partition(|set| set.longest() <= limit);
    let skipped = longer.iter().map(|set| {
        format!(
            "skipped {}: its longest sequence has {} tokens, and the model's position table serves {limit}",
            set.name,
            set.longest()
        )
    });
    (served, skipped.collect())
}

fn time(args: &Args, engine: &Engine, sets: &[Set]) -> Result<Vec<Row>, Report> {
    let mut session = engine.session()?;
    let limits = engine.limits();
    let bars = Bars::new();
    let mut rows = Vec::new();
    for set in sets {
        let mut state = 1;
        let ids = (0..set.tokens())
            .map(|_| limits.token_id(uniform(&mut state)))
            .collect();
        let batch = Batch::from_packed(ids, &set.lens).map_err(EngineError::from)?;
        std::thread::sleep(REST);
        let timing = session.time(&batch, args.warm_up, args.runs)?;
        rows.push(Row {
            set: set.name.clone(),
            tokens: set.tokens(),
            ms: timing.median().into(),
            host_us: timing.host_median().map(Into::into),
            peers_ms: BTreeMap::new(),
            ratios: BTreeMap::new(),
            time_to_floor: None,
            best_peer_to_time: None,
            bytes: engine.bytes_needed(&batch)?,
        });
        bars.show("sets", rows.len(), sets.len());
    }
    Ok(rows)
}

/// Puts the peers' times into the rows of their sets.
fn join(rows: &mut [Row], times: &[PeerTime]) {
    for time in times {
        if let Some(row) = rows.get_mut(time.item) {
            let ms = time.us / 1e3;
            row.ratios.insert(time.who.clone(), ms / row.ms);
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

/// The geometric mean over the sets that have a value, if there are two or more.
fn geometric_mean(values: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    let logs: Vec<f64> = values.flatten().map(f64::ln).collect();
    let mean = logs.iter().sum::<f64>() / logs.len() as f64;
    (logs.len() > 1).then(|| mean.exp())
}

/// Peers that have a time, by name.
fn peers_of(rows: &[Row]) -> Vec<&str> {
    let mut names: Vec<&str> = rows
        .iter()
        .flat_map(|r| r.ratios.keys())
        .map(String::as_str)
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn shown(rows: &[Row]) -> comfy_table::Table {
    let peers = peers_of(rows);
    let mut header: Vec<String> = ["set", "tokens", "ms", "tokens/s", "host µs", "activations"]
        .map(str::to_owned)
        .to_vec();
    header.extend(peers.iter().map(|who| format!("{who} ms")));
    if !peers.is_empty() {
        header.extend(["time/floor", "best peer/time"].map(str::to_owned));
    }
    let mut shown = table(&header.iter().map(String::as_str).collect::<Vec<_>>());
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "—".to_owned());
    let ratio = |value: Option<f64>| or_dash(value.map(|r| format!("{r:.3}")));
    for row in rows {
        let mut cells = vec![
            row.set.clone(),
            row.tokens.to_string(),
            format!("{:.4}", row.ms),
            format!("{:.0}", row.tokens as f64 / row.ms * 1e3),
            or_dash(row.host_us.map(|us| format!("{us:.1}"))),
            human(row.bytes),
        ];
        for &who in &peers {
            cells.push(or_dash(row.peers_ms.get(who).map(|ms| format!("{ms:.4}"))));
        }
        if !peers.is_empty() {
            cells.extend([ratio(row.time_to_floor), ratio(row.best_peer_to_time)]);
        }
        shown.add_row(cells);
    }
    let to_floor = geometric_mean(rows.iter().map(|r| r.time_to_floor));
    let to_peer = geometric_mean(rows.iter().map(|r| r.best_peer_to_time));
    if to_floor.is_some() || to_peer.is_some() {
        let mut cells = vec!["geometric mean".to_owned()];
        cells.resize(header.len() - 2, String::new());
        cells.extend([ratio(to_floor), ratio(to_peer)]);
        shown.add_row(cells);
    }
    align_right(&mut shown, 1..header.len());
    shown
}

/// Bars by set (figures 10 and 11 of TurboTransformers, 14 of ByteTransformer).
fn figure(rows: &[Row], title: String) -> Figure {
    let ours = rows.iter().map(|r| Some(r.ms)).collect();
    let mut series = vec![Series::new("gemmule", ours)];
    for who in peers_of(rows) {
        let theirs = rows.iter().map(|r| r.peers_ms.get(who).copied());
        series.push(Series::new(format!("PyTorch, {who}"), theirs.collect()));
    }
    Figure {
        title,
        x_label: "set of lengths".to_owned(),
        y_label: "time in milliseconds (lower is better)".to_owned(),
        groups: rows.iter().map(|r| r.set.clone()).collect(),
        series,
        kind: Kind::Bars,
        log_y: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Row> {
        let row = |set: &str, ms| Row {
            set: set.to_owned(),
            tokens: 1000,
            ms,
            host_us: Some(15.0),
            peers_ms: BTreeMap::new(),
            ratios: BTreeMap::new(),
            time_to_floor: None,
            best_peer_to_time: None,
            bytes: 1,
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
        // The floor computes less than the encoder, and is no peer of it.
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
    fn bars_of_peers_stand_beside_ours() {
        let mut rows = rows();
        join(&mut rows, &times());
        let figure = figure(&rows, String::new());
        let names: Vec<&str> = figure.series.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["gemmule", "PyTorch, floor", "PyTorch, packed"]);
        assert_eq!(figure.series[1].values, [None, Some(3.0)]);
        assert!(figure.svg().is_ok());
        assert!(super::figure(&[], String::new()).svg().is_ok());
    }

    #[test]
    fn sets_beyond_the_position_table_are_skipped_with_the_reason() {
        let set = |name: &str, lens: &[u32]| Set {
            name: name.to_owned(),
            lens: lens.to_vec(),
        };
        let sets = vec![set("fits", &[512, 3]), set("long", &[7, 513])];
        let (kept, skipped) = served(sets.clone(), Some(512));
        assert_eq!(kept.len(), 1);
        assert_eq!(
            skipped,
            [
                "skipped long: its longest sequence has 513 tokens, and the model's position table serves 512"
            ]
        );
        assert_eq!(served(sets, None).0.len(), 2);
    }

    #[test]
    fn the_script_knows_every_variant() {
        for variant in <PeerVariant as clap::ValueEnum>::value_variants() {
            let definition = format!("def {}(request, lens)", variant.name());
            assert!(peers::ENCODER.text.contains(&definition), "{definition}");
        }
    }
}
