//! Checks that rendering a hostile chat template stays within limits of memory and time.
//!
//! The tests are in a separate binary, because they need an allocator that counts bytes.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    time::{Duration, Instant},
};

use gemmule::text::{ChatTemplate, Message};
use rayon::prelude::*;

/// The system allocator. Also counts the live bytes of each thread, and the max since the count was last reset.
struct Counting;

thread_local! {
    /// Bytes that this thread allocated, minus the bytes that it freed. Negative if it frees memory that other threads allocated.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

// SAFETY: all calls are forwarded unchanged to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.get() + layout.size() as isize;
        LIVE.set(live);
        PEAK.set(PEAK.get().max(live));
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get() - layout.size() as isize);
        // SAFETY: the memory was allocated with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Max live bytes during a rendering: gemmule's limit of 96 MiB, plus a margin for allocations that the limit does not count.
const MAX_PEAK: isize = 160 << 20;
/// Max time of a rendering on a slow and busy machine. On an idle machine, a rendering takes about a second.
const MAX_TIME: Duration = Duration::from_secs(30);

const MEMORY: &str = "takes more than 96 MiB of memory";
const STEPS: &str = "takes more than 8388608 steps";
const DEPTH: &str = "deeper than";

/// Returns a template that runs `body` in a loop until a limit stops it. The variable `a` is a text of 10 MB, which `body` can use.
fn on_long_text(body: &str) -> String {
    format!(
        "{{% set a = 'x' * 10000000 %}}{{% for i in range(99999) %}}{{% for j in range(99999) %}}{body}{{% endfor %}}{{% endfor %}}"
    )
}

/// Returns a template that sets `ns.x` to `first`, and then to the expression `next` in a loop until a limit stops it.
fn growing(first: &str, next: &str) -> String {
    format!(
        "{{% set ns = namespace(x={first}) %}}{{% for i in range(1000) %}}{{% set ns.x = {next} %}}{{% endfor %}}{{{{ ns.x | length }}}}"
    )
}

