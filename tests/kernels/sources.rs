//! Tests of the generated CUDA source of every kernel in the catalogue.

mod cover;
mod partials;
mod record;
mod review;
mod skeleton;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    io::Write,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::LazyLock,
};

use crate::catalogue::{EMITTED, SOURCES, render};
use cover::{Rendering, chosen};
use gemmule::{
    codegen::{Codegen, Marks},
    jit::{DiskCache, Jit, Source, Target},
    kernels::KernelSpec,
    machine::Machine,
    measure::Emitted,
};
use partials::{Rendered, stem};
use rayon::prelude::*;
use record::{Record, targets};
use review::review;

/// The sources of all kernels in the catalogue, with marks at the start and the end of each partial (a template that other templates
/// include).
static MARKED: LazyLock<Vec<Source>> = LazyLock::new(|| {
    let codegen = Codegen::marking_partials(Marks::DEFAULT).expect("the templates parse");
    let source = |emitted: &Emitted| codegen.source(emitted.kernel.as_kernel());
    let sources = EMITTED.par_iter().map(|e| source(e).expect("it renders"));
    sources.collect()
});

/// All different texts of templates and partials in the sources. Kernels of `representative()` come before kernels that only shipped models
/// use. Within each group, short symbols come first, because they belong to the simplest kernels.
static RENDERINGS: LazyLock<Vec<Rendering>> = LazyLock::new(|| {
    let representative: HashSet<String> = gemmule::kernels::representative()
        .iter()
        .map(|kernel| kernel.as_kernel().symbol())
        .collect();
    let mut sources: Vec<(bool, &Source, &Emitted)> = MARKED
        .iter()
        .zip(EMITTED.iter())
        .map(|(source, emitted)| (!representative.contains(&source.symbol), source, emitted))
        .collect();
    sources.sort_by_key(|(is_of_model, source, _)| {
        (*is_of_model, source.symbol.len(), &source.symbol)
    });
    let mut found = HashSet::new();
    let mut parts = Vec::new();
    for (is_of_model, source, emitted) in sources {
        let template = emitted.kernel.as_kernel().template();
        let rendered = Rendered::parse(template, &source.text, Marks::DEFAULT);
        let texts = rendered.parts().into_iter();
        let new = texts.filter(|part| found.insert(part.clone()));
        parts.extend(new.map(|(path, text)| (path, text, source.symbol.as_str(), is_of_model)));
    }
    let parts = parts.into_par_iter();
    parts
        .map(|(path, text, symbol, is_of_model)| Rendering::new(path, text, symbol, is_of_model))
        .collect()
});

/// For each path of a template or partial, the renderings that are chosen for review.
static REVIEWED: LazyLock<BTreeMap<&str, Vec<&Rendering>>> = LazyLock::new(|| chosen(&RENDERINGS));

#[test]
fn every_source_is_cuda_without_headers_or_directives() {
    assert!(
        EMITTED.len() > 300,
        "the catalogue has only {} kernels",
        EMITTED.len()
    );
    for (emitted, source) in EMITTED.iter().zip(SOURCES.iter()) {
        let text = &source.text;
        for left_over in ["{{", "{%", "#include"] {
            assert!(!text.contains(left_over), "{}: {left_over}", source.symbol);
        }
        let kernel = text.find(&format!("{}(", source.symbol));
        let kernel = &text[kernel.unwrap_or_else(|| panic!("{text}"))..];
        for param in emitted.kernel.as_kernel().params() {
            let in_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let is_word = |&(at, name): &(usize, &str)| {
                !kernel[..at].ends_with(in_word) && !kernel[at + name.len()..].starts_with(in_word)
            };
            // The first occurrence of the name is in the kernel's signature, so a used parameter has a second one.
            let mut words = kernel.match_indices(param.name).filter(is_word);
            assert!(
                words.nth(1).is_some(),
                "{}: `{}` is not used",
                source.symbol,
                param.name
            );
        }
    }
}

