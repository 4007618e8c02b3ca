//! Classes of generated sources: what two sources have in common that differ in sizes alone.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use gemmule::{
    DType,
    engine::emit,
    jit::Source,
    kernels::{
        elementwise::{BinaryOp, Combine},
        representative,
    },
    measure::Emitted,
};

/// Where the snapshots of exemplars are.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("snapshots/cuda")
}

/// Name of an exemplar's snapshot.
pub fn file(symbol: &str) -> String {
    format!("{symbol}.snap")
}

/// What a source is but for its symbol, its numbers, its storage type, and how long its lists are. Sources of one
/// skeleton took the same branches of one template, and Rust put the same words and expressions in.
pub fn skeleton(source: &Source) -> String {
    let mut out = String::with_capacity(source.text.len());
    for line in source.text.lines() {
        push_without_repeats(&plain(line, &source.symbol), &mut out);
        out.push('\n');
    }
    out
}

/// `line` with `@` for the symbol, `T` for a storage type, and `#` for a number, also within a word, as in `float4` and
/// `m64n96k16`. A number that is added from the left goes: expressions of a tensor's place have none where it is 0.
fn plain(line: &str, symbol: &str) -> String {
    const ADDED: &str = " + ";
    let mut out = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(first) = rest.chars().next() {
        let in_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let n_word = rest.find(|c| !in_word(c)).unwrap_or(rest.len());
        let taken = if first.is_ascii_digit() {
            let n_number = number(rest);
            if rest[n_number..].starts_with(ADDED) {
                n_number + ADDED.len()
            } else {
                out.push('#');
                n_number
            }
        } else if n_word == 0 {
            out.push(first);
            first.len_utf8()
        } else {
            match &rest[..n_word] {
                word if word == symbol => out.push('@'),
                "float" | "f16" | "bf16" | "f16x2" | "bf16x2" => out.push('T'),
                word => push_without_digits(word, &mut out),
            }
            n_word
        };
        rest = &rest[taken..];
    }
    out
}

/// How many bytes of `text`, which begins with a digit, are a number: `12`, `0.125f`, `1e-12f`, `0xffff`.
fn number(text: &str) -> usize {
    let mut end = 0;
    let bytes = text.as_bytes();
    while let Some(&byte) = bytes.get(end) {
        let follows = bytes.get(end + 1).is_some_and(u8::is_ascii_digit);
        let exponent = end > 0 && bytes[end - 1] == b'e' && !text.starts_with("0x");
        match byte {
            b'.' if follows => {}
            b'-' | b'+' if follows && exponent => {}
            _ if byte.is_ascii_alphanumeric() => {}
            _ => break,
        }
        end += 1;
    }
    end
}

fn push_without_digits(word: &str, out: &mut String) {
    let mut digits = false;
    for c in word.chars() {
        if !c.is_ascii_digit() {
            out.push(c);
        } else if !digits {
            out.push('#');
        }
        digits = c.is_ascii_digit();
    }
}

/// `line` with one of several equal entries of a list: `{ %0, %1 }` and `{ %0, %1, %2, %3 }` are two lists of registers.
fn push_without_repeats(line: &str, out: &mut String) {
    let mut last = None;
    for entry in line.split(", ") {
        // The braces around a list are no part of its first and its last entry.
        let begin = entry.split(" }").next();
        match last {
            None => out.push_str(entry),
            Some(last) if begin == Some(last) => out.push_str(&entry[last.len()..]),
            Some(_) => out.extend([", ", entry]),
        }
        last = entry.rsplit("{ ").next();
    }
}

/// Sources of one skeleton.
#[derive(Clone)]
pub struct Class<'a> {
    pub template: &'static str,
    /// Those of [`representative`] before those that only a model brings about, which come and go;
    /// then the shortest symbol first: a plain kernel in f16.
    pub members: Vec<Member<'a>>,
}

/// A source in a class.
#[derive(Clone, Copy)]
pub struct Member<'a> {
    goes: bool,
    pub source: &'a Source,
}

impl<'a> Member<'a> {
    fn order(&self) -> (bool, usize, &'a str) {
        (self.goes, self.source.symbol.len(), &self.source.symbol)
    }
}

/// All classes of `sources`, by template.
pub fn classes<'a>(emitted: &[Emitted], sources: &'a [Source]) -> Vec<Class<'a>> {
    let stays: BTreeSet<String> = representative()
        .iter()
        .map(|kernel| kernel.as_kernel().symbol())
        .collect();
    let mut found: BTreeMap<(&'static str, String), Vec<Member<'a>>> = BTreeMap::new();
    for (emitted, source) in emitted.iter().zip(sources) {
        let template = emitted.kernel.as_kernel().template();
        let members = found.entry((template, skeleton(source))).or_default();
        let goes = !stays.contains(&source.symbol);
        members.push(Member { goes, source });
    }
    sorted(found)
}

/// Joins classes whose exemplars have one outline: they differ in the renderings of partials, which are reviewed by themselves.
pub fn joined<'a>(classes: &[Class<'a>], outline: impl Fn(&Source) -> String) -> Vec<Class<'a>> {
    let mut found: BTreeMap<(&'static str, String), Vec<Member<'a>>> = BTreeMap::new();
    for class in classes {
        let members = found.entry((class.template, outline(class.exemplar())));
        members.or_default().extend(&class.members);
    }
    sorted(found)
}

