use std::{collections::BTreeMap, path::PathBuf, process::ExitCode, str::FromStr, time::Instant};

use miette::{IntoDiagnostic, miette};
use rayon::prelude::*;

use super::{
    Outcome,
    ledger::{Checked, Ledger, today},
    print,
    progress::Bars,
    table,
};
use crate::{
    DeviceChoice,
    engine::{EngineError, emit},
    jit::{Jit, Target},
    kernels::{KernelSpec, trial::Trial},
    measure::{Emitted, catalogue},
    runtime::cuda::{Device, check_kernel},
};

#[derive(clap::Subcommand)]
pub(super) enum Command {
    /// Run every kernel on a GPU with all its test cases, and compare the results with its CPU reference
    Check(Args),
    /// List the symbols of all kernels that `check` covers, with the models that launch them
    List,
}

#[derive(clap::Args)]
pub(super) struct Args {
    /// CUDA device
    #[arg(long, default_value = "cuda:0")]
    device: DeviceChoice,
    /// Write the results to the ledger, which records the sources that have run on a GPU
    #[arg(long)]
    record: bool,
    /// File of the ledger
    #[arg(long, value_name = "FILE", default_value = "snapshots/gpu.ron")]
    ledger: PathBuf,
    /// Only check kernels whose current source is not in the ledger; existing entries are kept
    #[arg(long)]
    changed: bool,
    /// Only check the kernel with this symbol, or else all kernels whose symbol contains this text (repeat for several)
    #[arg(long, value_name = "TEXT", conflicts_with = "record")]
    only: Vec<String>,
    /// Skip kernels whose symbol contains this text (repeat for several)
    #[arg(long, value_name = "TEXT", conflicts_with = "record")]
    skip: Vec<String>,
    /// Only check part I of N of the kernels, to run several processes in parallel
    #[arg(long, value_name = "I/N", conflicts_with = "record")]
    part: Option<Part>,
    /// Only run cases with at most N tokens, for tools that make kernels slow, such as compute-sanitizer
    #[arg(long, value_name = "N", conflicts_with = "record")]
    max_tokens: Option<u64>,
    /// Seed of the random inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Every `of`-th kernel, starting with index `first`. Neighboring kernels are similar and take similar times, so this selection distributes
/// the time evenly among the parts.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Part {
    first: usize,
    of: usize,
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text
            .split_once('/')
            .and_then(|(part, of)| Some((part.parse().ok()?, of.parse().ok()?)));
        match numbers {
            Some((part, of)) if (1..=of).contains(&part) => Ok(Part { first: part - 1, of }),
            _ => Err("expected the number of a part and how many there are, for example 2/15; parts count from 1".into()),
        }
    }
}

/// Error: the arguments select no kernel to check. The variants are the reasons.
#[derive(Debug, PartialEq, thiserror::Error)]
enum Nothing {
    #[error(
        "no kernel has `{only}` in its symbol; expected a part of one of the {known} symbols that `gemmule kernels list` prints"
    )]
    Named { only: String, known: usize },
    #[error("--skip leaves none of the {asked} requested kernels; give it longer texts, or fewer")]
    Skipped { asked: usize },
    #[error(
        "{target} has the instructions of none of the {asked} requested kernels, so nothing can be checked on this card; `gemmule kernels list` prints all kernels"
    )]
    Launchable { target: Target, asked: usize },
    #[error(
        "part {} of {} has no kernel, because there are only {kernels}; use fewer parts, or select more kernels with a shorter --only", .part.first + 1, .part.of
    )]
    Part { part: Part, kernels: usize },
}

/// Selects kernels of a catalogue by the texts in `only`; without texts, selects all kernels. A text that is a full symbol selects only
/// this kernel. Any other text selects all kernels whose symbol contains it.
fn named(all: &BTreeMap<String, Emitted>, only: &[String]) -> Result<Vec<KernelSpec>, Nothing> {
    let known = all.len();
    let names = |text: &str, symbol: &str| match all.contains_key(text) {
        true => symbol == text,
        false => symbol.contains(text),
    };
    if let Some(unknown) = only
        .iter()
        .find(|text| !all.keys().any(|symbol| names(text, symbol)))
    {
        let only = unknown.clone();
        return Err(Nothing::Named { only, known });
    }
    let asked = |symbol: &str| only.is_empty() || only.iter().any(|text| names(text, symbol));
    let kernels = all.iter().filter(|(symbol, _)| asked(symbol));
    Ok(kernels.map(|(_, emitted)| emitted.kernel.clone()).collect())
}

