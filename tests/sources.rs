//! The generated CUDA of every kernel that the project answers for.

#[path = "sources/class.rs"]
mod class;
mod common;
#[path = "sources/partials.rs"]
mod partials;
#[path = "sources/record.rs"]
mod record;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io::Write,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::LazyLock,
};

use class::{Class, classes, joined};
use gemmule::{
    codegen::{Codegen, Marks},
    engine::emit,
    jit::{DiskCache, Jit, Source, Target},
    kernels::KernelSpec,
    machine::Machine,
    measure::{Emitted, catalogue},
};
use partials::{Partials, Rendered};
use record::{Record, targets};

/// Every kernel of the catalogue, made once for all tests.
static EMITTED: LazyLock<Vec<Emitted>> = LazyLock::new(|| {
    let kernels = catalogue().expect("the shipped models compile");
    kernels.into_values().collect()
});

/// Their sources, in the same order.
static SOURCES: LazyLock<Vec<Source>> = LazyLock::new(render);

fn render() -> Vec<Source> {
    let kernels: Vec<KernelSpec> = EMITTED.iter().map(|e| e.kernel.clone()).collect();
    emit(&kernels).expect("every kernel renders")
}

/// Sources of one [`skeleton`](class::skeleton), with the texts of their partials.
static CLASSES: LazyLock<Vec<Class<'static>>> = LazyLock::new(|| classes(&EMITTED, &SOURCES));

/// The exemplar of each of them with its partials marked.
static MARKED: LazyLock<Vec<Source>> = LazyLock::new(|| {
    let by_symbol: HashMap<&str, &KernelSpec> = SOURCES
        .iter()
        .zip(EMITTED.iter())
        .map(|(source, emitted)| (source.symbol.as_str(), &emitted.kernel))
        .collect();
    let codegen = Codegen::marking_partials(Marks::DEFAULT).expect("the templates parse");
    let exemplars = CLASSES.iter().map(|class| {
        let kernel = by_symbol[class.exemplar().symbol.as_str()];
        codegen.source(kernel.as_kernel()).expect("it renders")
    });
    exemplars.collect()
});

/// Classes of sources with one outline. Their exemplars are reviewed, and compiled in every run.
static REVIEWED: LazyLock<Vec<Class<'static>>> = LazyLock::new(|| {
    let marked: HashMap<&str, &Source> = MARKED.iter().map(|s| (s.symbol.as_str(), s)).collect();
    joined(&CLASSES, |source| {
        let text = &marked[source.symbol.as_str()].text;
        Rendered::parse(text, Marks::DEFAULT).outline(&source.symbol)
    })
});

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

/// `kernels check` computes references once for each definition.
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

/// Compares one source of each class, the exemplar, with its reviewed snapshot. The sources of a class differ in symbol, numbers,
/// storage type and the renderings of partials alone. The snapshot is named after the exemplar's symbol and names the partials. Each
/// rendering of a partial is a snapshot in a folder of their own. The ledger and the record have the digest of every source.
#[test]
fn every_source_is_as_its_exemplar_was_reviewed() {
    const RENEW: &str =
        "`INSTA_UPDATE=always cargo test --test sources` renews exemplars; then read the diff";
    let marks = Marks::DEFAULT;
    let rendered: Vec<Rendered> = MARKED
        .iter()
        .map(|source| Rendered::parse(&source.text, marks))
        .collect();
    for (class, rendered) in CLASSES.iter().zip(&rendered) {
        assert_eq!(rendered.text(), class.exemplar().text);
    }
    let named = || {
        let symbols = MARKED.iter().map(|source| source.symbol.as_str());
        symbols.zip(&rendered)
    };
    let folder = class::folder();
    let existing = snapshots_in(&folder.join("partials"));
    let partials = Partials::of(named(), existing);

    let by_symbol: HashMap<&str, &Rendered> = named().collect();
    let exemplars = REVIEWED.iter().map(|class| {
        let symbol = &class.exemplar().symbol;
        (symbol.clone(), partials.shown(by_symbol[symbol.as_str()]))
    });
    let mut wrong = differences(&folder, &exemplars.collect());
    let partials = partials.snapshots(named());
    wrong.extend(differences(&folder.join("partials"), &partials));

    // The exemplar of every source, to look it up.
    let listed: BTreeMap<&str, &str> = REVIEWED
        .iter()
        .flat_map(|class| {
            let exemplar = class.exemplar().symbol.as_str();
            class
                .members
                .iter()
                .map(move |m| (m.source.symbol.as_str(), exemplar))
        })
        .collect();
    assert_eq!(listed.len(), SOURCES.len(), "each source is of one class");
    let list = Path::new(env!("CARGO_TARGET_TMPDIR")).join("exemplars.txt");
    let lines = listed
        .iter()
        .map(|(symbol, exemplar)| format!("{symbol} {exemplar}\n"));
    std::fs::write(&list, lines.collect::<String>()).expect("the folder is there");
    assert!(
        wrong.is_empty(),
        "{RENEW}; {} has the exemplar of every source:\n{}",
        list.display(),
        wrong.join("\n")
    );
}

/// Names of the snapshots in a folder, without the extension.
fn snapshots_in(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    entries
        .filter_map(|entry| {
            Some(
                entry
                    .ok()?
                    .file_name()
                    .to_str()?
                    .strip_suffix(".snap")?
                    .to_owned(),
            )
        })
        .collect()
}

/// Compares texts by name with the snapshots in a folder. Returns a line for each that differs, is missing or is left over.
fn differences(folder: &Path, texts: &BTreeMap<String, String>) -> Vec<String> {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(folder);
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    let existing = snapshots_in(folder);
    let mut wrong = Vec::new();
    for (name, text) in texts {
        let same = catch_unwind(AssertUnwindSafe(|| {
            settings.bind(|| insta::assert_snapshot!(name.as_str(), text.as_str()));
        }));
        match (same, existing.contains(name)) {
            (Ok(()), _) => {}
            (Err(_), true) => wrong.push(format!("{name} has changed")),
            (Err(_), false) => wrong.push(format!("{name} is missing")),
        }
    }
    let left_over = existing.iter().filter(|name| !texts.contains_key(*name));
    wrong.extend(left_over.map(|name| format!("{name} is no exemplar; delete it")));
    wrong
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
         `GEMMULE_RECORD=1 cargo test --test sources`: {gone:?}"
    );
}

/// Whether what compiles is to be written into the record.
fn is_recording() -> bool {
    std::env::var_os("GEMMULE_RECORD").is_some_and(|value| value == "1")
}

/// Compiles what the record does not have as it is now, and of each class the exemplar whether or not the record has it: for one of
/// its targets, another for each class, as a record that was written by hand would be seen by any of them.
#[test]
fn every_source_compiles_for_every_target_without_spills() {
    let nvrtc = common::nvrtc();
    let now = Record::of(nvrtc.version(), &EMITTED, &SOURCES);
    let record = match Record::read() {
        Err(_) if is_recording() => Record::default(),
        record => record.unwrap_or_else(|problem| panic!("{problem}")),
    };
    let missing = record.missing(&now);
    if !is_recording() && !missing.is_empty() {
        // Also where the test passes: it is why it takes long.
        let _ = writeln!(
            std::io::stderr(),
            "{} sources are not in snapshots/compiled.ron as they are; every run compiles them until \
             `GEMMULE_RECORD=1 cargo test --test sources` records them",
            missing.len()
        );
    }
    let exemplars: HashMap<&str, usize> = REVIEWED
        .iter()
        .enumerate()
        .map(|(nth, class)| (class.exemplar().symbol.as_str(), nth))
        .collect();
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
