use std::process::ExitCode;

use super::{Outcome, human, print, table};
use crate::{
    EngineError,
    engine::{Threads, hub::Hub},
    jit::{DiskCache, Nvrtc, Target},
    machine::{Fit, Machine, Served},
    runtime::cuda::{Presence, probe},
};

pub(super) fn run() -> Outcome {
    let mut rows = table(&["part", "found", "how to fix"]);
    rows.add_row([
        "gemmule".to_owned(),
        format!("{}, {}", env!("CARGO_PKG_VERSION"), features()),
        String::new(),
    ]);
    let presence = probe();
    rows.add_row(match (presence.driver, presence.driver_version) {
        _ if presence.refused.is_some() => [
            "driver".into(),
            "not looked for".into(),
            presence.refused.iter().map(ToString::to_string).collect(),
        ],
        (true, Some((major, minor))) => [
            "driver".into(),
            format!("supports CUDA {major}.{minor}"),
            String::new(),
        ],
        (true, None) => [
            "driver".into(),
            "present, but reports no version".into(),
            "reinstall the driver".into(),
        ],
        (false, _) => [
            "driver".into(),
            "no libcuda".into(),
            "install the NVIDIA driver to use a GPU; the CPU works without it".into(),
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
    for device in &presence.devices {
        let part = format!("description of cuda:{}", device.ordinal);
        rows.add_row(match device.machine() {
            Ok((machine, served)) => {
                let file = format!("machines/{}.ron", machine.name);
                let found = match served {
                    Served::Own => format!("{file}; {}", fit(machine.fit)),
                    Served::Nearest => format!("{file}, of the nearest card; {}", fit(machine.fit)),
                };
                let advice = match (served, machine.fit) {
                    (Served::Own, Fit::Timings) => "",
                    _ => "`--tune quick` times kernels on this card",
                };
                [part, found, advice.to_owned()]
            }
            Err(error) => [part, "none".to_owned(), error.to_string()],
        });
    }
    let described: Vec<&str> = Machine::all()
        .map_err(EngineError::from)?
        .iter()
        .map(|m| m.name.as_str())
        .collect();
    rows.add_row([
        "cards".to_owned(),
        format!("{} are described, for --card", described.join(", ")),
        String::new(),
    ]);
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
            "optional; `gemmule-bench gemm` compares with it if it is present"
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
    rows.add_row(match Hub::from_env() {
        Ok(hub) => [
            "models of the hub".to_owned(),
            format!(
                "{}: {} in the cache",
                hub.cache.display(),
                hub.cached_models().len()
            ),
            String::new(),
        ],
        Err(error) => [
            "models of the hub".to_owned(),
            "none can be fetched".to_owned(),
            error.to_string(),
        ],
    });
    let (threads, advice) = match Threads::usual() {
        Ok(n) => (Some(n), String::new()),
        Err(error) => (None, EngineError::from(error).to_string()),
    };
    rows.add_row([
        "CPU".to_owned(),
        threads.map_or_else(String::new, |threads| {
            format!("{} threads", threads.count())
        }),
        advice,
    ]);
    let verdict = verdict(&presence, Nvrtc::find().is_ok());
    print(&format!(
        "{rows}\nNVRTC was searched for in:\n{log}\n{verdict}\n"
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Lists the optional features that this program was built with, and those that it was built without.
fn features() -> String {
    let all = [
        ("corpora", cfg!(feature = "corpora")),
        ("server", cfg!(feature = "server")),
        ("shared-cache", cfg!(feature = "shared-cache")),
    ];
    let named = |is_on: bool| {
        let names = all.iter().filter(|(_, own)| *own == is_on);
        names.map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
    };
    match (named(true), named(false)) {
        (on, off) if on.is_empty() => format!("without the features {off}"),
        (on, off) if off.is_empty() => format!("with the features {on}"),
        (on, off) => format!("with the features {on}, and without {off}"),
    }
}

/// Returns a sentence about the devices that work here. If the GPU does not work, the sentence
/// names the first missing component.
fn verdict(presence: &Presence, has_nvrtc: bool) -> &'static str {
    match (presence.driver, presence.devices.is_empty(), has_nvrtc) {
        (false, ..) => "Models run on the CPU. A GPU needs the NVIDIA driver.",
        (true, true, _) => "Models run on the CPU. The driver shows no GPU to this process.",
        (true, false, false) => {
            "Models run on the CPU, and compiled ones (`gemmule compile`) on the GPU. Others need NVRTC for the GPU."
        }
        (true, false, true) => "Models run on the GPU and on the CPU.",
    }
}

/// Describes how accurate the costs in a card's description are.
fn fit(fit: Fit) -> &'static str {
    match fit {
        Fit::Timings => "its costs were fitted to timings on it",
        Fit::Relative => "its costs were fitted on another card of its capability",
        Fit::DataSheet => "its costs are from its data sheet and not fitted",
    }
}
