//! Tests of the dispatch tables. A table lists, for each launch of a program, its kernels and the batches that use them. There is a table
//! for each card with a description file and each shipped model.
//!
//! Changes of the kernel selection appear as diffs of snapshots. The snapshots contain all tables of some cards ([`is_read`]), one table in
//! fp8, the table of bert-base for each other card, and the digests of all other tables. These other tables are written to
//! `target/tmp/dispatch`. `INSTA_UPDATE=always cargo test --test kernels dispatch::` updates the snapshots.

use std::{
    collections::{BTreeSet, HashMap},
    fmt::Write as _,
    path::Path,
};

use gemmule::{
    DType, Format,
    engine::{CompileOptions, compile, description},
    jit::Target,
    kernels::KernelSpec,
    machine::{Fit, Instructions, Machine},
    measure::shipped_configs,
    program::{NEXT_LOGITS, Program},
    select::Batches,
    tensor::Extents,
};
use rayon::prelude::*;
use sha2::{Digest, Sha256};

/// Returns the launches of a program as text, each with its kernels and the ranges of batches that use them. Equal launches of several
/// layers are listed once.
fn table(program: &Program) -> String {
    let mut text = String::new();
    let mut order: Vec<(String, String)> = Vec::new();
    let mut counts: HashMap<(String, String), usize> = HashMap::new();
    for step in &program.steps {
        let pieces = step.name.split(|c: char| c.is_ascii_digit());
        let name = pieces
            .filter(|p| !p.is_empty())
            .collect::<Vec<_>>()
            .join("*");
        let mut parts = String::new();
        for entry in step.dispatch.entries() {
            let symbol = program.kernels[entry.choice].as_kernel().symbol();
            let batches = match entry.batches {
                Batches::ALL => "any".to_owned(),
                batches => batches.to_string(),
            };
            let _ = write!(parts, "\n  {batches:<28} {symbol}");
        }
        let key = (name, parts);
        let count = counts.entry(key.clone()).or_default();
        if *count == 0 {
            order.push(key);
        }
        *count += 1;
    }
    for key in order {
        let _ = writeln!(text, "{} x{}{}", key.0, counts[&key], key.1);
    }
    text
}

/// Returns the programs of a shipped model in f16 and f32.
fn programs(machine: &Machine, model: &str, config: &serde_json::Value) -> [Program; 2] {
    let description = description(model).expect("it is shipped");
    [DType::F16, DType::F32].map(|dtype| {
        let options = CompileOptions::new(dtype, machine.clone());
        let compiled = compile(&description, config, &options);
        compiled.expect("shipped models compile").program
    })
}

/// Returns the f16 program of a model that generates text, with a KV cache. `quantize` is the format of its weights, `None` for f16.
/// Returns `None` for models that do not generate text.
fn decoding_program(
    machine: &Machine,
    model: &str,
    config: &serde_json::Value,
    quantize: Option<Format>,
) -> Option<Program> {
    let description = description(model).expect("it is shipped");
    let outputs = vec![NEXT_LOGITS.to_owned()];
    let options = CompileOptions {
        cached: true,
        outputs: Some(outputs.clone()),
        quantize,
        ..CompileOptions::new(DType::F16, machine.clone())
    };
    let generates = description.output_names().contains(&outputs[0].as_str());
    generates.then(|| {
        let compiled = compile(&description, config, &options);
        compiled.expect("shipped models compile").program
    })
}

/// The dispatch tables of a model on a card.
struct Tables {
    machine: &'static Machine,
    model: &'static str,
    /// Programs in f16 and f32. `None` for models of several graphs, such as an encoder and a decoder: their tables are long,
    /// and contain the same kernels as other tables.
    plain: Option<String>,
    /// The program that generates text. `None` if the model generates no text, or if [`is_read`] is false for the card.
    decode: Option<String>,
    /// The program that generates text with packed (quantized) weights, for each format of the weights. Empty unless the model is
    /// [`PACKED`] and [`is_read`] is true for the card.
    packed: Vec<(Format, String)>,
    /// The program with weights in fp8. `None` except for the first model of [`IN_FP8`] on one card that computes E4M3 products with
    /// `mma.sync`.
    fp8: Option<String>,
}

/// Models whose programs with weights in fp8 are checked on all cards: one with norms after the residual sums, and one with gated
/// feed-forward networks.
const IN_FP8: [&str; 2] = ["bert-base", "modernbert-base"];

