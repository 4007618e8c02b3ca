//! Checks the rules for sources that ARCHITECTURE.md states: each room (a folder of `src/`) uses only rooms above it, files are short, and
//! sources name no model families or cards.

use std::{
    fs,
    path::{Path, PathBuf},
};

use gemmule::machine::Machine;

/// Rooms from top to bottom. `names` and `files` are helpers without dependencies, which any room may use.
const ORDER: [&str; 26] = [
    "names", "files", "search", "tensor", "ops", "graph", "model", "passes", "machine", "kernels",
    "plan", "schedule", "simulate", "codegen", "select", "program", "jit", "runtime", "text",
    "heads", "generate", "engine", "measure", "serve", "http", "cli",
];

/// Exceptions to [`ORDER`]: a room, and the rooms above it that it must not use.
const FORBIDDEN: [(&str, &[&str]); 19] = [
    ("search", &["names", "files"]),
    ("ops", &["names", "files"]),
    (
        "machine",
        &[
            "files", "search", "tensor", "ops", "graph", "model", "passes",
        ],
    ),
    ("kernels", &["graph", "model", "passes"]),
    ("model", &["passes", "plan"]),
    ("passes", &["codegen"]),
    ("plan", &["kernels", "graph", "model", "passes", "tensor"]),
    (
        "schedule",
        &[
            "files", "search", "machine", "kernels", "graph", "model", "passes", "plan",
        ],
    ),
    (
        "simulate",
        &[
            "names", "files", "search", "machine", "kernels", "graph", "model", "passes", "plan",
        ],
    ),
    ("serve", &["kernels", "graph", "passes"]),
    (
        "http",
        &[
            "kernels", "graph", "passes", "plan", "codegen", "select", "program", "jit", "runtime",
            "text", "heads", "generate", "engine",
        ],
    ),
    ("codegen", &["graph", "model", "passes", "plan"]),
    ("select", &["graph", "model", "passes", "plan", "codegen"]),
    (
        "jit",
        &["select", "graph", "passes", "program", "model", "plan"],
    ),
    ("runtime", &["passes", "model"]),
    (
        "text",
        &[
            "graph", "passes", "machine", "kernels", "plan", "codegen", "select", "jit",
        ],
    ),
    (
        "heads",
        &[
            "names", "files", "search", "tensor", "ops", "graph", "model", "passes", "machine",
            "kernels", "plan", "schedule", "simulate", "codegen", "select", "program", "jit",
            "runtime",
        ],
    ),
    (
        "generate",
        &[
            "heads", "graph", "model", "passes", "machine", "codegen", "select", "jit", "text",
        ],
    ),
    ("program", &["model", "passes", "codegen"]),
];

fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("src is readable") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") {
            into.push(path);
        }
    }
}

/// Returns the first segment of every `crate::` path in a source.
fn named(text: &str) -> Vec<String> {
    let mut rooms = Vec::new();
    for (at, _) in text.match_indices("crate::") {
        let rest = &text[at + "crate::".len()..];
        if let Some(group) = rest.strip_prefix('{') {
            let mut depth = 0;
            let mut item = String::new();
            for c in group.chars() {
                match c {
                    '{' => depth += 1,
                    '}' if depth == 0 => break,
                    '}' => depth -= 1,
                    ',' if depth == 0 => rooms.push(std::mem::take(&mut item)),
                    _ if depth == 0 => item.push(c),
                    _ => {}
                }
            }
            rooms.push(item);
        } else {
            rooms.push(
                rest.chars()
                    .take_while(|c| c.is_alphanumeric() || *c == '_')
                    .collect(),
            );
        }
    }
    rooms
        .into_iter()
        .filter_map(|r| r.trim().split("::").next().map(str::to_owned))
        .collect()
}

#[test]
fn every_folder_is_a_room() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let entries = fs::read_dir(src).expect("src is readable");
    let mut folders: Vec<String> = entries
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.is_dir())
        .filter_map(|path| Some(path.file_name()?.to_str()?.to_owned()))
        .collect();
    folders.sort_unstable();
    // `names` is a single file, not a folder.
    let mut rooms: Vec<&str> = ORDER.into_iter().filter(|room| *room != "names").collect();
    rooms.sort_unstable();
    assert_eq!(folders, rooms);
}

#[test]
fn no_file_is_longer_than_600_lines_and_no_template_than_250() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["src", "crates"] {
        sources(&root.join(folder), &mut files);
    }
    let mut templates = Vec::new();
    for folder in ["templates", "templates/partials"] {
        let entries = fs::read_dir(root.join(folder)).expect("the templates are there");
        let paths = entries.map(|entry| entry.expect("an entry").path());
        templates.extend(paths.filter(|path| path.is_file()));
    }
    let n_lines = |path: &PathBuf| fs::read_to_string(path).map_or(0, |text| text.lines().count());
    let of = |files: Vec<PathBuf>, max| files.into_iter().filter(move |path| n_lines(path) > max);
    let long: Vec<PathBuf> = of(files, 600).chain(of(templates, 250)).collect();
    assert!(long.is_empty(), "{long:?}");
}

