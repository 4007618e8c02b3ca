//! Formatting of compilation errors with the source lines that they refer to.

use std::fmt::Write as _;

use super::report::parse_report;
use super::{JitError, Source, Target};

/// Number of lines shown before and after the failing line.
const CONTEXT: usize = 2;

/// Maximum static shared memory of a kernel on any card, in bytes. A kernel that needs more must
/// use dynamic shared memory.
const MAX_STATIC_SHARED: u32 = 48 * 1024;

/// Creates the error of a failed compilation from NVRTC's `log`. `ptx` is the input of the
/// assembler, or `None` if the compilation failed before the assembler. The assembler's errors refer to
/// lines of `ptx`.
pub(super) fn compile_error(
    source: &Source,
    target: Target,
    version: (i32, i32),
    log: &str,
    ptx: Option<&str>,
) -> JitError {
    let quote = first_error(source, log, ptx).unwrap_or_default();
    JitError::Compile {
        symbol: source.symbol.clone(),
        target,
        version,
        quote,
        log: log.trim_end().to_owned(),
    }
}

fn first_error(source: &Source, log: &str, ptx: Option<&str>) -> Option<String> {
    let file = file_name(source);
    for line in log.lines() {
        if let Some((number, message)) = frontend_error(line, &file) {
            return Some(quote(&file, &source.text, number, message));
        }
        if let (Some(ptx), Some((number, message))) = (ptx, assembler_error(line)) {
            return Some(quote(
                &format!("PTX of {}", source.symbol),
                ptx,
                number,
                message,
            ));
        }
    }
    // NVRTC's log contains no error if the kernel has too much static shared memory.
    let shared = parse_report(log)?.shared_bytes;
    (shared > MAX_STATIC_SHARED).then(|| {
        format!(
            "It declares {shared} bytes of static shared memory; the maximum is \
             {MAX_STATIC_SHARED}. Declare it as `extern __shared__` and pass its size at the launch.\n"
        )
    })
}

/// Returns the file name under which the source is compiled. It appears in the log.
pub(super) fn file_name(source: &Source) -> String {
    format!("{}.cu", source.symbol)
}

/// Parses `axpy.cu(3): error: identifier "x" is undefined` to (3, `identifier "x" is undefined`).
fn frontend_error<'a>(line: &'a str, file: &str) -> Option<(usize, &'a str)> {
    let (number, rest) = line
        .strip_prefix(file)?
        .strip_prefix('(')?
        .split_once("): ")?;
    let (kind, message) = rest.split_once(": ")?;
    // The kind may also be "catastrophic error", or "error #20-D" in builds that number their
    // messages.
    let is_error = kind.split(' ').any(|word| word == "error");
    Some((number.parse().ok()?, message)).filter(|_| is_error)
}

/// Parses `ptxas application ptx input, line 28; error   : Unknown modifier '.bar'` to (28,
/// `Unknown …`).
fn assembler_error(line: &str) -> Option<(usize, &str)> {
    let (number, rest) = line
        .strip_prefix("ptxas ")?
        .split_once(", line ")?
        .1
        .split_once("; ")?;
    let (kind, message) = rest.split_once(": ")?;
    Some((number.parse().ok()?, message)).filter(|_| kind.trim_end() == "error")
}

/// Returns line `number` (from 1) of `text` with its neighbors, under a heading.
fn quote(name: &str, text: &str, number: usize, message: &str) -> String {
    let mut quoted = format!("{name}, line {number}: {message}\n");
    let first = number.saturating_sub(CONTEXT).max(1);
    let last = number.saturating_add(CONTEXT);
    let width = last.min(text.lines().count()).to_string().len();
    for (at, line) in (1..)
        .zip(text.lines())
        .skip(first - 1)
        .take_while(|(at, _)| *at <= last)
    {
        let mark = if at == number { '>' } else { ' ' };
        // Writing to a String cannot fail.
        let _ = writeln!(
            quoted,
            "{}",
            format!("{mark} {at:>width$} | {line}").trim_end()
        );
    }
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source {
            symbol: "bad".into(),
            text: text.into(),
        }
    }

    #[test]
    fn a_mistake_in_the_source_is_shown_with_its_line_and_the_log() {
        let source = source(
            "extern \"C\" __global__ void bad(float* y) {\n  int unused;\n  float z = missing(y);\n  y[0] = z +;\n}\n",
        );
        // Output of NVRTC 13.0.
        let log = "\
bad.cu(2): warning #177-D: variable \"unused\" was declared but never referenced
    int unused;
        ^

bad.cu(3): error: identifier \"missing\" is undefined
    float z = missing(y);
              ^

bad.cu(4): error: expected an expression
    y[0] = z +;
              ^

2 errors detected in the compilation of \"bad.cu\".
";
        insta::assert_snapshot!(compile_error(&source, Target::Sm80, (13, 0), log, None));
    }

    #[test]
    fn an_instruction_that_the_target_lacks_is_shown_in_the_ptx() {
        let source = source("extern \"C\" __global__ void bad() { asm(\"foo.bar;\"); }\n");
        let log = "\
ptxas application ptx input, line 4; error   : Instruction 'wgmma.fence' not supported on .target 'sm_80'
ptxas fatal   : Ptx assembly aborted due to errors
";
        let ptx = ".version 9.0\n.target sm_80\n\n\twgmma.fence.sync.aligned;\n\tret;\n";
        insta::assert_snapshot!(compile_error(
            &source,
            Target::Sm80,
            (13, 0),
            log,
            Some(ptx)
        ));
    }

    #[test]
    fn too_much_static_shared_memory_is_named_though_the_log_is_silent() {
        // Output of NVRTC 13.0. It does not name the cause.
        let log = "\
ptxas info    : Compiling entry function 'bad' for 'sm_80'
ptxas info    : Function properties for bad
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 240000 bytes smem, 360 bytes cmem[0]
";
        insta::assert_snapshot!(compile_error(&source(""), Target::Sm80, (13, 0), log, None));
    }

    #[test]
    fn an_unknown_log_is_shown_unchanged() {
        let error = compile_error(
            &source("a\nb\n"),
            Target::Sm120,
            (14, 1),
            "something new\n",
            None,
        );
        insta::assert_snapshot!(error, @r"
        NVRTC 14.1 cannot compile the kernel `bad` for sm_120.

        The compiler's log:
        something new

        The source is generated; `gemmule emit --arch sm_120` writes it out.
        ");
    }

    #[test]
    fn line_numbers_outside_the_text_quote_nothing_and_do_not_panic() {
        for number in [0, 3, 99, usize::MAX] {
            let quoted = quote("bad.cu", "one\ntwo\n", number, "no");
            assert!(quoted.starts_with("bad.cu, line"), "{quoted}");
            assert!(!quoted.contains('>'), "{quoted}");
        }
        assert!(quote("bad.cu", "", 1, "no").lines().count() == 1);
    }

    #[test]
    fn numbered_and_catastrophic_errors_are_errors_and_warnings_are_not() {
        let found = |line| frontend_error(line, "bad.cu");
        assert_eq!(found("bad.cu(7): error #20-D: x"), Some((7, "x")));
        assert_eq!(
            found("bad.cu(1): catastrophic error: y: z"),
            Some((1, "y: z"))
        );
        assert_eq!(found("bad.cu(1): warning #177-D: error: no"), None);
        assert_eq!(found("other.cu(1): error: no"), None);
        assert_eq!(found("bad.cu(99999999999999999999999): error: no"), None);
    }
}