/// The only model with snapshots of its dispatch tables for packed (quantized) weights.
const PACKED: &str = "llama-3.2-1b";

impl Tables {
    /// Compiles and checks the programs of a model for a card, and formats their tables.
    fn of(
        machine: &'static Machine,
        model: &'static str,
        name: &str,
        config: &serde_json::Value,
    ) -> Self {
        let [f16, f32] = programs(machine, name, config);
        for program in [&f16, &f32] {
            check(machine, program, &format!("{model} on {}", machine.name));
        }
        let n = |program: &Program| program.kernels.len();
        let whole = description(name).expect("it is shipped");
        let is_whole = whole.outputs_without_source() == whole.output_names();
        let decoding = |format: Option<Format>| {
            let program = decoding_program(machine, name, config, format)?;
            check(machine, &program, &format!("{} decodes", machine.name));
            Some(format!("f16, {} kernels\n{}", n(&program), table(&program)))
        };
        let packed = |format| Some((format, decoding(Some(format))?));
        let is_packed = is_read(machine) && model == PACKED;
        let formats = [Format::FP8, Format::INT8, Format::INT4].into_iter();
        let fp8 = IN_FP8.contains(&model).then(|| {
            let options = CompileOptions {
                quantize: Some(Format::FP8),
                ..CompileOptions::new(DType::F16, machine.clone())
            };
            let program = compile(&whole, config, &options);
            let program = program.expect("shipped models compile").program;
            check(
                machine,
                &program,
                &format!("{model} in fp8 on {}", machine.name),
            );
            let products = program
                .kernels
                .iter()
                .filter(|kernel| multiplies_in_e4m3(kernel));
            assert_eq!(
                products.count() > 0,
                machine.has_e4m3_products(),
                "{}",
                machine.name
            );
            format!("f16, {} kernels\n{}", n(&program), table(&program))
        });
        let shows_fp8 = model == IN_FP8[0] && machine.name == crate::common::ada().name;
        Self {
            machine,
            model,
            plain: is_whole.then(|| {
                format!(
                    "f16, {} kernels\n{}\nf32, {} kernels\n{}",
                    n(&f16),
                    table(&f16),
                    n(&f32),
                    table(&f32)
                )
            }),
            decode: is_read(machine).then(|| decoding(None)).flatten(),
            packed: formats.filter(|_| is_packed).filter_map(packed).collect(),
            fp8: fp8.filter(|_| shows_fp8),
        }
    }
}

/// Returns whether a kernel multiplies inputs in E4M3 by weights in E4M3.
fn multiplies_in_e4m3(kernel: &KernelSpec) -> bool {
    match kernel {
        KernelSpec::Gemm(kernel) => kernel.problem.is_fp8(),
        KernelSpec::GemmWgmma(kernel) => kernel.problem.is_fp8(),
        KernelSpec::GemmStream(kernel) => kernel.problem.is_fp8(),
        _ => false,
    }
}

/// Returns whether the snapshots contain all tables of a card. They do for the default card, and for cards whose cost model is fitted to
/// timings.
fn is_read(machine: &Machine) -> bool {
    machine.fit == Fit::Timings || machine.name == crate::common::usual().name
}