#[test]
fn rooms_use_only_rooms_above_them() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    let mut wrong = Vec::new();
    let mut n_uses = 0;
    for file in files {
        let inside = file.strip_prefix(&src).expect("below src");
        let first = inside
            .iter()
            .next()
            .and_then(|p| p.to_str())
            .unwrap_or_default();
        let room = first.trim_end_matches(".rs");
        let Some(at) = ORDER.iter().position(|r| *r == room) else {
            continue;
        };
        let text = fs::read_to_string(&file).expect("a source file");
        // Leave out unit tests, which may use any room.
        let text = text.split("#[cfg(test)]").next().unwrap_or_default();
        if inside.iter().any(|p| p == "tests" || p == "tests.rs") {
            continue;
        }
        for used in named(text) {
            let Some(used_at) = ORDER.iter().position(|r| *r == used) else {
                continue;
            };
            n_uses += 1;
            let forbidden = FORBIDDEN
                .iter()
                .any(|(r, list)| *r == room && list.contains(&used.as_str()));
            if used_at > at || forbidden {
                wrong.push(format!(
                    "{} (room `{room}`) uses `{used}`",
                    inside.display()
                ));
            }
        }
    }
    assert!(
        n_uses > 50,
        "the search found only {n_uses} uses, so it looks in the wrong place"
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_source_branches_on_a_family_of_models() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for src in ["src", "crates/gemmule-cpu/src", "bench/src"] {
        sources(&root.join(src), &mut files);
    }
    for file in files {
        let text = fs::read_to_string(&file).expect("a source file");
        for (n, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let branches = ["==", "=>", "if ", "contains(", "starts_with("]
                .iter()
                .any(|b| code.contains(b));
            for family in [
                "\"bert\"",
                "\"roberta\"",
                "\"distilbert\"",
                "\"albert\"",
                "\"electra\"",
                "\"xlm-roberta\"",
                "\"camembert\"",
                "\"gpt2\"",
                "\"llama\"",
                "\"mistral\"",
                "\"qwen2\"",
                "\"qwen3\"",
                "\"phi3\"",
                "\"olmo2\"",
                "\"olmo3\"",
                "\"eurobert\"",
                "\"starcoder2\"",
                "\"stablelm\"",
                "\"phi\"",
                "\"smollm3\"",
                "\"granite\"",
                "\"opt\"",
                "\"gpt_neox\"",
                "\"gptj\"",
                "\"falcon\"",
                "\"cohere\"",
                "\"openai_gpt\"",
                "\"gpt_bigcode\"",
                "\"gpt_neo\"",
                "\"exaone\"",
                "\"exaone4\"",
                "\"seed_oss\"",
                "\"ernie4_5\"",
                "\"helium\"",
                "\"hunyuan_v1_dense\"",
                "\"arcee\"",
                "\"nemotron\"",
                "\"glm\"",
                "\"glm4\"",
                "\"olmo\"",
                "\"xglm\"",
                "\"biogpt\"",
                "\"cohere2\"",
                "\"mpt\"",
                "\"blenderbot\"",
                "\"blenderbot_small\"",
                "\"blenderbot-small\"",
                "\"roberta_prelayernorm\"",
                "\"roberta-prelayernorm\"",
                "\"data2vec-text\"",
                "\"megatron_bert\"",
                "\"megatron-bert\"",
                "\"rembert\"",
                "\"modernbert_decoder\"",
                "\"modernbert-decoder\"",
                "\"internlm3\"",
                "\"openai-gpt\"",
                "\"bloom\"",
                "\"marian\"",
                "\"bart\"",
                "\"bart_classifier\"",
                "\"mbart\"",
                "\"m2m_100\"",
                "\"pegasus\"",
                "\"t5\"",
                "\"mt5\"",
                "\"umt5\"",
                "\"mpnet\"",
                "\"modernbert\"",
                "\"nomic_bert\"",
                "\"vae\"",
                "\"static_embedding\"",
                "\"sparse_static_embedding\"",
                "\"jina_bert\"",
                "\"xlm_roberta_flash\"",
                "\"xlm_roberta_xl\"",
                "\"xlm-roberta-xl\"",
                "\"gte\"",
                "\"new\"",
                "\"gemma\"",
                "\"gemma2\"",
                "\"gemma3_text\"",
                "\"clip\"",
                "\"clip_text\"",
                "\"deberta\"",
                "\"roformer\"",
                "\"neobert\"",
                "\"deberta_v2\"",
                "\"deberta-v2\"",
            ] {
                assert!(
                    !(branches && code.contains(family)),
                    "{}:{} branches on {family}",
                    file.display(),
                    n + 1
                );
            }
        }
    }
}

/// Returns, for every `match` in a source, its line number and the lines directly inside its braces. Lines inside nested braces are left
/// out.
fn arms(text: &str) -> Vec<(usize, Vec<&str>)> {
    let mut open: Vec<Option<(usize, Vec<&str>)>> = Vec::new();
    let mut closed = Vec::new();
    for (n, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        if let Some(Some((_, lines))) = open.last_mut() {
            lines.push(code.trim_start());
        }
        let mut is_match = code.contains("match ");
        for c in code.chars() {
            match c {
                '{' => open.push(std::mem::take(&mut is_match).then(|| (n + 1, Vec::new()))),
                '}' => closed.extend(open.pop().flatten()),
                _ => {}
            }
        }
    }
    closed
}