/// Removes kernels whose symbol contains any of the texts `skip`.
fn without(mut kernels: Vec<KernelSpec>, skip: &[String]) -> Result<Vec<KernelSpec>, Nothing> {
    let asked = kernels.len();
    let skipped = |symbol: &str| skip.iter().any(|text| symbol.contains(text.as_str()));
    kernels.retain(|kernel| !skipped(&kernel.as_kernel().symbol()));
    match kernels.is_empty() {
        true => Err(Nothing::Skipped { asked }),
        false => Ok(kernels),
    }
}

/// Keeps the kernels that a target can run.
fn launchable(mut kernels: Vec<KernelSpec>, target: Target) -> Result<Vec<KernelSpec>, Nothing> {
    let asked = kernels.len();
    kernels.retain(|kernel| target.has(kernel.as_kernel().instructions()));
    match kernels.is_empty() {
        true => Err(Nothing::Launchable { target, asked }),
        false => Ok(kernels),
    }
}

/// Keeps the kernels of `part`, or all kernels if it is `None`.
fn of_part(kernels: Vec<KernelSpec>, part: Option<Part>) -> Result<Vec<KernelSpec>, Nothing> {
    let Some(part) = part else {
        return Ok(kernels);
    };
    if kernels.len() <= part.first {
        let kernels = kernels.len();
        return Err(Nothing::Part { part, kernels });
    }
    let of_part = kernels.into_iter().skip(part.first).step_by(part.of);
    Ok(of_part.collect())
}

