//! Tests of compilation by NVRTC for every target: cubins, errors and spills. They need NVRTC, but no GPU.

use std::time::Instant;

use crate::common::nvrtc;
use gemmule::jit::{DiskCache, Jit, JitError, Source, Target};

fn source(symbol: &str, text: &str) -> Source {
    Source {
        symbol: symbol.into(),
        text: text.into(),
    }
}

fn axpy() -> Source {
    source(
        "axpy",
        "extern \"C\" __global__ void axpy(float* y, const float* x, float a, int n) {\n\
         \x20 int i = blockIdx.x * blockDim.x + threadIdx.x;\n\
         \x20 if (i < n) y[i] += a * x[i];\n}\n",
    )
}

/// Returns a kernel that spills: it keeps more values alive than its registers can hold.
fn spilling() -> Source {
    source(
        "spilling",
        "extern \"C\" __global__ void __launch_bounds__(1024) spilling(float* y, const float* x) {\n\
         __shared__ float shared[512];\n\
         float a[200];\n\
         #pragma unroll\n\
         for (int i = 0; i < 200; i++) a[i] = x[i * 1024 + threadIdx.x];\n\
         shared[threadIdx.x % 512] = a[0];\n\
         __syncthreads();\n\
         float s = shared[5];\n\
         #pragma unroll\n\
         for (int i = 0; i < 200; i++) a[i] = a[i] * a[(i * 7 + 3) % 200] + s;\n\
         #pragma unroll\n\
         for (int i = 0; i < 200; i++) y[i * 1024 + threadIdx.x] = a[i];\n}\n",
    )
}

#[test]
fn a_kernel_compiles_for_every_target_with_a_report() {
    let nvrtc = nvrtc();
    for target in Target::ALL {
        let cubin = nvrtc.compile(&axpy(), target).unwrap();
        assert_eq!((cubin.symbol.as_str(), cubin.target), ("axpy", target));
        assert!(cubin.bytes.starts_with(b"\x7fELF"));
        let report = cubin.report.unwrap();
        assert!((4..=32).contains(&report.registers), "{target}: {report:?}");
        assert!(
            !report.spills() && report.stack_frame == 0,
            "{target}: {report:?}"
        );
        assert_eq!(report.shared_bytes, 0);
    }
}

#[test]
fn spills_and_shared_memory_are_reported() {
    let report = nvrtc()
        .compile(&spilling(), Target::Sm80)
        .unwrap()
        .report
        .unwrap();
    assert!(report.spills(), "{report:?}");
    assert!(report.spill_stores > 0 && report.spill_loads > 0 && report.stack_frame > 0);
    assert_eq!((report.registers, report.shared_bytes), (64, 2048));
}

#[test]
fn the_same_source_gives_the_same_bytes_on_every_thread() {
    let nvrtc = nvrtc();
    let expected = nvrtc.compile(&axpy(), Target::Sm90a).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| nvrtc.compile(&axpy(), Target::Sm90a).unwrap()))
            .collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), expected);
        }
    });
}

#[test]
fn a_mistake_in_the_source_is_quoted() {
    let bad = source(
        "bad",
        "extern \"C\" __global__ void bad(float* y) {\n  y[0] = missing;\n}\n",
    );
    let error = nvrtc().compile(&bad, Target::Sm86).unwrap_err();
    let JitError::Compile {
        symbol,
        target,
        quote,
        log,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!((symbol.as_str(), *target), ("bad", Target::Sm86));
    assert!(
        quote.starts_with("bad.cu, line 2: identifier \"missing\" is undefined\n"),
        "{quote}"
    );
    assert!(quote.contains("\n> 2 |   y[0] = missing;\n"), "{quote}");
    assert!(log.contains("bad.cu(2): error"), "{log}");
    assert!(error.to_string().contains("kernel `bad` for sm_86"));
}

#[test]
fn an_instruction_of_one_target_only_is_quoted_in_the_ptx_of_another() {
    let fence = source(
        "fence",
        "extern \"C\" __global__ void fence() { asm volatile(\"wgmma.fence.sync.aligned;\"); }\n",
    );
    nvrtc().compile(&fence, Target::Sm90a).unwrap();
    let error = nvrtc().compile(&fence, Target::Sm80).unwrap_err();
    let JitError::Compile { quote, .. } = &error else {
        panic!("{error}")
    };
    assert!(quote.starts_with("PTX of fence, line "), "{quote}");
    let marked = quote.lines().find(|line| line.starts_with('>')).unwrap();
    assert!(marked.ends_with("wgmma.fence.sync.aligned;"), "{quote}");
}

#[test]
fn too_much_static_shared_memory_is_explained() {
    let large = source(
        "large",
        "extern \"C\" __global__ void large(float* y) {\n\
         __shared__ float a[60000]; a[threadIdx.x] = y[0]; __syncthreads(); y[1] = a[3];\n}\n",
    );
    let error = nvrtc().compile(&large, Target::Sm80).unwrap_err();
    let JitError::Compile { quote, .. } = &error else {
        panic!("{error}")
    };
    assert!(
        quote.starts_with("It declares 240000 bytes of static shared memory"),
        "{error}"
    );
}

#[test]
fn a_header_is_not_found_because_none_is_to_be_included() {
    let text = format!("#include <cuda_fp16.h>\n{}", axpy().text);
    let error = nvrtc()
        .compile(&source("axpy", &text), Target::Sm80)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("axpy.cu, line 1: could not open source file"),
        "{error}"
    );
}