fn sorted<'a>(found: BTreeMap<(&'static str, String), Vec<Member<'a>>>) -> Vec<Class<'a>> {
    let class = |((template, _), mut members): ((_, String), Vec<Member<'a>>)| {
        members.sort_by_key(Member::order);
        Class { template, members }
    };
    found.into_iter().map(class).collect()
}

impl<'a> Class<'a> {
    /// The source that is reviewed for all: the one whose snapshot is there, so that new kernels change no exemplar, and
    /// else the first.
    pub fn exemplar(&self) -> &'a Source {
        let folder = folder();
        self.exemplar_of(|symbol| folder.join(file(symbol)).is_file())
    }

    fn exemplar_of(&self, has_snapshot: impl Fn(&str) -> bool) -> &'a Source {
        let there = self.members.iter().find(|m| has_snapshot(&m.source.symbol));
        there.unwrap_or(&self.members[0]).source
    }

    /// The class for messages: its template, how many sources it has, and some of them.
    pub fn described(&self) -> String {
        let some: Vec<&str> = self
            .members
            .iter()
            .map(|m| m.source.symbol.as_str())
            .collect();
        let (shown, more) = some.split_at(some.len().min(3));
        let more = match more.len() {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        format!("{}: {}{more}", self.template, shown.join(", "))
    }
}

pub fn skeleton_of(symbol: &str, text: &str) -> String {
    skeleton(&Source {
        symbol: symbol.to_owned(),
        text: text.to_owned(),
    })
}

#[test]
fn sources_of_other_sizes_and_storage_are_of_one_class() {
    let one = "constexpr int N = 768;\nconst float EPS = 1e-12f;\nusing T = f16;  // add_f16_w768\n\
               asm(\"m64n96k16.f32.f16 { %0, %1, %2 }, %3\"\n: \"+f\"(s[0]), \"+f\"(s[1]), \"+f\"(s[2])\n: x);\n\
               float4* add_f16_w768(f16x2 x) { x + 8 + 24 * h; y & 0xffe; }";
    let other = "constexpr int N = 12;\nconst float EPS = 0.00001f;\nusing T = bf16;  // add_bf16_w12\n\
                 asm(\"m64n8k16.f32.bf16 { %0, %1 }, %2\"\n: \"+f\"(s[0]), \"+f\"(s[1])\n: x);\n\
                 float2* add_bf16_w12(bf16x2 x) { x + 24 * h; y & 0xf; }";
    let expected = "constexpr int N = #;\nconst T EPS = #;\nusing T = T;  // @\n\
                    asm(\"m#n#k#.f#.T { %# }, %#\"\n: \"+f\"(s[#]), \"+f\"(s[#])\n: x);\n\
                    float#* @(T x) { x + # * h; y & #; }\n";
    assert_eq!(skeleton_of("add_f16_w768", one), expected);
    assert_eq!(skeleton_of("add_bf16_w12", other), expected);
}

#[test]
fn sources_that_differ_in_a_word_are_of_two_classes() {
    let plain = "constexpr bool BIAS = false;\nreturn identity(x) - 1;";
    for other in [
        "constexpr bool BIAS = true;\nreturn identity(x) - 1;",
        "constexpr bool BIAS = false;\nreturn gelu(x) - 1;",
        "constexpr bool BIAS = false;\nreturn identity(x) + 1;",
        "constexpr bool BIAS = false;\n\nreturn identity(x) - 1;",
        "constexpr bool BIAS = false;\nreturn identity(x, y) - 1;",
    ] {
        assert_ne!(skeleton_of("k", plain), skeleton_of("k", other), "{other}");
    }
}

#[test]
fn a_class_keeps_its_exemplar_and_else_takes_the_plainest_that_stays() {
    let emitted = [
        (64, DType::F16),
        (768, DType::F32),
        (1003, DType::BF16),
        (1003, DType::F16),
    ]
    .map(|(width, dtype)| Emitted {
        kernel: Combine {
            how: BinaryOp::Sum,
            width,
            dtype,
        }
        .into(),
        models: Vec::new(),
    });
    let kernels = emitted.each_ref().map(|e| e.kernel.clone());
    let sources = emit(&kernels).expect("they render");
    let classes = classes(&emitted, &sources);
    let [class] = &classes[..] else {
        panic!("{} classes", classes.len())
    };
    assert_eq!(
        class.described(),
        "combine: add_f32_w768, add_f16_w1003, add_bf16_w1003 and 1 more"
    );
    assert_eq!(class.exemplar_of(|_| false).symbol, "add_f32_w768");
    for there in ["add_f16_w64", "add_bf16_w1003"] {
        assert_eq!(class.exemplar_of(|symbol| symbol == there).symbol, there);
    }
}

#[test]
fn classes_of_one_outline_are_joined() {
    let source = |symbol: &str, text: &str| Source {
        symbol: symbol.to_owned(),
        text: text.to_owned(),
    };
    let sources = [source("one", "a"), source("two", "b"), source("three", "c")];
    let classes = sources.each_ref().map(|source| Class {
        template: "t",
        members: vec![Member {
            goes: false,
            source,
        }],
    });
    let all = joined(&classes, |source| {
        let outline = if source.text == "b" { "B" } else { "rest" };
        outline.to_owned()
    });
    let described: Vec<String> = all.iter().map(Class::described).collect();
    assert_eq!(described, ["t: two", "t: one, three"]);
}
