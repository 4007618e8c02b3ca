//! Tests of kernel timings through the API: their effects on the selection, refused timings, and files that several processes use.

use std::{
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::common::{Folder, hopper, tiny_compiled, tiny_tensors, usual};
use gemmule::{
    DType, Engine, EngineError,
    engine::{
        Artifact, CompileOptions, Compiled, TimedOn, TuneMode, compile, description, emit,
        read_timings, timings_for, write_timings,
    },
    kernels::KernelSpec,
    machine::Machine,
    measure::shipped_configs,
    program::Program,
    select::Timings,
    tensor::Extents,
};
use insta::assert_snapshot;

fn on() -> TimedOn {
    TimedOn {
        card: "NVIDIA H200".to_owned(),
        capability: (9, 0),
        sms: 132,
        nvrtc: (13, 0),
    }
}

/// Compiles the first shipped model, an encoder, in f16.
fn encoder(machine: Machine) -> Compiled {
    let (_, model, config) = shipped_configs().expect("they are shipped").remove(0);
    let options = CompileOptions::new(DType::F16, machine);
    let model = description(model).expect("it is shipped");
    compile(&model, &config, &options).expect("it compiles")
}

/// Returns the kernels that a batch of `tokens` tokens launches, in order.
fn launched(program: &Program, tokens: u64) -> Vec<&KernelSpec> {
    let batch = Extents {
        tokens,
        batch: tokens.div_ceil(512),
        longest: tokens.min(512),
        pairs: tokens * tokens.min(512),
        rows: tokens,
        ..Extents::default()
    };
    let launched = program.launched(&batch).expect("it can be launched");
    let kernels = launched.into_iter();
    kernels
        .map(|(_, kernel)| &program.kernels[kernel])
        .collect()
}

/// Returns the estimated cycles of a kernel for a batch of `tokens` tokens; `None` for a kernel that is not selected by cost.
fn cycles(kernel: &KernelSpec, tokens: u64, machine: &Machine) -> Option<f64> {
    kernel.as_kernel().cycles(tokens, machine)
}

fn us(cycles: f64, machine: &Machine) -> f64 {
    cycles / f64::from(machine.clock_mhz)
}

/// Returns the launch of a batch of `tokens` tokens with the largest estimated time: its kernel, and the time in cycles.
fn heaviest(program: &Program, tokens: u64, machine: &Machine) -> (KernelSpec, f64) {
    let all = launched(program, tokens).into_iter();
    let timed = all.filter_map(|kernel| Some((kernel, cycles(kernel, tokens, machine)?)));
    let (kernel, cycles) = timed.max_by(|a, b| a.1.total_cmp(&b.1)).expect("some");
    (kernel.clone(), cycles)
}

/// Returns the sum of the estimated cycles of all launches of a batch of `tokens` tokens.
fn estimate(program: &Program, tokens: u64, machine: &Machine) -> f64 {
    let all = launched(program, tokens).into_iter();
    all.filter_map(|kernel| cycles(kernel, tokens, machine))
        .sum()
}

#[test]
fn a_kernel_that_was_slower_than_its_estimate_gives_way_near_the_timed_rows_and_nowhere_else() {
    const AT: u64 = 2048;
    for machine in [hopper(), usual()] {
        let compiled = encoder(machine.clone());
        let untimed = compiled.program.clone();
        let (slow, estimated) = heaviest(&untimed, AT, &machine);
        let mut timings = Timings::default();
        timings.add(
            &slow.as_kernel().symbol(),
            AT,
            2.0 * us(estimated, &machine),
        );
        let timed = compiled.program_with(&timings).expect("it lowers");
        timed.validate().expect("it is sound");
        for tokens in [AT - 64, AT, AT + 64] {
            assert!(
                !launched(&timed, tokens).contains(&&slow),
                "{tokens} tokens"
            );
        }
        // With at most half or at least twice the timed number of tokens, the estimated time is the same as without timings.
        for tokens in (8..=AT / 2)
            .step_by(56)
            .chain((2 * AT..16_384).step_by(192))
        {
            let (now, before) = (
                estimate(&timed, tokens, &machine),
                estimate(&untimed, tokens, &machine),
            );
            let change = now / before - 1.0;
            assert!(change.abs() < 0.02, "{tokens} tokens: {change}");
        }
        // The same timings give the same program and source. Without timings, the cost model chooses the kernels again.
        let again = encoder(machine.clone()).with_timings(Some(timings));
        let again = again.expect("it lowers");
        assert_eq!(again.program, timed);
        let source = |program: &Program| emit(&program.kernels).expect("it renders");
        assert_eq!(source(&again.program), source(&timed));
        assert_eq!(
            again.with_timings(None).expect("it lowers").program,
            untimed
        );
    }
}

#[test]
fn a_kernel_that_was_faster_than_its_estimate_is_launched_there() {
    const AT: u64 = 3000;
    let machine = hopper();
    let compiled = encoder(machine.clone());
    let alternatives = compiled.alternatives(AT, 0.1).expect("it was lowered");
    assert!(alternatives.len() > 5, "{}", alternatives.len());
    let mut n_launched = 0;
    for alternative in &alternatives {
        assert!(alternative.cover.contains(&alternative.kernel));
        let mut timings = Timings::default();
        for kernel in &alternative.cover {
            timings.add(&kernel.as_kernel().symbol(), AT, 1e-3);
        }
        let program = compiled.program_with(&timings).expect("it lowers");
        program.validate().expect("it is sound");
        n_launched += usize::from(launched(&program, AT).contains(&&alternative.kernel));
    }
    assert_eq!(n_launched, alternatives.len());
}

#[test]
fn timings_of_kernels_that_no_program_has_change_nothing() {
    let compiled = encoder(hopper());
    let untimed = compiled.program.clone();
    let mut timings = Timings::default();
    timings.add("gemm_f16_n1_k1_of_another_model", 1024, 1e-3);
    let compiled = compiled.with_timings(Some(timings)).expect("it lowers");
    assert_eq!(compiled.program, untimed);
}

#[test]
fn an_artifact_says_what_its_kernels_were_chosen_by() {
    let folder = Folder::new();
    let file = folder.file("tiny");
    let mut timings = Timings::default();
    for (rows, us) in [(226, 3.5), (452, 4.0)] {
        timings.add("gemm_bias_f16_n48_k16_t16x32x64_w1x2_s5", rows, us);
    }
    let compiled = tiny_compiled(DType::F16).with_timings(Some(timings));
    let artifact = Artifact::of(compiled.expect("it lowers"), Vec::new());
    assert_eq!((artifact.card.as_str(), artifact.timings), ("a100", 2));
    artifact.write(&file).expect("it is written");
    assert!(Artifact::read(&file).expect("it is sound") == artifact);
}

#[test]
fn a_file_that_was_written_is_read_and_one_that_was_changed_is_refused() {
    let folder = Folder::new();
    let mut timings = Timings::default();
    timings.add("gemm_bias_f16_n48_k16", 226, 3.5);
    timings.add("gemm_bias_f16_n48_k16", 452, 4.25);
    let file = folder.file("timings.ron");
    write_timings(&file, &timings, &on()).expect("it is written");
    assert_eq!(read_timings(&file).expect("it is sound"), (timings, on()));
    let text = std::fs::read_to_string(&file).expect("text");
    let refused = |text: &str| {
        folder.write("timings.ron", text);
        folder.text(&read_timings(&file).expect_err("it is refused"))
    };
    assert_snapshot!(refused(&text.replace("4.25", "1.25")), @"the timings in `[dir]/timings.ron` are not valid: their checksum does not match: they were damaged, or changed by hand; measure again with `gemmule tune`, or omit the file");
    assert_snapshot!(refused(&text.replace("H200", "H100")), @"the timings in `[dir]/timings.ron` are not valid: their checksum does not match: they were damaged, or changed by hand; measure again with `gemmule tune`, or omit the file");
    assert_snapshot!(refused("(format: 2)"), @"the timings in `[dir]/timings.ron` are not valid: their format is 2, this version of gemmule reads format 1; measure again with `gemmule tune`, or omit the file");
    let kernels = text.lines().find(|line| line.contains("kernels:"));
    let kernels = kernels.expect("what they were measured on").to_owned();
    // The checksum also covers the version of the kernels. If only this version is changed in a file, the file counts as damaged.
    assert_snapshot!(refused(&text.replace(&kernels, "    kernels: \"0\",")), @"the timings in `[dir]/timings.ron` are not valid: their checksum does not match: they were damaged, or changed by hand; measure again with `gemmule tune`, or omit the file");
    for end in [0, 1, text.len() / 2, text.len() - 3] {
        let cut = refused(&text[..end]);
        assert!(cut.contains("are not valid: they are not RON"), "{cut}");
    }
    let absent = read_timings(&folder.file("absent")).expect_err("there is none");
    assert_snapshot!(folder.text(&absent), @r"
`[dir]/absent` cannot be read
caused by: No such file or directory (os error 2)
");
}

#[test]
fn timings_of_another_card_or_nvrtc_are_refused() {
    let folder = Folder::new();
    let file = folder.file("timings.ron");
    let mut timings = Timings::default();
    timings.add("gemm_bias_f16_n48_k16", 226, 3.5);
    write_timings(&file, &timings, &on()).expect("it is written");
    let read = || read_timings(&file).expect("it is sound");
    let refused = |machine: &Machine, nvrtc| {
        let error = timings_for(&file, read(), machine, nvrtc).expect_err("they are refused");
        folder.text(&error)
    };
    let named = |name| Machine::named(name).expect("it is described");
    for nvrtc in [None, Some((13, 0))] {
        let taken = timings_for(&file, read(), &named("h200"), nvrtc);
        assert_eq!(taken.expect("they fit"), timings);
    }
    assert_snapshot!(refused(&named("h200"), Some((12, 8))), @"the timings in `[dir]/timings.ron` are not valid: they were measured with NVRTC 13.0, and this is 12.8; measure again with `gemmule tune`, or omit the file");
    assert_snapshot!(refused(&named("a100"), None), @"the timings in `[dir]/timings.ron` are not valid: they were measured on NVIDIA H200 (capability 9.0, 132 SMs), and kernels are chosen for a100 (capability 8.0, 108 SMs); measure again with `gemmule tune`, or omit the file");
    assert_snapshot!(refused(&named("h100_sxm"), None), @"the timings in `[dir]/timings.ron` are not valid: they were measured on NVIDIA H200 (capability 9.0, 132 SMs), and kernels are chosen for h100_sxm (capability 9.0, 132 SMs); measure again with `gemmule tune`, or omit the file");
    // A part of the card (MIG), with fewer SMs.
    assert_snapshot!(refused(&named("h200").with_sms(60), None), @"the timings in `[dir]/timings.ron` are not valid: they were measured on NVIDIA H200 (capability 9.0, 132 SMs), and kernels are chosen for h200 (capability 9.0, 60 SMs); measure again with `gemmule tune`, or omit the file");
    // Timings of a card without a description file are accepted for all cards with its compute capability.
    let unknown = TimedOn {
        card: "Card".to_owned(),
        ..on()
    };
    write_timings(&file, &timings, &unknown).expect("it is written");
    assert!(timings_for(&file, read(), &named("h200"), None).is_ok());
    assert!(timings_for(&file, read(), &named("h100_pcie"), None).is_ok());
    assert_snapshot!(refused(&named("a100"), None), @"the timings in `[dir]/timings.ron` are not valid: they were measured on Card (capability 9.0, 132 SMs), and kernels are chosen for a100 (capability 8.0, 108 SMs); measure again with `gemmule tune`, or omit the file");
}

#[test]
fn nothing_is_timed_on_a_cpu_and_no_timings_are_used() {
    let folder = Folder::whole(&tiny_tensors(DType::F32));
    let text = |builder: gemmule::Builder| {
        let error = builder.build().err().expect("an error");
        let text = folder.text(&error);
        let threads = text.find(" threads").expect("it counts threads");
        let digits = text[..threads].rfind(' ').expect("a number");
        format!("{} N{}", &text[..digits], &text[threads..])
    };
    assert_snapshot!(text(folder.builder().tune(TuneMode::Quick)), @"kernels can only be timed on a CUDA device, and this is the CPU, N threads; omit the tuning");
    assert_snapshot!(text(folder.builder().timings("absent.ron")), @"kernels can only be timed on a CUDA device, and this is the CPU, N threads; omit the tuning");
    let engine = folder.builder().tune(TuneMode::Off).build();
    assert!(engine.expect("it builds").chosen_by().is_none());
}

#[test]
fn an_artifact_is_not_timed() {
    let folder = Folder::new();
    let file = folder.file("tiny");
    Artifact::of(tiny_compiled(DType::F32), Vec::new())
        .write(&file)
        .expect("it is written");
    let builder = || Engine::from_artifact(&file).device(gemmule::DeviceChoice::Cpu);
    let text = |error: EngineError| folder.text(&error);
    assert_snapshot!(text(builder().tune(TuneMode::Full).build().err().expect("an error")), @"the artifact `[dir]/tiny` already contains its kernels; tune the model when it is compiled");
    assert_snapshot!(text(builder().timings("x").build().err().expect("an error")), @"the artifact `[dir]/tiny` already contains its kernels; tune the model when it is compiled");
}

#[test]
fn a_file_that_never_ends_is_refused() {
    if !Path::new("/dev/zero").exists() {
        return;
    }
    let began = Instant::now();
    let error = read_timings(Path::new("/dev/zero")).expect_err("it has no end");
    assert_snapshot!(error, @"`/dev/zero` is larger than 16 MiB, the size limit of a timings file; check that it is the right file");
    assert!(began.elapsed() < Duration::from_secs(10));
}

const ROOT: &str = "GEMMULE_TEST_TIMINGS";

#[test]
#[ignore = "another test starts it as a process of its own; alone it does nothing"]
fn child() {
    let Some(file) = std::env::var_os(ROOT) else {
        return;
    };
    for number in 0..200 {
        // The files of the two processes differ in length, so that a mixture of them cannot be read.
        let on = TimedOn {
            sms: std::process::id(),
            ..on()
        };
        let mut timings = Timings::default();
        timings.add(&"x".repeat(1 + number % 200), 226, 3.5);
        write_timings(Path::new(&file), &timings, &on).expect("it is written");
    }
}

#[test]
fn processes_that_write_at_once_leave_a_whole_file() {
    let folder = Folder::new();
    let file = folder.file("timings.ron");
    let exe = std::env::current_exe().expect("this test");
    let mut children: Vec<_> = (0..3)
        .map(|_| {
            Command::new(&exe)
                .args(["--exact", "timings::child", "--ignored"])
                .env(ROOT, &file)
                .stdout(Stdio::null())
                .spawn()
                .expect("it starts")
        })
        .collect();
    let mut n_read = 0;
    while children
        .iter_mut()
        .any(|c| c.try_wait().expect("it is ours").is_none())
    {
        match read_timings(&file) {
            Ok(_) => n_read += 1,
            // The first file has not been written yet.
            Err(EngineError::Read { .. }) if n_read == 0 => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert!(
        children
            .iter_mut()
            .all(|c| c.wait().expect("it is ours").success())
    );
    let pids: Vec<u32> = children.iter().map(std::process::Child::id).collect();
    let (_, last) = read_timings(&file).expect("it is whole");
    assert!(pids.contains(&last.sms));
    let kept = file.parent().expect("it has a folder");
    assert_eq!(std::fs::read_dir(kept).expect("it is there").count(), 1);
}