/// Returns hostile templates, each with the errors that its rendering may return.
fn hostile() -> Vec<(String, &'static [&'static str])> {
    let either: &[&str] = &[MEMORY, STEPS];
    let mut all = vec![
        (growing("[1]", "ns.x + ns.x"), either),
        (growing("'ab'", "ns.x ~ ns.x"), either),
        (growing("'ab'", "ns.x * 1000"), either),
        (growing("'aaaaaaaaaa'", "ns.x | replace('a', ns.x)"), either),
        (growing("'aaaaaaaaaa'", "ns.x.replace('a', ns.x)"), either),
        (
            growing("['a']", "[ns.x | join(ns.x | join)] + ns.x"),
            either,
        ),
        (growing("'ab'", "'%s%s' | format(ns.x, ns.x)"), either),
        (growing("'ab'", "'{0}{0}'.format(ns.x)"), either),
        (growing("[1]", "[ns.x, ns.x]"), &[DEPTH]),
        ("{{ 'x' * 10**9 }}".to_owned(), either),
        ("{{ 'x' * 10**30 }}".to_owned(), either),
        ("{{ [1] * 10**9 }}".to_owned(), either),
        ("{{ 9 ** 9 ** 9 }}".to_owned(), &["more than 127 bits"]),
        ("{{ '%1000000000d' % 3 }}".to_owned(), either),
        ("{{ '{:1000000000}'.format(3) }}".to_owned(), either),
        ("{{ '%.1000000000f' % 3 }}".to_owned(), &["at most 100"]),
        (
            "{{ 'x'.center(10**10) ~ 'x'.ljust(10**10) }}".to_owned(),
            either,
        ),
        ("{{ 'x' | center(10**10) }}".to_owned(), either),
        (
            "{{ ('a\\n' * 100000) | indent(100000) }}".to_owned(),
            either,
        ),
        ("{{ [1] | tojson(indent=10**10) }}".to_owned(), either),
        ("{{ range(9) | batch(10**9, 1) | list }}".to_owned(), either),
        ("{{ range(9) | slice(10**9, 1) | list }}".to_owned(), either),
        ("{{ range(99999) | join('x' * 100000) }}".to_owned(), either),
        ("{{ range(10**9) }}".to_owned(), &["range is too long"]),
        (
            "{{ ('a ' * 20000000).split() | length }}".to_owned(),
            either,
        ),
        (
            "{{ ('a\\n' * 20000000).splitlines() | length }}".to_owned(),
            either,
        ),
        ("{{ ('a' * 20000000) | list | length }}".to_owned(), either),
        ("{{ ('a' * 20000000)[::-1] | length }}".to_owned(), either),
        (
            "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}".to_owned(),
            &[DEPTH],
        ),
        (
            "{% macro m() %}{{ m(*varargs) }}{% endmacro %}{{ m(*range(99999)) }}".to_owned(),
            &[MEMORY, STEPS, DEPTH],
        ),
        (
            "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}".to_owned(),
            &[DEPTH],
        ),
        (on_long_text("{{ a }}"), either),
        (on_long_text("{% set n = namespace(a=1) %}"), either),
        (on_long_text("{% set n = joiner() %}"), either),
    ];
    // Trees whose nodes share their children take little memory, but processing them takes exponential time.
    for use_of in [
        "ns.x == ns.y",
        "ns.x | string",
        "ns.x | tojson",
        "{ns.x: 1}",
        "ns.x < ns.y",
    ] {
        let source = format!(
            "{{% set ns = namespace(x=(1,), y=(1,)) %}}{{% for i in range(100) %}}{{% set ns.x = (ns.x, ns.x) %}}{{% set ns.y = (ns.y, ns.y) %}}{{% endfor %}}{{{{ {use_of} }}}}"
        );
        all.push((source, either));
    }
    // Expressions that take long to compute, because they process a long text, but have a small result.
    for expression in [
        "'y' in a",
        "a.count('xy')",
        "a | length",
        "a | upper",
        "a is upper",
        "a[-9999999]",
        "a[::10000000]",
        "a.find('y', 3)",
        "a.strip('yz')",
        "a | truncate(3)",
        "a.zfill(3)",
        "a | int",
        "a | wordcount",
        "a | indent",
        "a.split('y')",
        "a.isalpha()",
        "a | title",
        "a | reverse",
        "a | tojson",
        "a == a ~ 'x'",
        "{a: 1}[a]",
        "a | replace('y', '')",
        "range(99999) | sort(reverse=true)",
        "range(9999) | unique",
        "a % 1",
    ] {
        all.push((
            on_long_text(&format!("{{% set b = {expression} %}}")),
            either,
        ));
    }
    for (before, n, after) in [
        ("(", 10_000, ")"),
        ("[", 10_000, "]"),
        ("not ", 10_000, ""),
        ("-", 10_000, ""),
        ("1 + ", 100_000, ""),
        ("1 if 0 else ", 10_000, ""),
    ] {
        let source = format!("{{{{ {}1{} }}}}", before.repeat(n), after.repeat(n));
        all.push((source, &[DEPTH]));
    }
    all.push((format!("{{{{ x{} }}}}", "[0]".repeat(100_000)), &[DEPTH]));
    all.push(("{% if true %}".repeat(10_000), &[DEPTH]));
    all.push(("x".repeat(1 << 20), &["expected at most 524288"]));
    all
}

/// Renders a hostile template on this thread, and checks that the error names one of `limits`.
fn check(source: &str, limits: &[&str]) {
    let messages = [Message::new("user", "x".repeat(1 << 20))];
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("chat_template.jinja"), source).expect("written");
    let shown: String = source.chars().take(200).collect();
    let before = LIVE.get();
    PEAK.set(before);
    let begun = Instant::now();
    let rendered = ChatTemplate::open(folder.path())
        .and_then(|template| template.render(&messages).map(|text| text.len()));
    let (took, peak) = (begun.elapsed(), PEAK.get() - before);
    println!("{took:?}, {} MiB: {shown}", peak >> 20);
    let error = rendered.expect_err(&shown).to_string();
    assert!(
        limits.iter().any(|limit| error.contains(limit)),
        "{shown}: {error}"
    );
    assert!(error.len() < 2000, "{shown}: {} bytes", error.len());
    assert!(peak < MAX_PEAK, "{shown}: {peak} bytes");
    assert!(took < MAX_TIME, "{shown}: {took:?}");
    let left = LIVE.get() - before;
    assert!(left < 1 << 20, "{shown}: {left} bytes are left");
}

#[test]
fn hostile_templates_end_within_a_bound_of_memory_and_time_with_its_name() {
    hostile()
        .into_par_iter()
        .for_each(|(source, limits)| check(&source, limits));
    // A conversation of the max size of a request body is below the limits.
    let folder = tempfile::tempdir().expect("a folder");
    let template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).expect("written");
    let messages = vec![Message::new("user", "x".repeat(80_000)); 100];
    let template = ChatTemplate::open(folder.path()).expect("a template");
    let text = template.render(&messages).expect("it is written down");
    assert_eq!(text.len(), 100 * (80_000 + "<|user|>".len()));
}
