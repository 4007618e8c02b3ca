use std::process::ExitCode;

use super::{Outcome, human, print, table};
use crate::{
    DType,
    engine::{shipped_picks, shipped_problems, stale, target_of, threads},
    jit::{DiskCache, Nvrtc, Target},
    kernels::Instructions,
    runtime::cuda::probe,
    tune::Card,
};

pub(super) fn run() -> Outcome {
    let mut rows = table(&["part", "found", "how to mend"]);
    let presence = probe();
    rows.add_row(match (presence.driver, presence.driver_version) {
        _ if presence.refused.is_some() => [
            "driver".into(),
            "not looked for".into(),
            presence.refused.iter().map(ToString::to_string).collect(),
        ],
        (true, Some((major, minor))) => [
            "driver".into(),
            format!("serves CUDA {major}.{minor}"),
            String::new(),
        ],
        (true, None) => [
            "driver".into(),
            "there, but gives no version".into(),
            "install the driver again".into(),
        ],
        (false, _) => [
            "driver".into(),
            "no libcuda".into(),
            "install the NVIDIA driver to use a GPU; the CPU works without".into(),
        ],
    });
    if presence.driver && presence.devices.is_empty() {
        rows.add_row([
            "GPU",
            "the driver shows none",
            "check that a GPU is visible (CUDA_VISIBLE_DEVICES, container settings)",
        ]);
    }
    for device in &presence.devices {
        let (major, minor) = device.capability;
        let advice = match Target::for_capability(major, minor) {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        };
        rows.add_row([
            format!("GPU cuda:{}", device.ordinal),
            format!(
                "{}, sm_{major}{minor}, {} SMs, {}",
                device.name,
                device.n_sms,
                human(device.memory)
            ),
            advice,
        ]);
    }
    for (file, picks) in shipped_picks()? {
        let card = &picks.made.card;
        let instructions = target_of(card).map_or_else(Instructions::default, Target::instructions);
        let problems = shipped_problems(&[DType::F16, DType::BF16], instructions)?;
        let n_stale = stale(&picks, &problems)?.len();
        let (major, minor) = picks.made.nvrtc;
        rows.add_row([
            format!("picks {file}"),
            format!(
                "{card}, NVRTC {major}.{minor}: {} problems",
                picks.problems.len()
            ),
            match n_stale {
                0 => String::new(),
                n => format!(
                    "{n} are of kernels as they were, and not used: `gemmule tune` measures them"
                ),
            },
        ]);
    }
    for device in &presence.devices {
        let card = Card::from(device);
        if !shipped_picks()?.iter().any(|(_, p)| p.made.card == card) {
            rows.add_row([
                format!("picks for cuda:{}", device.ordinal),
                "none come with gemmule for this card: kernels are the cost model's guess"
                    .to_owned(),
                "`--tune quick` measures, once a card".to_owned(),
            ]);
        }
    }
    let mut log = String::new();
    match Nvrtc::find() {
        Ok(nvrtc) => {
            let (major, minor) = nvrtc.version();
            let targets: Vec<&str> = nvrtc.targets().iter().map(|t| t.name()).collect();
            rows.add_row([
                "NVRTC".to_owned(),
                format!(
                    "{major}.{minor}, {}; compiles for {}",
                    nvrtc.path().display(),
                    targets.join(", ")
                ),
                String::new(),
            ]);
            for looked in nvrtc.search_log() {
                log.push_str(&format!("  {looked}\n"));
            }
        }
        Err(error) => {
            rows.add_row([
                "NVRTC",
                "not found",
                "pip install nvidia-cuda-nvrtc, or set GEMMULE_NVRTC to the library; artifacts run without it",
            ]);
            log.push_str(&format!("  {error}\n"));
        }
    }
    let lt = if presence.cublas_lt {
        "there"
    } else {
        "not found"
    };
    rows.add_row([
        "cuBLASLt",
        lt,
        if presence.cublas_lt {
            ""
        } else {
            "nothing needs it; `gemmule-bench gemm` compares with it where it is"
        },
    ]);
    match DiskCache::open_default() {
        Ok(cache) => {
            let usage = cache.usage().map_or_else(
                |error| error.to_string(),
                |usage| format!("{} cubins, {}", usage.n_entries, human(usage.bytes)),
            );
            let advice = cache
                .check_writable()
                .err()
                .map(|e| e.to_string())
                .unwrap_or_default();
            rows.add_row([
                "cache".to_owned(),
                format!("{}: {usage}", cache.path().display()),
                advice,
            ]);
        }
        Err(error) => {
            rows.add_row(["cache".to_owned(), "none".to_owned(), error.to_string()]);
        }
    }
    let (threads, advice) = match threads() {
        Ok(n) => (Some(n), String::new()),
        Err(error) => (None, error.to_string()),
    };
    rows.add_row([
        "CPU".to_owned(),
        threads.map_or_else(String::new, |n| format!("{n} threads")),
        advice,
    ]);
    print(&format!("{rows}\nwhere NVRTC was looked for:\n{log}"))?;
    Ok(ExitCode::SUCCESS)
}
