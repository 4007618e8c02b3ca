//! Parsing the output of `ptxas -v`.

use serde::{Deserialize, Serialize};

/// Registers and memory of a compiled kernel, as reported by the assembler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CompileReport {
    /// Registers per thread. For a kernel with `setmaxnreg`, this is the number at its entry.
    pub registers: u32,
    /// Bytes per thread spilled to local memory, in the kernel and in every function that it calls.
    pub spill_stores: u32,
    /// Bytes per thread loaded back from local memory.
    pub spill_loads: u32,
    /// Bytes of stack per thread, for spills and for arrays that are indexed at run time. This is
    /// the maximum over the kernel and the functions that it calls.
    pub stack_frame: u32,
    /// Bytes of static shared memory per block. Dynamic shared memory is set by the launch.
    pub shared_bytes: u32,
}

impl CompileReport {
    /// Returns whether registers were spilled.
    pub fn spills(&self) -> bool {
        self.spill_stores > 0 || self.spill_loads > 0
    }
}

/// Parses the report of the only kernel in a `ptxas -v` log.
///
/// The parser looks for two kinds of lines, with any prefix. `840 bytes stack frame, 912 bytes spill stores, 1152 bytes spill loads` occurs
/// once for the kernel and once for each function that was not inlined. `Used 64 registers, used 1 barriers, 2048 bytes smem` occurs only
/// for the kernel. Returns `None` if either kind of line is missing, for example for a unit without a kernel.
pub fn parse_report(log: &str) -> Option<CompileReport> {
    let mut frames = None::<(u32, u32, u32)>;
    let mut used = None::<(u32, u32)>;
    for line in log.lines() {
        // Warning lines also contain the spills, but without the stack frame, so they do not match.
        if let (Some(frame), Some(stores), Some(loads)) = (
            number_before(line, " bytes stack frame"),
            number_before(line, " bytes spill stores"),
            number_before(line, " bytes spill loads"),
        ) {
            let (f, s, l) = frames.unwrap_or_default();
            frames = Some((
                f.max(frame),
                s.saturating_add(stores),
                l.saturating_add(loads),
            ));
        } else if let (true, Some(registers)) =
            (line.contains("Used "), number_before(line, " registers"))
        {
            let shared = number_before(line, " bytes smem").unwrap_or(0);
            let (r, s) = used.unwrap_or_default();
            used = Some((r.max(registers), s.max(shared)));
        }
    }
    let ((stack_frame, spill_stores, spill_loads), (registers, shared_bytes)) = (frames?, used?);
    Some(CompileReport {
        registers,
        spill_stores,
        spill_loads,
        stack_frame,
        shared_bytes,
    })
}

/// Returns the entry functions in a `ptxas -v` log, in the order of the log.
pub(super) fn entry_functions(log: &str) -> Vec<String> {
    log.lines()
        .filter_map(|line| {
            line.split_once("Compiling entry function '")?
                .1
                .split_once('\'')
        })
        .map(|(name, _)| name.to_owned())
        .collect()
}

/// Returns the decimal number directly before the first `unit` in `line`.
fn number_before(line: &str, unit: &str) -> Option<u32> {
    let head = &line[..line.find(unit)?];
    let digits = head.len() - head.bytes().rev().take_while(u8::is_ascii_digit).count();
    head[digits..].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Output of NVRTC 13.0 for sm_80, for a kernel with too many live values.
    const SPILLED: &str = "\
ptxas warning : Local memory used for function 'spill', size of stack frame: 840 bytes
ptxas warning : Registers are spilled to local memory in function 'spill', 912 bytes spill stores, 1152 bytes spill loads
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'spill' for 'sm_80'
ptxas info    : Function properties for spill
ptxas         .     840 bytes stack frame, 912 bytes spill stores, 1152 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 840 bytes cumulative stack size, 2048 bytes smem, 368 bytes cmem[0]
ptxas info    : Compile time = 89.133 ms
";

    /// Output of NVRTC 13.0 for sm_80, for a kernel that calls a function that is not inlined.
    const CALLS: &str = "\
ptxas info    : Compiling entry function 'axpy' for 'sm_80'
ptxas info    : Function properties for axpy
ptxas         .     256 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 21 registers, used 0 barriers, 256 bytes cumulative stack size, 376 bytes cmem[0]
ptxas info    : Function properties for _Z1ffi
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
";

    #[test]
    fn registers_spills_stack_and_shared_memory_are_read() {
        assert_eq!(
            parse_report(SPILLED),
            Some(CompileReport {
                registers: 64,
                spill_stores: 912,
                spill_loads: 1152,
                stack_frame: 840,
                shared_bytes: 2048,
            })
        );
        assert!(parse_report(SPILLED).unwrap().spills());
        assert_eq!(entry_functions(SPILLED), ["spill"]);
    }

    #[test]
    fn a_spill_in_a_called_function_counts() {
        let report = parse_report(CALLS).unwrap();
        assert_eq!((report.spill_stores, report.spill_loads), (8, 4));
        assert_eq!(
            (report.registers, report.stack_frame, report.shared_bytes),
            (21, 256, 0)
        );
        assert_eq!(entry_functions(CALLS), ["axpy"]);
    }

    #[test]
    fn the_older_form_without_barriers_and_prefix_is_read() {
        let log = "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
                   ptxas info    : Function properties for k\n    \
                   0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Used 168 registers, 1024 bytes smem, 640 bytes cmem[0]\n";
        let report = parse_report(log).unwrap();
        assert_eq!((report.registers, report.shared_bytes), (168, 1024));
        assert!(!report.spills());
    }

    #[test]
    fn a_log_without_a_kernel_has_no_report() {
        assert_eq!(parse_report(""), None);
        assert_eq!(parse_report("ptxas info    : 0 bytes gmem\n"), None);
        assert_eq!(
            parse_report("Used registers,  bytes smem\n bytes stack frame"),
            None
        );
        assert_eq!(parse_report("Used 99999999999999999999 registers"), None);
    }

    proptest! {
        #[test]
        fn no_log_makes_the_reader_panic(log in "([0-9é ]{0,4}( bytes stack frame| bytes spill stores| bytes spill loads| registers|Used |'|Compiling entry function '|\n)){0,20}") {
            let _ = parse_report(&log);
            let _ = entry_functions(&log);
        }
    }
}
