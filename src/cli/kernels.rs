use std::{collections::BTreeMap, path::PathBuf, process::ExitCode, str::FromStr, time::Instant};

use miette::{IntoDiagnostic, Report, miette};
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
    engine::{catalogue, emit},
    jit::{Jit, Target},
    kernels::{KernelSpec, trial::Trial},
    runtime::cuda::{Device, check_kernel},
};

#[derive(clap::Subcommand)]
pub(super) enum Command {
    /// Run every kernel on all its cases on a GPU and compare with its CPU reference
    Check(Args),
    /// List every kernel that the project answers for
    List,
}

#[derive(clap::Args)]
pub(super) struct Args {
    /// The CUDA device
    #[arg(long, default_value = "cuda:0")]
    device: DeviceChoice,
    /// Write the ledger of what ran
    #[arg(long)]
    record: bool,
    /// Where the ledger is
    #[arg(long, value_name = "FILE", default_value = "snapshots/gpu.ron")]
    ledger: PathBuf,
    /// Only kernels whose source is not in the ledger as it is now; what is there stays
    #[arg(long)]
    changed: bool,
    /// Only the kernel with this symbol, or else kernels whose symbol contains this; may be given several times
    #[arg(long, value_name = "TEXT", conflicts_with = "record")]
    only: Vec<String>,
    /// No kernels whose symbol contains this; may be given several times
    #[arg(long, value_name = "TEXT", conflicts_with = "record")]
    skip: Vec<String>,
    /// Only the I-th of N parts of the kernels, for several processes side by side
    #[arg(long, value_name = "I/N", conflicts_with = "record")]
    part: Option<Part>,
    /// Only cases of at most so many tokens, for tools that make kernels slow, such as
    /// compute-sanitizer
    #[arg(long, value_name = "N", conflicts_with = "record")]
    most_tokens: Option<u64>,
    /// Seed of the random inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Every `of`-th kernel, from number `first` on, so that kernels much alike, which take much the same time, are
/// in different parts.
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

/// Why there is nothing to check: that is no success.
#[derive(Debug, PartialEq, thiserror::Error)]
enum Nothing {
    #[error(
        "no kernel has `{only}` in its symbol; expected a part of one of the {known} that `gemmule kernels list` prints"
    )]
    Named { only: String, known: usize },
    #[error(
        "--skip leaves none of the {asked} kernels that were asked for; give it longer texts, or fewer"
    )]
    Skipped { asked: usize },
    #[error(
        "{target} has the instructions of none of the {asked} kernels that were asked for, so that nothing can be checked on this card; `gemmule kernels list` prints all kernels"
    )]
    Launchable { target: Target, asked: usize },
    #[error(
        "part {} of {} has no kernel, as there are only {kernels} to share out; ask for fewer parts, or for more kernels with a shorter --only", .part.first + 1, .part.of
    )]
    Part { part: Part, kernels: usize },
}

/// The kernels of the catalogue that these texts name, or all if there is no text. A symbol names its kernel alone, any other text
/// all kernels whose symbol contains it.
fn named(only: &[String]) -> Result<Vec<KernelSpec>, Report> {
    let all = catalogue()?;
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
        return Err(Nothing::Named { only, known }).into_diagnostic();
    }
    let asked = |symbol: &str| only.is_empty() || only.iter().any(|text| names(text, symbol));
    let kernels = all.iter().filter(|(symbol, _)| asked(symbol));
    Ok(kernels.map(|(_, emitted)| emitted.kernel.clone()).collect())
}

/// Those of them whose symbol contains none of these texts.
fn without(mut kernels: Vec<KernelSpec>, skip: &[String]) -> Result<Vec<KernelSpec>, Nothing> {
    let asked = kernels.len();
    let skipped = |symbol: &str| skip.iter().any(|text| symbol.contains(text.as_str()));
    kernels.retain(|kernel| !skipped(&kernel.as_kernel().symbol()));
    match kernels.is_empty() {
        true => Err(Nothing::Skipped { asked }),
        false => Ok(kernels),
    }
}

/// Those of them that a target can run.
fn launchable(mut kernels: Vec<KernelSpec>, target: Target) -> Result<Vec<KernelSpec>, Nothing> {
    let asked = kernels.len();
    kernels.retain(|kernel| target.has(kernel.as_kernel().instructions()));
    match kernels.is_empty() {
        true => Err(Nothing::Launchable { target, asked }),
        false => Ok(kernels),
    }
}