#[test]
fn every_card_runs_its_reviewed_kernels_for_every_batch() {
    let configs = shipped_configs().expect("they are shipped");
    let machines = Machine::all().expect("the cards are described");
    let pairs: Vec<_> = machines
        .iter()
        .flat_map(|machine| configs.iter().map(move |shipped| (machine, shipped)))
        .collect();
    let all: Vec<Tables> = pairs
        .into_par_iter()
        .map(|(machine, (model, name, config))| Tables::of(machine, model, name, config))
        .collect();
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../../snapshots/dispatch");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    let mut names = BTreeSet::from(["digests.snap".to_owned()]);
    let mut review = |name: String, text: String| {
        settings.bind(|| insta::assert_snapshot!(name.clone(), text));
        names.insert(format!("{name}.snap"));
    };
    let mut digests = String::new();
    let written = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dispatch");
    std::fs::create_dir_all(&written).expect("the folder is there");
    for tables in all {
        let name = format!("{}.{}", tables.machine.name, tables.model);
        if let Some(text) = tables.decode {
            review(format!("{name}.decode"), text);
        }
        for (format, text) in tables.packed {
            review(format!("{name}.decode.{format}"), text);
        }
        if let Some(text) = tables.fp8 {
            review(format!("{name}.fp8"), text);
        }
        let Some(text) = tables.plain else {
            continue;
        };
        if is_read(tables.machine) || tables.model == "bert-base" {
            review(name, text);
            continue;
        }
        std::fs::write(written.join(format!("{name}.txt")), &text).expect("it is written");
        let digest = Sha256::digest(text.as_bytes());
        let digest: String = digest[..8].iter().map(|b| format!("{b:02x}")).collect();
        let _ = writeln!(digests, "{name} {digest}");
    }
    settings.bind(|| insta::assert_snapshot!("digests", digests));
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("snapshots/dispatch");
    for entry in std::fs::read_dir(folder).expect("the tables are there") {
        let name = entry
            .expect("an entry")
            .file_name()
            .to_string_lossy()
            .into_owned();
        assert!(
            names.contains(&name),
            "no card and model have the table {name}; delete it"
        );
    }
}

/// Checks a program for a card: that it is valid, that the card has the instructions of all kernels, and that the launches for several
/// batches are within the card's limits.
fn check(machine: &Machine, program: &Program, what: &str) {
    program
        .validate()
        .unwrap_or_else(|problem| panic!("{what}: {problem}"));
    let (major, minor) = machine.capability;
    let target =
        Target::for_capability(major, minor).expect("a card that is described has a target");
    for kernel in &program.kernels {
        let kernel = kernel.as_kernel();
        assert!(
            target.has(kernel.instructions()),
            "{what}: {}",
            kernel.symbol()
        );
    }
    // Numbers of tokens to check: a few fixed ones, the max number of tokens of a batch, and the bounds of all ranges of rows.
    let mut rows = vec![1, 63, 4097, Extents::MAX_TOKENS];
    for step in &program.steps {
        let ends = step
            .dispatch
            .covered()
            .into_iter()
            .filter_map(|b: Batches| b.rows.up_to);
        rows.extend(ends.flat_map(|end| [end, end + 1]));
    }
    rows.sort_unstable();
    rows.dedup();
    for tokens in rows {
        let longest = tokens.min(512);
        let batch = Extents {
            tokens,
            batch: tokens.div_ceil(longest),
            longest,
            pairs: tokens * longest,
            rows: tokens,
            ..Extents::default()
        };
        for step in &program.steps {
            let launch = step
                .launch(&batch)
                .unwrap_or_else(|e| panic!("{what}: {e}"));
            let Some((kernel, extents)) = launch else {
                continue;
            };
            let kernel = program.kernels[kernel].as_kernel();
            let geometry = kernel.launch(&extents, machine);
            let symbol = kernel.symbol();
            assert!(
                geometry.shared_bytes <= machine.shared_per_cta,
                "{what}: {symbol} {geometry:?}"
            );
            assert!(geometry.threads <= 1024, "{what}: {symbol} {geometry:?}");
            let ctas = u64::from(geometry.grid[0]) * u64::from(geometry.grid[1]);
            if is_persistent(kernel.template()) {
                assert!(
                    ctas <= u64::from(machine.sms),
                    "{what}: {symbol} {ctas} CTAs"
                );
            }
        }
    }
}

/// Returns whether the kernels of a template are persistent: at most one CTA per SM, which processes one tile after another.
fn is_persistent(template: &str) -> bool {
    ["gemm_wgmma", "gemm_residual_norm", "mha_wgmma_persistent"].contains(&template)
}

/// Checks programs for cards with SM counts that do not exist, because compilation must work for any number of SMs.
#[test]
fn cards_of_one_sm_and_of_ten_thousand_have_programs_too() {
    let (_, description, config) = shipped_configs().expect("they are shipped").remove(0);
    for described in Machine::all().expect("the cards are described") {
        for sms in [1, 10_000] {
            let machine = described.with_sms(sms);
            for program in programs(&machine, description, &config) {
                check(
                    &machine,
                    &program,
                    &format!("{sms} SMs as of {}", described.name),
                );
            }
        }
    }
    let hopper = Machine::all()
        .expect("cards")
        .iter()
        .filter(|m| m.instructions == Instructions::Hopper);
    assert!(hopper.count() >= 2);
}