pub(super) fn run(command: Command) -> Outcome {
    match command {
        Command::Check(args) => check(args, catalogue),
        Command::List => {
            for (symbol, emitted) in catalogue()? {
                print(&format!("{symbol} {}\n", emitted.models.join(" ")))?;
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn check(
    args: Args,
    catalogue: impl FnOnce() -> Result<BTreeMap<String, Emitted>, EngineError>,
) -> Outcome {
    let DeviceChoice::Cuda(ordinal) = args.device else {
        return Err(miette!(
            "kernels are checked on a CUDA device; give --device cuda:N"
        ));
    };
    let all = catalogue()?;
    let selected = named(&all, &args.only).and_then(|named| without(named, &args.skip));
    let selected = selected.into_diagnostic()?;
    let device = Device::open(ordinal).into_diagnostic()?;
    let target = device.target().into_diagnostic()?;
    let mut kernels = launchable(selected, target)
        .and_then(|kernels| of_part(kernels, args.part))
        .into_diagnostic()?;
    // Put kernels with the same reference next to each other.
    kernels.sort_by_cached_key(|kernel| kernel.as_kernel().definition());
    let mut sources = emit(&kernels)?;
    let mut ledger = Ledger::default();
    if args.changed {
        ledger = Ledger::still_true(&args.ledger, &sources)?;
        let known = |kernel: &KernelSpec| ledger.checked.contains_key(&kernel.as_kernel().symbol());
        kernels.retain(|kernel| !known(kernel));
        sources = emit(&kernels)?;
    }
    let n_known = ledger.checked.len();
    let bars = Bars::new();
    let began = Instant::now();
    let jit = Jit::open().into_diagnostic()?;
    let cubins = jit
        .compile_all(&sources, target, &|done, total| {
            bars.show("kernels", done, total)
        })
        .into_diagnostic()?;
    let compiled = began.elapsed();
    // Also list the kernels that have not run yet. If this run is interrupted, the ledger then has the results so far and names all other
    // kernels.
    ledger.deferred = deferred(&device, target, &all, &kernels);
    let mut failures = table(&[
        "kernel",
        "case",
        "tensor",
        "max error",
        "at",
        "got",
        "expected",
    ]);
    let mut n_failed = 0;
    let began = Instant::now();
    let definitions: Vec<&[KernelSpec]> = kernels
        .chunk_by(|a, b| a.as_kernel().definition() == b.as_kernel().definition())
        .collect();
    let trials_of = |kernels: &&[KernelSpec]| {
        let most = args.max_tokens.unwrap_or(u64::MAX);
        Trial::all(kernels[0].as_kernel(), args.seed, most)
    };
    // Computing references and comparing results on the host takes longer than the kernels take on the device. The host therefore processes
    // a group of definitions in parallel.
    const GROUP: usize = 32;
    let mut n_done = 0;
    for group in definitions.chunks(GROUP) {
        let trials = group
            .par_iter()
            .map(trials_of)
            .collect::<Result<Vec<_>, _>>()
            .into_diagnostic()?;
        let trials = group.iter().zip(&trials);
        let trials = trials.flat_map(|(kernels, trials)| kernels.iter().map(move |_| trials));
        let with_trials: Vec<_> = (n_done..).zip(trials).collect();
        let results: Vec<_> = with_trials
            .par_iter()
            .map(|&(i, trials)| {
                let began = Instant::now();
                let results = check_kernel(&device, &kernels[i], &cubins[i], trials);
                tracing::info!(
                    "{}: {} cases in {:.1?}",
                    cubins[i].symbol,
                    trials.len(),
                    began.elapsed()
                );
                (i, results)
            })
            .collect();
        n_done += results.len();
        for (i, result) in results {
            let symbol = &cubins[i].symbol;
            let results = match result {
                Ok(results) => results,
                Err(error) => {
                    n_failed += 1;
                    failures.add_row([symbol.clone(), error.to_string()]);
                    ledger.deferred.insert(symbol.clone(), error.to_string());
                    continue;
                }
            };
            if results.is_empty() {
                n_failed += 1;
                failures.add_row([symbol.as_str(), "no case is small enough for --max-tokens"]);
                continue;
            }
            let max_error = results.iter().map(|r| r.difference.max).fold(0.0, f32::max);
            let bad: Vec<_> = results.iter().filter(|r| !r.passed()).collect();
            n_failed += usize::from(!bad.is_empty());
            for r in &bad {
                let d = r.difference;
                failures.add_row([
                    symbol.clone(),
                    r.case.name.to_owned(),
                    r.tensor.to_owned(),
                    format!("{:.3e}", d.max),
                    d.at.to_string(),
                    d.got.to_string(),
                    d.want.to_string(),
                ]);
            }
            if bad.is_empty() {
                let checked = Checked {
                    sha256: sources[i].digest(),
                    card: device.info().name.clone(),
                    date: today(),
                    max_error,
                };
                ledger.checked.insert(symbol.clone(), checked);
                ledger.deferred.remove(symbol);
            } else {
                let why = "it did not agree with its reference".to_owned();
                ledger.deferred.insert(symbol.clone(), why);
            }
        }
        if args.record {
            ledger.write(&args.ledger)?;
        }
        bars.show("checks", n_done, kernels.len());
        // After a fault, the device is unusable in this process.
        if device.memory().is_err() {
            break;
        }
    }
    if n_failed > 0 {
        print(&format!("{failures}\n"))?;
    }
    let known = match args.changed {
        true => format!("; {n_known} more are in the ledger as they are"),
        false => String::new(),
    };
    print(&format!(
        "{} of {} kernels agree with their references on {} ({target}); compiled in {:.1} s ({} from the cache), checked in {:.1} s{known}\n",
        ledger.checked.len() - n_known,
        kernels.len(),
        device.info().name,
        compiled.as_secs_f64(),
        jit.stats().hits,
        began.elapsed().as_secs_f64()
    ))?;
    if args.record {
        ledger.write(&args.ledger)?;
        print(&format!("recorded in {}\n", args.ledger.display()))?;
    }
    Ok(if n_failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Returns every kernel that this run cannot check or has not checked yet, with the reason.
fn deferred(
    device: &Device,
    target: Target,
    all: &BTreeMap<String, Emitted>,
    kernels: &[KernelSpec],
) -> BTreeMap<String, String> {
    let mut deferred = BTreeMap::new();
    for (symbol, emitted) in all {
        if !target.has(emitted.kernel.as_kernel().instructions()) {
            let why = format!("{} lacks the instructions for it", device.info().name);
            deferred.insert(symbol.clone(), why);
        }
    }
    for kernel in kernels {
        let why = "the run was interrupted before it checked this kernel".to_owned();
        deferred.insert(kernel.as_kernel().symbol(), why);
    }
    deferred
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::representative;

    /// Returns the kernels of the catalogue that can be listed without compiling any model, which saves time.
    fn without_models() -> BTreeMap<String, Emitted> {
        let kernels = representative().into_iter().chain(KernelSpec::runtime());
        kernels
            .map(|kernel| {
                let models = Vec::new();
                (kernel.as_kernel().symbol(), Emitted { kernel, models })
            })
            .collect()
    }

    /// The command refuses the text of `--only` before it searches for a device, so this test needs no device.
    #[test]
    fn a_text_that_no_kernel_has_is_no_check_of_nothing() {
        let args = Args {
            device: DeviceChoice::Cuda(0),
            record: false,
            ledger: PathBuf::new(),
            changed: false,
            only: vec!["layer_nrom".to_owned()],
            skip: Vec::new(),
            part: None,
            max_tokens: None,
            seed: 1,
        };
        let error = check(args, || Ok(without_models())).unwrap_err();
        let known = without_models().len();
        assert_eq!(
            error.to_string(),
            format!(
                "no kernel has `layer_nrom` in its symbol; expected a part of one of the {known} symbols that `gemmule kernels list` prints"
            )
        );
    }

    fn some(has: &str) -> Vec<KernelSpec> {
        named(&without_models(), &[has.to_owned()]).unwrap()
    }

    #[test]
    fn parts_cover_every_kernel_once_and_none_is_empty() {
        let all = some("mean_pool_f16");
        assert!(all.len() > 2, "{}", all.len());
        let part = |text: &str| of_part(all.clone(), Some(text.parse().unwrap()));
        let mut found = [part("1/2").unwrap(), part("2/2").unwrap()].concat();
        assert!(all.iter().all(|kernel| found.contains(kernel)));
        assert_eq!(found.len(), all.len());
        found = of_part(all.clone(), None).unwrap();
        assert_eq!(found, all);
        let n = all.len();
        assert_eq!(part(&format!("{n}/{n}")).unwrap().len(), 1);
        let too_many = part(&format!("{}/{}", n + 1, n + 1)).unwrap_err();
        assert_eq!(
            too_many.to_string(),
            format!(
                "part {0} of {0} has no kernel, because there are only {n}; use fewer parts, or select more kernels with a shorter --only",
                n + 1
            )
        );
    }

    #[test]
    fn a_symbol_selects_one_kernel_and_other_texts_all_that_contain_them() {
        let all = without_models();
        let symbols = |only: &[&str]| -> Vec<String> {
            let only: Vec<String> = only.iter().map(|&text| text.to_owned()).collect();
            let kernels = named(&all, &only).unwrap();
            kernels
                .iter()
                .map(|kernel| kernel.as_kernel().symbol())
                .collect()
        };
        assert_eq!(symbols(&["advance"]), ["advance"]);
        let pools = symbols(&["mean_pool_f16"]);
        assert!(pools.len() > 2, "{pools:?}");
        assert_eq!(
            symbols(&["mean_pool_f16", "advance", &pools[0]]).len(),
            pools.len() + 1
        );
        let error = named(&all, &["advance".to_owned(), "no such".to_owned()]).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("no kernel has `no such` in its symbol"),
            "{error}"
        );
    }

    #[test]
    fn skipping_all_kernels_is_an_error() {
        let all = some("mean_pool_f16");
        let skip =
            |text: &str| without(all.clone(), &["none has this".to_owned(), text.to_owned()]);
        let rest = skip("_w768").unwrap();
        assert!(!rest.is_empty() && rest.len() < all.len());
        assert_eq!(
            skip("mean").unwrap_err().to_string(),
            format!(
                "--skip leaves none of the {} requested kernels; give it longer texts, or fewer",
                all.len()
            )
        );
    }

    #[test]
    fn kernels_that_the_card_cannot_run_are_an_error() {
        let hopper = some("wgmma");
        let ampere: Target = "sm_80".parse().unwrap();
        let asked = hopper.len();
        assert_eq!(
            launchable(hopper, ampere).unwrap_err().to_string(),
            format!(
                "sm_80 has the instructions of none of the {asked} requested kernels, so nothing can be checked on this card; `gemmule kernels list` prints all kernels"
            )
        );
    }
}