#[test]
fn a_source_holds_exactly_the_kernel_it_is_named_after() {
    let found = |symbol: &str, text: &str| match nvrtc()
        .compile(&source(symbol, text), Target::Sm80)
        .unwrap_err()
    {
        JitError::NotOneKernel {
            symbol: named,
            mut found,
        } => {
            assert_eq!(named, symbol);
            found.sort();
            found
        }
        other => panic!("{other}"),
    };
    let one = "extern \"C\" __global__ void one(int* y) { y[0] = 1; }\n";
    let two = "extern \"C\" __global__ void two(int* y) { y[0] = 2; }\n";
    assert_eq!(found("two", one), ["one"]);
    assert_eq!(found("one", &format!("{one}{two}")), ["one", "two"]);
    assert_eq!(found("one", &one.replace("extern \"C\"", "")), ["_Z3onePi"]);
    assert_eq!(found("one", "__device__ int f() { return 1; }\n"), [""; 0]);
    assert_eq!(found("one", ""), [""; 0]);
}

#[test]
fn a_nul_in_a_source_is_an_error_and_not_the_end_of_it() {
    let cut = source("axpy", &format!("{}\0 y = ;", axpy().text));
    let at = axpy().text.len();
    assert!(matches!(
        nvrtc().compile(&cut, Target::Sm80),
        Err(JitError::NulInSource { symbol, at: found }) if symbol == "axpy" && found == at
    ));
    let named = source("a\0b", &axpy().text);
    insta::assert_snapshot!(nvrtc().compile(&named, Target::Sm80).unwrap_err(), @r"the source of the kernel `a\u{0}b` contains a NUL byte at offset 1");
}

#[test]
fn a_symbol_that_is_no_name_is_an_error() {
    for symbol in ["", "a b", "../../x", "é", "axpy\n"] {
        let error = nvrtc()
            .compile(&source(symbol, &axpy().text), Target::Sm80)
            .unwrap_err();
        assert!(
            matches!(error, JitError::NotOneKernel { .. }),
            "{symbol:?}: {error}"
        );
    }
}

/// Prints the times of loading NVRTC, compiling, and reading the cache. Run it with `cargo test --release --test kernels jit_compile::
/// -- --ignored --nocapture times`.
#[test]
#[ignore = "prints times"]
fn times() {
    let start = Instant::now();
    let nvrtc = nvrtc();
    println!("find and load    {:?}", start.elapsed());
    for round in ["first", "second", "third"] {
        let start = Instant::now();
        let body = format!("// {round}\n{}", axpy().text);
        nvrtc
            .compile(&source("axpy", &body), Target::Sm90a)
            .unwrap();
        println!("{round:<6} compile   {:?}", start.elapsed());
    }

    const N_KERNELS: usize = 40;
    let sources: Vec<Source> = (0..N_KERNELS)
        .map(|at| source("axpy", &axpy().text.replace("+=", &format!("+= {at}.0f +"))))
        .collect();
    let root = tempfile::tempdir().unwrap();
    for label in ["cold", "warm", "warm"] {
        let jit = Jit::new(nvrtc.clone(), Some(DiskCache::at(root.path())));
        jit.compile_all(&sources, Target::Sm90a, &|_, _| ())
            .unwrap();
        let stats = jit.stats();
        println!(
            "{label} {N_KERNELS} kernels {:.2} ms ({:.3} ms each, {:.1} ms in NVRTC, {} hits)",
            stats.seconds * 1e3,
            stats.seconds * 1e3 / N_KERNELS as f64,
            stats.nvrtc_seconds * 1e3,
            stats.hits,
        );
    }
}