/// Those of them that are in a part.
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
        Command::Check(args) => check(args),
        Command::List => {
            for (symbol, emitted) in catalogue()? {
                print(&format!("{symbol} {}\n", emitted.models.join(" ")))?;
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn check(args: Args) -> Outcome {
    let DeviceChoice::Cuda(ordinal) = args.device else {
        return Err(miette!(
            "kernels are checked on a CUDA device; give --device cuda:N"
        ));
    };
    let named = without(named(&args.only)?, &args.skip).into_diagnostic()?;
    let device = Device::open(ordinal).into_diagnostic()?;
    let target = device.target().into_diagnostic()?;
    let mut kernels = launchable(named, target)
        .and_then(|kernels| of_part(kernels, args.part))
        .into_diagnostic()?;
    // Those that have their references in common stand together.
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
    // What was not run yet stands in the ledger with the reason, so that a run that is cut off loses
    // nothing of what it found.
    ledger.deferred = deferred(&device, target, &kernels)?;
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
        let most = args.most_tokens.unwrap_or(u64::MAX);
        Trial::all(kernels[0].as_kernel(), args.seed, most)
    };
    // References are slow, and what the host does for a check takes longer than the kernel, so both
    // are done side by side for some definitions at a time.
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
                failures.add_row([symbol.as_str(), "no case has so few tokens"]);
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
        // After a fault the device answers nothing more in this process.
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

/// Every kernel that this run cannot check, and those that it will, until it has.
fn deferred(
    device: &Device,
    target: Target,
    kernels: &[KernelSpec],
) -> Result<BTreeMap<String, String>, Report> {
    let mut deferred = BTreeMap::new();
    for (symbol, emitted) in catalogue()? {
        if !target.has(emitted.kernel.as_kernel().instructions()) {
            let why = format!("{} has not the instructions for it", device.info().name);
            deferred.insert(symbol, why);
        }
    }
    for kernel in kernels {
        let why = "the run that was to check it was cut off before".to_owned();
        deferred.insert(kernel.as_kernel().symbol(), why);
    }
    Ok(deferred)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::representative;

    /// Those of the kernels that need no model, which are quicker to make than all that [`named`] looks at.
    fn some(has: &str) -> Vec<KernelSpec> {
        let mut some = representative();
        some.retain(|kernel| kernel.as_kernel().symbol().contains(has));
        some
    }

    #[test]
    fn parts_have_every_kernel_once_and_none_is_empty() {
        let all: Vec<KernelSpec> = named(&["mean_pool_f16".to_owned()]).unwrap();
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
                "part {0} of {0} has no kernel, as there are only {n} to share out; ask for fewer parts, or for more kernels with a shorter --only",
                n + 1
            )
        );
    }

    #[test]
    fn a_symbol_names_its_kernel_alone_and_other_texts_all_that_have_them() {
        let symbols = |only: &[&str]| -> Vec<String> {
            let only: Vec<String> = only.iter().map(|&text| text.to_owned()).collect();
            let kernels = named(&only).unwrap();
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
        let error = named(&["advance".to_owned(), "no such".to_owned()]).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("no kernel has `no such` in its symbol"),
            "{error}"
        );
    }

    #[test]
    fn skipping_leaves_the_others_and_all_is_an_error() {
        let all = some("mean_pool_f16");
        let skip =
            |text: &str| without(all.clone(), &["none has this".to_owned(), text.to_owned()]);
        let rest = skip("_w768").unwrap();
        assert!(!rest.is_empty() && rest.len() < all.len());
        assert_eq!(
            skip("mean").unwrap_err().to_string(),
            format!(
                "--skip leaves none of the {} kernels that were asked for; give it longer texts, or fewer",
                all.len()
            )
        );
    }

    #[test]
    fn kernels_of_another_card_are_not_checked_in_silence() {
        let hopper = some("wgmma");
        let ampere: Target = "sm_80".parse().unwrap();
        let asked = hopper.len();
        assert_eq!(
            launchable(hopper, ampere).unwrap_err().to_string(),
            format!(
                "sm_80 has the instructions of none of the {asked} kernels that were asked for, so that nothing can be checked on this card; `gemmule kernels list` prints all kernels"
            )
        );
    }
}