/// Ensures that a match handles a new storage type explicitly. With a wildcard arm, the compiler would not report the missing case.
#[test]
fn every_match_over_storage_types_names_each_of_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    sources(&root.join("bench/src"), &mut files);
    let (mut wrong, mut n_matches) = (Vec::new(), 0);
    for file in files {
        let text = fs::read_to_string(&file).expect("a source file");
        for (line, arms) in arms(&text) {
            let is_over_types =
                |arm: &&str| arm.starts_with("DType::") || arm.starts_with("Element::");
            if arms.iter().any(is_over_types) {
                n_matches += 1;
                if arms.iter().any(|arm| arm.starts_with("_ ")) {
                    wrong.push(format!("{}:{line}", file.display()));
                }
            }
        }
    }
    assert!(n_matches > 20, "the search found only {n_matches} matches");
    assert!(wrong.is_empty(), "wildcard arms: {}", wrong.join(", "));
}

/// Phrases that are not allowed in comments and texts, because they are hard to understand. CONTRIBUTING.md describes how to write.
const PHRASES: [&str; 10] = [
    "// What ",
    "// Of ",
    "// Those ",
    "// Who ",
    "// As ",
    "so many",
    "So many",
    " behind ",
    "by not a bit",
    "which is what",
];

#[test]
fn comments_and_texts_are_plain_english() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    sources(&root.join("crates"), &mut files);
    sources(&root.join("bench/src"), &mut files);
    templates(&root.join("templates"), &mut files);
    let (mut wrong, mut n_lines) = (Vec::new(), 0);
    for file in files {
        let text = fs::read_to_string(&file).expect("a source file");
        for (n, line) in text.lines().enumerate() {
            n_lines += 1;
            // Normalize the markers of doc comments, so that the phrases match them, too.
            let line = line.replace("///", "//").replace("//!", "//");
            if let Some(phrase) = PHRASES.iter().find(|phrase| line.contains(*phrase)) {
                wrong.push(format!("{}:{}: `{phrase}`", file.display(), n + 1));
            }
        }
    }
    assert!(n_lines > 100_000, "the search read only {n_lines} lines");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Returns whether `text` contains `word` as a whole word.
fn has_word(text: &str, word: &str) -> bool {
    let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '.');
    text.match_indices(word).any(|(at, _)| {
        !is_part(text[..at].chars().next_back()) && !is_part(text[at + word.len()..].chars().next())
    })
}

#[test]
fn no_card_and_no_number_of_sms_stands_outside_of_the_descriptions_of_cards() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let machines = Machine::all().expect("the descriptions are sound");
    let usual = Machine::usual().expect("it is described");
    // The default card may be named, because code uses it if no card is known. The SM counts 72 and 128 are not searched for, because
    // sources contain these numbers with other meanings.
    let names: Vec<String> = machines
        .iter()
        .filter(|machine| machine.name != usual.name)
        .flat_map(|machine| [machine.name.clone(), machine.name.to_uppercase()])
        .collect();
    let sms: Vec<String> = machines
        .iter()
        .filter(|machine| ![72, 128].contains(&machine.sms))
        .map(|machine| machine.sms.to_string())
        .collect();
    let mut wrong = Vec::new();
    let mut n_lines = 0;
    for (file, text) in code(root) {
        for (n, line) in text.lines().enumerate() {
            n_lines += 1;
            // Skip lines with long lists of numbers, such as lengths.
            if line.matches(',').count() > 8 {
                continue;
            }
            let words = names.iter().chain(&sms);
            for word in words.filter(|word| has_word(line, word)) {
                wrong.push(format!("{}:{}: `{word}`", file.display(), n + 1));
            }
        }
    }
    assert!(n_lines > 30_000, "the search read only {n_lines} lines");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Returns the files of `src` and `templates` with their texts, without comments. Leaves out tests and the room `machine`, which describes
/// cards.
fn code(root: &Path) -> Vec<(PathBuf, String)> {
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    templates(&root.join("templates"), &mut files);
    let is_kept = |file: &PathBuf| {
        let inside = file.strip_prefix(root).expect("below the root");
        !inside.starts_with("src/machine")
            && !inside.iter().any(|part| {
                ["tests", "tests.rs", "testing.rs"]
                    .iter()
                    .any(|t| part == *t)
            })
    };
    let text = |file: PathBuf| {
        let text = fs::read_to_string(&file).expect("a source file");
        let text = text.split("#[cfg(test)]\nmod").next().unwrap_or_default();
        let lines = text
            .lines()
            .map(|line| line.split("//").next().unwrap_or_default());
        (file, lines.collect::<Vec<_>>().join("\n"))
    };
    files.into_iter().filter(is_kept).map(text).collect()
}

fn templates(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("templates are readable") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            templates(&path, into);
        } else {
            into.push(path);
        }
    }
}