/// With programmatic dependent launch, a kernel may start before the previous kernel is complete. A kernel that does not wait would read
/// data that is not written yet. If all CTAs of a kernel exited before waiting, the next kernel could start before the previous kernel is
/// complete.
#[test]
fn every_kernel_waits_for_earlier_ones_before_any_of_its_blocks_can_leave() {
    const WAIT: &str = "griddepcontrol_wait();";
    for source in SOURCES.iter() {
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

/// `gemmule kernels check` computes the reference results only once for all kernels with the same `definition`.
#[test]
fn kernels_of_one_definition_have_the_same_parameters_and_cases() {
    let mut by_definition = BTreeMap::new();
    let mut n_shared = 0;
    for emitted in EMITTED.iter() {
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
    assert_eq!(render(), *SOURCES);
}

/// Snapshots show a template and its partials separately. Together they must be the whole source.
#[test]
fn every_source_consists_of_its_template_and_partials() {
    for (marked, source) in MARKED.iter().zip(SOURCES.iter()) {
        let rendered = Rendered::parse("", &marked.text, Marks::DEFAULT);
        assert_eq!(rendered.text(), source.text, "{}", source.symbol);
    }
}

/// Compares the renderings chosen for review with the snapshots. Renderings that differ only in numbers or types count as equal, so only
/// one of them is shown. Changes of the others are detected by the digests of whole sources, in the ledger (`snapshots/gpu.ron`) and in the
/// record (`snapshots/compiled.ron`).
#[test]
fn every_line_of_a_source_is_in_a_reviewed_snapshot_with_the_lines_before_and_after_it() {
    const RENEW: &str = "`INSTA_UPDATE=always cargo test --test kernels sources::` renews snapshots; then read the diff";
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("snapshots/cuda");
    let mut unexpected = snapshots_in(&folder);
    let mut settings = insta::Settings::clone_current();
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    let mut wrong = Vec::new();
    for (path, renderings) in REVIEWED.iter() {
        let (into, name) = match path.strip_prefix("partials/") {
            None => (folder.clone(), (*path).to_owned()),
            Some(_) => (folder.join("partials"), stem(path).to_owned()),
        };
        unexpected.remove(&into.join(format!("{name}.snap")));
        settings.set_snapshot_path(into);
        let same = catch_unwind(AssertUnwindSafe(|| {
            settings.bind(|| insta::assert_snapshot!(name.as_str(), review(renderings)));
        }));
        if same.is_err() {
            wrong.push(format!("{path} has changed"));
        }
    }
    let left_over = unexpected.iter().map(|file| file.display());
    wrong.extend(left_over.map(|file| format!("{file} shows no template; delete it")));
    assert!(wrong.is_empty(), "{RENEW}:\n{}", wrong.join("\n"));
}

/// Returns the snapshots in the folder and in its subfolder for partials.
fn snapshots_in(folder: &Path) -> BTreeSet<PathBuf> {
    let folders = [folder.to_owned(), folder.join("partials")];
    let entries = folders
        .iter()
        .flat_map(|folder| std::fs::read_dir(folder).expect("the folder is there"));
    let files = entries.map(|entry| entry.expect("it can be read").path());
    files
        .filter(|file| file.extension().is_some_and(|e| e == "snap"))
        .collect()
}

#[test]
fn the_record_of_what_compiled_has_no_source_that_is_gone() {
    if is_recording() {
        return;
    }
    let symbols: BTreeSet<&str> = SOURCES.iter().map(|s| s.symbol.as_str()).collect();
    let record = Record::read().unwrap_or_else(|problem| panic!("{problem}"));
    let recorded = record.compiled.keys();
    let gone: Vec<&String> = recorded.filter(|s| !symbols.contains(s.as_str())).collect();
    assert!(
        gone.is_empty(),
        "snapshots/compiled.ron names sources that are gone; renew it with \
         `GEMMULE_RECORD=1 cargo test --test kernels sources::`: {gone:?}"
    );
}

/// Returns whether compiled sources are to be written to the record.
fn is_recording() -> bool {
    std::env::var_os("GEMMULE_RECORD").is_some_and(|value| value == "1")
}

/// Compiles the sources whose current form is not in the record. To detect a record that was edited by hand, also compiles the sources of
/// all snapshots, each for only one target.
#[test]
fn every_source_compiles_for_every_target_without_spills() {
    let nvrtc = crate::common::nvrtc();
    let now = Record::of(nvrtc.version(), &EMITTED, &SOURCES);
    let record = match Record::read() {
        Err(_) if is_recording() => Record::default(),
        record => record.unwrap_or_else(|problem| panic!("{problem}")),
    };
    let missing = record.missing(&now);
    if !is_recording() && !missing.is_empty() {
        // Print this even if the test passes, because it explains why the test takes long.
        let _ = writeln!(
            std::io::stderr(),
            "{} sources are not in snapshots/compiled.ron as they are; every run compiles them until \
             `GEMMULE_RECORD=1 cargo test --test kernels sources::` records them",
            missing.len()
        );
    }
    let exemplars: BTreeSet<&str> = REVIEWED.values().flatten().map(|r| r.symbol).collect();
    let exemplars: HashMap<&str, usize> = exemplars.into_iter().zip(0..).collect();
    let is_wanted = |emitted, symbol: &str, target| {
        let all = targets(emitted);
        let of_exemplar = exemplars.get(symbol).map(|nth| all[nth % all.len()]);
        all.contains(&target) && (missing.contains(symbol) || of_exemplar == Some(target))
    };

    let cache = DiskCache::at(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("cubins"));
    let jit = Jit::new(nvrtc, Some(cache));
    let mut bad = Vec::new();
    for target in Target::ALL {
        let for_target: Vec<Source> = EMITTED
            .iter()
            .zip(SOURCES.iter())
            .filter(|(e, s)| is_wanted(e, s.symbol.as_str(), target))
            .map(|(_, source)| source.clone())
            .collect();
        let cubins = jit
            .compile_all(&for_target, target, &|_, _| ())
            .unwrap_or_else(|error| panic!("{error}"));
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
    if is_recording() {
        now.write();
    }
}

#[test]
fn no_launch_needs_more_shared_memory_than_the_cards_for_it_have() {
    let machines = Machine::all().expect("the cards are described");
    for emitted in EMITTED.iter() {
        let kernel = emitted.kernel.as_kernel();
        let least = Target::ALL
            .iter()
            .filter(|t| t.has(kernel.instructions()))
            .map(|t| t.max_shared_bytes())
            .min()
            .expect("there are targets");
        for case in kernel.cases() {
            let extents = gemmule::tensor::Extents::of(&case.lens).expect("a batch");
            let extents = extents.with_rows(kernel.check_rows(&extents));
            for machine in machines {
                let (major, minor) = machine.capability;
                let target = Target::for_capability(major, minor).expect("it has a target");
                if !target.has(kernel.instructions()) {
                    continue;
                }
                let launch = kernel.launch(&extents, machine);
                assert!(launch.shared_bytes as usize <= least, "{}", kernel.symbol());
                assert!(launch.shared_bytes <= machine.shared_per_cta);
                assert!(launch.threads <= 1024 && launch.grid.iter().all(|&n| n > 0));
            }
        }
    }
}
