//! The generated CUDA of every kernel that the project answers for.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use gemmule::{
    engine::{Emitted, catalogue, emit},
    jit::{DiskCache, Jit, Source, Target},
    kernels::KernelSpec,
};

fn emitted() -> Vec<Emitted> {
    catalogue()
        .expect("the shipped models compile")
        .into_values()
        .collect()
}

fn sources(of: &[Emitted]) -> Vec<Source> {
    let kernels: Vec<KernelSpec> = of.iter().map(|e| e.kernel.clone()).collect();
    emit(&kernels).expect("every kernel renders")
}

#[test]
fn every_source_is_cuda_without_headers_or_directives() {
    let emitted = emitted();
    assert!(
        emitted.len() > 300,
        "the catalogue has only {} kernels",
        emitted.len()
    );
    for (emitted, source) in emitted.iter().zip(sources(&emitted)) {
        let text = &source.text;
        for left_over in ["{{", "{%", "#include"] {
            assert!(!text.contains(left_over), "{}: {left_over}", source.symbol);
        }
        assert!(text.contains(&format!("{}(", source.symbol)), "{text}");
        for param in emitted.kernel.as_kernel().params() {
            let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
            let n_uses = words.filter(|&word| word == param.name).count();
            assert!(
                n_uses >= 2,
                "{}: `{}` is not used",
                source.symbol,
                param.name
            );
        }
    }
}

/// Kernels are started early where the card can: then one that has not waited reads what is not
/// there yet, and one whose blocks all leave before they wait stands for kernels that still run.
#[test]
fn every_kernel_waits_for_earlier_ones_before_any_of_its_blocks_can_leave() {
    const WAIT: &str = "wait_for_earlier_kernels();";
    for source in sources(&emitted()) {
        let (_, body) = source
            .text
            .split_once("extern \"C\" __global__")
            .expect("a kernel");
        let wait = body.find(WAIT);
        let wait = wait.unwrap_or_else(|| panic!("{} never calls {WAIT}", source.symbol));
        assert!(
            !body[..wait].contains("return;"),
            "{}: a block may leave before {WAIT}",
            source.symbol
        );
    }
}

/// `kernels check` computes references once for each definition.
#[test]
fn kernels_of_one_definition_have_the_same_parameters_and_cases() {
    let mut by_definition = BTreeMap::new();
    let mut n_shared = 0;
    for emitted in emitted() {
        let kernel = emitted.kernel.as_kernel();
        let said = format!("{:?} {:?}", kernel.params(), kernel.cases());
        let first = by_definition
            .entry(kernel.definition())
            .or_insert_with(|| said.clone());
        assert_eq!(*first, said, "{}", kernel.definition());
        n_shared += 1;
    }
    assert!(by_definition.len() < n_shared, "no two kernels share one");
}

#[test]
fn kernels_that_differ_have_different_symbols() {
    let mut by_symbol: Vec<(String, KernelSpec)> = Vec::new();
    for kernel in gemmule::kernels::representative() {
        let symbol = kernel.as_kernel().symbol();
        if let Some((_, other)) = by_symbol.iter().find(|(s, _)| *s == symbol) {
            assert_eq!(*other, kernel, "two kernels are named {symbol}");
        }
        by_symbol.push((symbol, kernel));
    }
    let words = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    assert!(by_symbol.iter().all(|(s, _)| s.chars().all(words)));
}

#[test]
fn rendering_gives_the_same_bytes_every_time() {
    let emitted = emitted();
    assert_eq!(sources(&emitted), sources(&emitted));
}

/// One snapshot for every kernel that a shipped model launches.
#[test]
fn sources_of_the_shipped_models_are_as_reviewed() {
    let of_models: Vec<Emitted> = emitted()
        .into_iter()
        .filter(|e| !e.models.is_empty())
        .collect();
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../snapshots/cuda");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    let mut names = BTreeSet::new();
    settings.bind(|| {
        for source in sources(&of_models) {
            insta::assert_snapshot!(source.symbol.clone(), source.text);
            names.insert(format!("{}.snap", source.symbol));
        }
    });
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("snapshots/cuda");
    for entry in std::fs::read_dir(folder).expect("the snapshots are there") {
        let name = entry
            .expect("an entry")
            .file_name()
            .to_string_lossy()
            .into_owned();
        assert!(
            names.contains(&name),
            "no kernel has the snapshot {name}; delete it"
        );
    }
}

#[test]
fn every_source_compiles_for_every_target_without_spills() {
    let emitted = emitted();
    let sources = sources(&emitted);
    let nvrtc = common::nvrtc();
    let cache = DiskCache::at(&std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("cubins"));
    let jit = Jit::new(nvrtc, Some(cache));
    let mut bad = Vec::new();
    for target in Target::ALL {
        let for_target: Vec<Source> = emitted
            .iter()
            .zip(&sources)
            .filter(|(e, _)| target.has(e.kernel.as_kernel().instructions()))
            .map(|(_, source)| source.clone())
            .collect();
        let cubins = jit
            .compile_all(&for_target, target, &|_, _| ())
            .expect("the source compiles");
        for cubin in cubins {
            match cubin.report {
                Some(report) if report.spills() => {
                    bad.push(format!("{} {target}: {report:?}", cubin.symbol));
                }
                None => bad.push(format!("{} {target}: no report", cubin.symbol)),
                Some(_) => {}
            }
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

#[test]
fn no_launch_needs_more_shared_memory_than_the_smallest_card_for_it_has() {
    for emitted in emitted() {
        let kernel = emitted.kernel.as_kernel();
        let least = Target::ALL
            .iter()
            .filter(|t| t.has(kernel.instructions()))
            .map(|t| t.max_shared_bytes())
            .min()
            .expect("there are targets");
        for case in kernel.cases() {
            let extents = gemmule::tensor::Extents::of(&case.lens).expect("a batch");
            let launch = kernel.launch(&extents.with_rows(kernel.check_rows(&extents)));
            assert!(launch.shared_bytes as usize <= least, "{}", kernel.symbol());
            assert!(launch.threads <= 1024 && launch.grid.iter().all(|&n| n > 0));
        }
    }
}
