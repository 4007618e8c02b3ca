//! Picks through the API: what they change, where they are refused, and their files between
//! processes.

mod common;

use std::{
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use common::{Folder, tiny_compiled, tiny_tensors};
use gemmule::{
    DType, Engine, EngineError,
    engine::{
        Artifact, Compiled, TuneMode, digests, emit, picks_for_targets, read_picks, write_picks,
    },
    jit::Target,
    kernels::KernelSpec,
    program::Limit,
    tune::{Card, Choice, Effort, Made, Picked, Picks, Problem, Range},
};
use insta::assert_snapshot;

fn made() -> Made {
    Made {
        card: Card {
            name: "NVIDIA H200".to_owned(),
            capability: (9, 0),
            n_sms: 132,
        },
        nvrtc: (13, 0),
    }
}

/// The last candidate up to 10, where it serves so much, and then the first that serves all.
fn unusual(problem: &Problem) -> Vec<Range> {
    let candidates = problem.candidates();
    let serving = |size| move |c: &&Choice| c.most().is_none_or(|most| size <= most);
    let first = candidates.iter().rev().find(serving(10));
    let last = candidates.iter().find(serving(u64::MAX));
    let range = |up_to, choice: Option<&Choice>| Range {
        up_to,
        choice: *choice.expect("every problem has some"),
    };
    vec![range(Some(10), first), range(None, last)]
}

fn picks_of(compiled: &Compiled) -> Picks {
    let problems = compiled.problems().expect("it was lowered");
    let mut picks = Picks::new(made());
    for (problem, digest) in problems
        .iter()
        .zip(digests(&problems).expect("they render"))
    {
        let picked = Picked {
            digest,
            effort: Effort::Quick,
            ranges: unusual(problem),
            timings: Vec::new(),
        };
        picks.problems.insert(problem.key(), picked);
    }
    picks
}

#[test]
fn the_kernels_that_are_picked_are_launched() {
    for dtype in [DType::F32, DType::F16] {
        let compiled = tiny_compiled(dtype);
        let problems = compiled.problems().expect("it was lowered");
        let picks = picks_of(&compiled);
        let guessed = compiled.program.clone();
        let compiled = compiled.with_picks(Some(picks)).expect("they are sound");
        compiled.program.validate().expect("it is sound");
        // Attention is three launches up to 10 tokens a sequence, and one beyond.
        let conditional: Vec<String> = compiled
            .program
            .steps
            .iter()
            .filter_map(|s| Some(s.when?.to_string()))
            .collect();
        let grouped = "longest up to 10";
        assert_eq!(conditional, [grouped, grouped, grouped, "longest above 10"]);
        let mut n_chosen = 0;
        for step in &compiled.program.steps {
            let got: Vec<(Option<Limit>, &KernelSpec)> = step
                .variants
                .iter()
                .map(|v| (v.limit, &compiled.program.kernels[v.kernel]))
                .collect();
            n_chosen += problems
                .iter()
                .filter(|problem| {
                    let ranges = unusual(problem);
                    let kernels = ranges.iter().map(|r| problem.kernels(r.choice));
                    let kernels: Vec<KernelSpec> = kernels.flatten().collect();
                    got.iter().map(|(_, k)| *k).eq(&kernels)
                        && got.iter().all(|(limit, _)| {
                            matches!(limit, None | Some(Limit::Rows(10) | Limit::Longest(10)))
                        })
                })
                .count();
        }
        // Four GEMMs of the layer, one of the pooler if it is asked for.
        assert!(n_chosen >= 4, "{n_chosen}");
        assert_ne!(compiled.program, guessed);
        // The same picks give the same program and source; none give back the first guess.
        let source = emit(&compiled.program.kernels).expect("it renders");
        let again = tiny_compiled(dtype);
        let again_picks = picks_of(&again);
        let again = again.with_picks(Some(again_picks)).expect("they are sound");
        assert_eq!(again.program, compiled.program);
        assert_eq!(emit(&again.program.kernels).expect("it renders"), source);
        let back = compiled.with_picks(None).expect("it lowers");
        assert_eq!(back.program, guessed);
    }
}

#[test]
fn picks_that_no_problem_can_have_are_refused_when_they_are_lowered() {
    let compiled = tiny_compiled(DType::F16);
    let mut picks = picks_of(&compiled);
    for picked in picks.problems.values_mut() {
        picked.ranges[1].choice = Choice::MhaShort { max_len: 1 << 30 };
    }
    let error = compiled
        .with_picks(Some(picks))
        .err()
        .expect("they are refused");
    assert_snapshot!(error, @"`layer.0.query+key+value` (bias_linear): its picks are refused: `gemm_bias_f16_n48_k16` has no candidate mha_short_l1073741824; it has t128x64x64_w2x2_s4, t64x64x64_w2x2_s4, t32x64x64_w1x4_s4, t16x64x64_w1x4_s5, t16x32x64_w1x2_s5; leave them out, or tune anew");
}

#[test]
fn an_artifact_keeps_its_picks_and_shows_them() {
    let folder = Folder::new();
    let file = folder.file("tiny");
    let compiled = tiny_compiled(DType::F16);
    let picks = picks_of(&compiled);
    let compiled = compiled.with_picks(Some(picks.clone())).expect("sound");
    let artifact = Artifact::of(compiled, Vec::new());
    artifact.write(&file).expect("it is written");
    let read = Artifact::read(&file).expect("it is sound");
    assert_eq!(read.picks.as_ref(), Some(&picks));
    assert!(read == artifact);
    let exported = folder.file("picks.ron");
    write_picks(&exported, &read.picks.expect("it has picks")).expect("it is written");
    assert_eq!(read_picks(&exported).expect("it is sound"), picks);

    let mut hostile = artifact.clone();
    for picked in hostile
        .picks
        .iter_mut()
        .flat_map(|p| p.problems.values_mut())
    {
        picked.ranges.pop();
    }
    hostile.write(&file).expect("it is written");
    let error = Artifact::read(&file).expect_err("its picks are impossible");
    assert_snapshot!(folder.text(&error), @"`[dir]/tiny` is no artifact of this version of gemmule: its picks are impossible: the last range of `bias_residual_layernorm_f16_w16_eps1em12` ends at 10; the last has no limit; compile the model again");
}

#[test]
fn for_targets_without_a_device_picks_of_their_capability_are_taken() {
    let folder = Folder::new();
    let file = folder.file("picks.ron");
    let compiled = tiny_compiled(DType::F16);
    let problems = compiled.problems().expect("it was lowered");
    let mut picks = picks_of(&compiled);
    write_picks(&file, &picks).expect("it is written");
    let of = |targets: &[Target], nvrtc| picks_for_targets(&file, &problems, targets, nvrtc);
    let refused = |targets: &[Target], nvrtc| {
        let error = of(targets, nvrtc).expect_err("they are refused");
        folder.text(&error)
    };
    assert_eq!(of(&[Target::Sm90a], (13, 0)).expect("they fit"), picks);
    assert_snapshot!(refused(&[Target::Sm90a, Target::Sm80], (13, 0)), @"the picks in `[dir]/picks.ron` are refused: they were measured on NVIDIA H200 (capability 9.0, 132 multiprocessors), whose code is for sm_90a, not for sm_80; measure anew with `--tune quick`, or leave the file out");
    assert_snapshot!(refused(&[Target::Sm90a], (12, 8)), @"the picks in `[dir]/picks.ron` are refused: they were measured with code of NVRTC 13.0, and this is NVRTC 12.8; measure anew with `--tune quick`, or leave the file out");
    picks.made.card.capability = (7, 5);
    write_picks(&file, &picks).expect("it is written");
    assert_snapshot!(refused(&[], (13, 0)), @"the picks in `[dir]/picks.ron` are refused: they were measured on NVIDIA H200 (capability 7.5, 132 multiprocessors), a card for which no target makes code; measure anew with `--tune quick`, or leave the file out");
    picks.made.card.capability = (9, 0);
    for picked in picks.problems.values_mut() {
        picked.digest = "0".repeat(64);
    }
    write_picks(&file, &picks).expect("it is written");
    assert_snapshot!(refused(&[Target::Sm90a], (13, 0)), @"the picks in `[dir]/picks.ron` are refused: the kernels of `gemm_bias_f16_n48_k16` are not those that were measured; this version of gemmule generates others; measure anew with `--tune quick`, or leave the file out");
    // Those of other models do no harm, and are left out.
    let other = tiny_compiled(DType::BF16)
        .problems()
        .expect("it was lowered");
    let none = picks_for_targets(&file, &other, &[Target::Sm90a], (13, 0));
    assert!(none.expect("they fit").problems.is_empty());
}

#[test]
fn nothing_is_tuned_on_a_cpu_and_no_picks_are_used() {
    let folder = Folder::whole(&tiny_tensors(DType::F32));
    let text = |builder: gemmule::Builder| {
        let error = builder.build().err().expect("an error");
        let text = folder.text(&error);
        let threads = text.find(" threads").expect("it counts threads");
        let digits = text[..threads].rfind(' ').expect("a number");
        format!("{} N{}", &text[..digits], &text[threads..])
    };
    assert_snapshot!(text(folder.builder().tune(TuneMode::Quick)), @"kernels are tuned, and picks are used, on a CUDA device only, and this is the CPU, N threads; leave `--tune` and `--picks` out");
    assert_snapshot!(text(folder.builder().picks("absent.ron")), @"kernels are tuned, and picks are used, on a CUDA device only, and this is the CPU, N threads; leave `--tune` and `--picks` out");
    assert!(folder.builder().tune(TuneMode::Off).build().is_ok());
    let both = folder.builder().tune(TuneMode::Guess).picks("some.ron");
    let error = both.build().err().expect("an error");
    assert_snapshot!(error, @"`--tune guess` keeps all picks out, and there are those in `some.ron`; leave one of the two out");
}

#[test]
fn an_artifact_is_not_tuned() {
    let folder = Folder::new();
    let file = folder.file("tiny");
    Artifact::of(tiny_compiled(DType::F32), Vec::new())
        .write(&file)
        .expect("it is written");
    let builder = || Engine::from_artifact(&file).device(gemmule::DeviceChoice::Cpu);
    let text = |error: EngineError| folder.text(&error);
    assert_snapshot!(text(builder().tune(TuneMode::Full).build().err().expect("an error")), @"the artifact `[dir]/tiny` was compiled with its own picks; give `--tune` or `--picks` to `gemmule compile`");
    assert_snapshot!(text(builder().picks("x").build().err().expect("an error")), @"the artifact `[dir]/tiny` was compiled with its own picks; give `--tune` or `--picks` to `gemmule compile`");
}

#[test]
fn a_file_that_never_ends_is_refused() {
    if !Path::new("/dev/zero").exists() {
        return;
    }
    let began = Instant::now();
    let error = read_picks(Path::new("/dev/zero")).expect_err("it has no end");
    assert_snapshot!(error, @"the picks in `/dev/zero` are refused: they are more than 1048576 bytes, which no tuner writes; measure anew with `--tune quick`, or leave the file out");
    assert!(began.elapsed() < Duration::from_secs(10));
}

const ROOT: &str = "GEMMULE_TEST_PICKS";

#[test]
#[ignore = "another test starts it as a process of its own; alone it does nothing"]
fn child() {
    let Some(file) = std::env::var_os(ROOT) else {
        return;
    };
    let mut picks = picks_of(&tiny_compiled(DType::F16));
    for number in 0..200 {
        // Of different lengths, so that a mixture of two does not read.
        picks.made.card.n_sms = std::process::id();
        picks.gemmule = "x".repeat(1 + number % 200);
        write_picks(Path::new(&file), &picks).expect("it is written");
    }
}

#[test]
fn processes_that_write_at_once_leave_a_whole_file() {
    let folder = Folder::new();
    let file = folder.file("kept/picks.ron");
    let exe = std::env::current_exe().expect("this test");
    let mut children: Vec<_> = (0..3)
        .map(|_| {
            Command::new(&exe)
                .args(["--exact", "child", "--ignored"])
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
        match read_picks(&file) {
            Ok(_) => n_read += 1,
            // Before the first was written.
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
    let last = read_picks(&file).expect("it is whole");
    assert!(pids.contains(&last.made.card.n_sms));
    let kept = file.parent().expect("it has a folder");
    assert_eq!(std::fs::read_dir(kept).expect("it is there").count(), 1);
}
