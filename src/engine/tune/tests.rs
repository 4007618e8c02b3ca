//! The tuner on tracks that are made up, and its files.

use std::{cell::RefCell, sync::Mutex};

use insta::assert_snapshot;

use super::*;
use crate::{
    engine::{description, picks::write_picks, shipped_configs},
    tune::{Card, Choice, Picks},
};

/// A track on which the candidate that is named takes half as long as all others.
struct Favourite {
    name: &'static str,
    wrong: Vec<&'static str>,
    memory_up_to: u64,
    raced: RefCell<Vec<String>>,
}

impl Favourite {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            wrong: Vec::new(),
            memory_up_to: u64::MAX,
            raced: RefCell::default(),
        }
    }
}

impl Track for Favourite {
    fn prepare(&mut self, races: &[(&Problem, Schedule)]) -> Result<(), EngineError> {
        assert!(!races.is_empty(), "nothing is prepared for nothing");
        Ok(())
    }

    fn race(&mut self, problem: &Problem, heat: &Heat) -> Result<Option<Vec<Run>>, EngineError> {
        self.raced.borrow_mut().push(problem.key());
        if heat.size > self.memory_up_to {
            return Ok(None);
        }
        let run = |choice: &Choice| {
            let name = choice.to_string();
            Run {
                us: if name == self.name { 1.0 } else { 2.0 },
                agrees: !self.wrong.contains(&name.as_str()),
            }
        };
        Ok(Some(heat.contenders.iter().map(run).collect()))
    }
}

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

/// Of a BERT in f16: GEMMs and attention.
fn problems() -> Vec<Problem> {
    let (_, name, config) = shipped_configs().unwrap().remove(0);
    let options = crate::engine::CompileOptions::new(crate::DType::F16);
    let compiled = crate::engine::compile(&description(name).unwrap(), &config, &options);
    compiled.unwrap().problems().unwrap()
}

fn wanted(problems: &[Problem]) -> Vec<Wanted<'_>> {
    let digests = digests(problems).unwrap();
    let pairs = problems.iter().zip(digests);
    pairs
        .map(|(problem, digest)| Wanted { problem, digest })
        .collect()
}

fn choosing(folder: &Path, effort: Option<Effort>) -> Choosing<'static> {
    Choosing {
        made: made(),
        effort,
        again: false,
        end: Instant::now() + Duration::from_secs(600),
        store: Some(Store::at(folder)),
        shipped: HashMap::new(),
        progress: &|_, _, _| (),
    }
}

impl Choosing<'_> {
    fn picks(
        &self,
        wanted: &[Wanted],
        given: HashMap<String, Picked>,
        track: &mut dyn Track,
    ) -> Result<Picks, EngineError> {
        Ok(self.run(wanted, given, track)?.picks)
    }
}

const TILE: &str = "t64x64x64_w2x2_s4";

#[test]
fn the_fastest_is_picked_and_kept_for_the_next_time() {
    let (problems, folder) = (problems(), tempfile::tempdir().unwrap());
    let wanted = wanted(&problems);
    let quick = choosing(folder.path(), Some(Effort::Quick));
    let mut track = Favourite::new(TILE);
    let picks = quick.picks(&wanted, HashMap::new(), &mut track).unwrap();
    assert_eq!(picks.problems.len(), problems.len());
    assert!(!track.raced.borrow().is_empty());

    let mut idle = Favourite::new("nothing");
    let again = quick.picks(&wanted, HashMap::new(), &mut idle).unwrap();
    assert_eq!(again, picks);
    assert!(idle.raced.borrow().is_empty());

    // What was found with less effort is not enough for more, but the other way round it is.
    let full = choosing(folder.path(), Some(Effort::Full));
    let fully = full.picks(&wanted, HashMap::new(), &mut Favourite::new(TILE));
    let fully = fully.unwrap();
    for (key, picked) in &fully.problems {
        assert_eq!(picked.effort, Effort::Full);
        if key.starts_with("gemm") {
            let problem = problems.iter().find(|p| p.key() == *key).unwrap();
            // At sizes for which it is hopeless it was not raced.
            for heat in Schedule::new(problem, Effort::Full, 132).heats {
                let raced = heat.contenders.iter().any(|c| c.to_string() == TILE);
                let timing = picked.timings.iter().find(|t| t.size == heat.size);
                assert_eq!(timing.unwrap().us == 1.0, raced, "{key} at {}", heat.size);
            }
        }
    }
    let quickly = quick.picks(&wanted, HashMap::new(), &mut idle).unwrap();
    assert_eq!(quickly, fully);
    assert!(idle.raced.borrow().is_empty());
}

#[test]
fn off_measures_nothing_and_takes_only_what_is_given() {
    let (problems, folder) = (problems(), tempfile::tempdir().unwrap());
    let wanted = wanted(&problems);
    let quick = choosing(folder.path(), Some(Effort::Quick));
    let picks = quick.picks(&wanted, HashMap::new(), &mut Favourite::new(TILE));
    let picks = picks.unwrap();

    let off = choosing(folder.path(), None);
    let mut idle = Favourite::new("nothing");
    let none = off.picks(&wanted, HashMap::new(), &mut idle).unwrap();
    assert!(none.problems.is_empty());
    let key = problems[0].key();
    let given = HashMap::from([(key.clone(), picks.problems[&key].clone())]);
    let one = off.picks(&wanted, given, &mut idle).unwrap();
    assert_eq!(one.problems.keys().collect::<Vec<_>>(), [&key]);
    assert!(idle.raced.borrow().is_empty());
}

#[test]
fn shipped_picks_serve_where_nothing_is_measured_and_nothing_given() {
    let (problems, folder) = (problems(), tempfile::tempdir().unwrap());
    let wanted = wanted(&problems);
    let quick = choosing(folder.path(), Some(Effort::Quick));
    let picks = quick.picks(&wanted, HashMap::new(), &mut Favourite::new(TILE));
    let picks = picks.unwrap().problems;
    let keys: Vec<String> = problems.iter().map(Problem::key).collect();
    let of = |keys: &[&String]| -> HashMap<String, Picked> {
        let pairs = keys.iter().map(|&key| (key.clone(), picks[key].clone()));
        pairs.collect()
    };

    let mut off = choosing(folder.path(), None);
    off.shipped = of(&[&keys[0], &keys[1]]);
    let mut idle = Favourite::new("nothing");
    let chosen = off.run(&wanted, of(&[&keys[0]]), &mut idle).unwrap();
    assert_eq!(chosen.origins.len(), problems.len());
    let from: Vec<Origin> = keys[..3].iter().map(|key| chosen.origins[key]).collect();
    assert_eq!(from, [Origin::Given, Origin::Shipped, Origin::Guess]);
    assert_eq!(chosen.picks.problems.len(), 2);

    // Who asks for measurements gets his own card's.
    let mut quick = choosing(&folder.path().join("other"), Some(Effort::Quick));
    quick.shipped = of(&[&keys[0]]);
    let mut track = Favourite::new(TILE);
    let chosen = quick.run(&wanted, HashMap::new(), &mut track).unwrap();
    assert!(chosen.origins.values().all(|o| *o == Origin::Measured));
}

#[test]
fn a_full_race_ends_with_its_time() {
    let (problems, folder) = (problems(), tempfile::tempdir().unwrap());
    let wanted = wanted(&problems);
    let n_raced = |end: Instant, folder: &Path| {
        let mut full = choosing(folder, Some(Effort::Full));
        full.end = end;
        let mut track = Favourite::new(TILE);
        let picks = full.picks(&wanted, HashMap::new(), &mut track).unwrap();
        for picked in picks.problems.values() {
            assert!(picked.timings.windows(2).all(|t| t[0].size < t[1].size));
            assert!(picked.timings.len() >= 3);
        }
        track.raced.into_inner().len()
    };
    let now = Instant::now();
    let all = n_raced(now + Duration::from_secs(600), &folder.path().join("all"));
    let n_stages = |at: usize| -> usize {
        let of = |p: &Problem| Schedule::new(p, Effort::Full, 132).stages()[at].len();
        problems.iter().map(of).sum()
    };
    assert_eq!(all, (0..4).map(n_stages).sum::<usize>());

    // Without any time: the coarsest sizes of the first, and the others are guessed.
    let mut full = choosing(&folder.path().join("few"), Some(Effort::Full));
    full.end = now;
    let mut track = Favourite::new(TILE);
    let chosen = full.run(&wanted, HashMap::new(), &mut track).unwrap();
    let first = Schedule::new(&problems[0], Effort::Full, 132);
    assert_eq!(track.raced.borrow().len(), first.stages()[0].len());
    let measured = |o: &&Origin| **o == Origin::Measured;
    assert_eq!(chosen.origins.values().filter(measured).count(), 1);
    assert_eq!(chosen.origins.len(), problems.len());
}

#[test]
fn again_measures_what_was_kept() {
    let (problems, folder) = (problems(), tempfile::tempdir().unwrap());
    let wanted = wanted(&problems);
    let mut quick = choosing(folder.path(), Some(Effort::Quick));
    let first = quick.picks(&wanted, HashMap::new(), &mut Favourite::new(TILE));
    quick.again = true;
    let other = "t32x64x64_w1x4_s4";
    let second = quick.picks(&wanted, HashMap::new(), &mut Favourite::new(other));
    assert_ne!(first.unwrap(), second.unwrap());
}

#[test]
fn what_is_kept_and_damaged_is_measured_anew() {
    let (problems, folder) = (problems(), tempfile::tempdir().unwrap());
    let wanted = wanted(&problems);
    let quick = choosing(folder.path(), Some(Effort::Quick));
    let first = quick.picks(&wanted, HashMap::new(), &mut Favourite::new(TILE));
    let store = Store::at(folder.path());
    let file = store.file(&made(), wanted[0].problem, &wanted[0].digest);
    for damage in ["", "(format: 1", "\u{0}", "(format: 2)"] {
        std::fs::write(&file, damage).unwrap();
        let mut track = Favourite::new(TILE);
        let again = quick.picks(&wanted, HashMap::new(), &mut track).unwrap();
        assert_eq!(&again, first.as_ref().unwrap(), "{damage}");
        let key = problems[0].key();
        assert!(track.raced.borrow().iter().all(|raced| *raced == key));
        assert!(!track.raced.borrow().is_empty());
    }
    // Another problem's file in its place.
    let other = store.file(&made(), wanted[1].problem, &wanted[1].digest);
    std::fs::copy(other, &file).unwrap();
    let mut track = Favourite::new(TILE);
    quick.picks(&wanted, HashMap::new(), &mut track).unwrap();
    assert!(!track.raced.borrow().is_empty());
}

#[cfg(unix)]
#[test]
fn what_others_may_have_written_is_tuned_anew() {
    use std::os::unix::fs::PermissionsExt;
    let (problems, folder) = (problems(), tempfile::tempdir().unwrap());
    let wanted = wanted(&problems);
    let quick = choosing(folder.path(), Some(Effort::Quick));
    let mut track = Favourite::new(TILE);
    quick.picks(&wanted, HashMap::new(), &mut track).unwrap();
    let store = Store::at(folder.path());
    let file = store.file(&made(), wanted[0].problem, &wanted[0].digest);
    let set_mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&file), 0o600);
    set_mode(&file, 0o666);
    let error = store
        .get(&made(), wanted[0].problem, &wanted[0].digest)
        .unwrap_err();
    let told = with_causes(&error).replace(&file.display().to_string(), "FILE");
    insta::assert_snapshot!(told, @"`FILE` cannot be read: others may write to FILE (mode 0666); `chmod go-w FILE` mends it");

    let mut track = Favourite::new(TILE);
    quick.picks(&wanted, HashMap::new(), &mut track).unwrap();
    assert!(!track.raced.borrow().is_empty());
    assert_eq!(mode(&file), 0o600, "it was replaced");
    let mut track = Favourite::new(TILE);
    quick.picks(&wanted, HashMap::new(), &mut track).unwrap();
    assert!(track.raced.borrow().is_empty());
}

#[test]
fn a_folder_that_cannot_be_written_stops_nothing() {
    let (problems, folder) = (problems(), tempfile::tempdir().unwrap());
    let wanted = wanted(&problems);
    let no_folder = folder.path().join("a_file");
    std::fs::write(&no_folder, "").unwrap();
    let quick = choosing(&no_folder, Some(Effort::Quick));
    let picks = quick.picks(&wanted, HashMap::new(), &mut Favourite::new(TILE));
    assert_eq!(picks.unwrap().problems.len(), problems.len());
}

#[test]
fn a_candidate_that_differs_is_never_picked() {
    let (problems, folder) = (problems(), tempfile::tempdir().unwrap());
    let wanted = wanted(&problems);
    let full = choosing(folder.path(), Some(Effort::Full));
    let mut track = Favourite::new(TILE);
    track.wrong.push(TILE);
    let picks = full.picks(&wanted, HashMap::new(), &mut track).unwrap();
    for (problem, one) in problems.iter().zip(&wanted) {
        // The first guess is what the others are compared with.
        let guessed = |size| choice_at(&problem.guess(), size).unwrap().to_string() == TILE;
        for timing in &picks.problems[&one.problem.key()].timings {
            let picked = choice_at(&picks.problems[&problem.key()].ranges, timing.size).unwrap();
            assert!(picked.to_string() != TILE || guessed(timing.size));
        }
    }
}

#[test]
fn a_guess_that_no_other_agrees_with_is_an_error() {
    struct Odd;
    impl Track for Odd {
        fn prepare(&mut self, _: &[(&Problem, Schedule)]) -> Result<(), EngineError> {
            Ok(())
        }
        fn race(&mut self, _: &Problem, heat: &Heat) -> Result<Option<Vec<Run>>, EngineError> {
            let run = |at: usize| Run {
                us: 1.0,
                agrees: at == 0,
            };
            Ok(Some((0..heat.contenders.len()).map(run).collect()))
        }
    }
    let (problems, folder) = (problems(), tempfile::tempdir().unwrap());
    let quick = choosing(folder.path(), Some(Effort::Quick));
    let error = quick.picks(&wanted(&problems), HashMap::new(), &mut Odd);
    assert_snapshot!(error.unwrap_err(), @"no candidate of `gemm_bias_f16_n2304_k768` on 20 rows has the result of the first guess, t16x32x64_w1x2_s5; `gemmule kernels check` tells which are wrong");
}

#[test]
fn sizes_without_memory_are_left_to_the_last_range() {
    let (problems, folder) = (problems(), tempfile::tempdir().unwrap());
    let wanted = wanted(&problems);
    let quick = choosing(folder.path(), Some(Effort::Quick));
    let mut track = Favourite::new(TILE);
    track.memory_up_to = 600;
    let picks = quick.picks(&wanted, HashMap::new(), &mut track).unwrap();
    for picked in picks.problems.values() {
        assert!([320, 512].contains(&picked.timings.last().unwrap().size));
        assert_eq!(picked.ranges.last().unwrap().up_to, None);
    }
    track.memory_up_to = 0;
    let none = choosing(&folder.path().join("other"), Some(Effort::Quick));
    let error = none.picks(&wanted, HashMap::new(), &mut track).unwrap_err();
    assert_snapshot!(error, @"`gemm_bias_f16_n2304_k768` could not be timed at size 20, the smallest of its sizes; is there memory left on the device?");
}

#[test]
fn progress_counts_every_race() {
    let (problems, folder) = (problems(), tempfile::tempdir().unwrap());
    let seen = Mutex::new(Vec::new());
    let progress = |stage, done, total| {
        assert_eq!(stage, Stage::Tuning);
        seen.lock().unwrap().push((done, total));
    };
    let choosing = Choosing {
        progress: &progress,
        ..choosing(folder.path(), Some(Effort::Quick))
    };
    let mut track = Favourite::new(TILE);
    choosing
        .picks(&wanted(&problems), HashMap::new(), &mut track)
        .unwrap();
    let n = track.raced.borrow().len();
    let seen = seen.lock().unwrap();
    assert_eq!(seen.first(), Some(&(1, n)));
    assert_eq!(seen.last(), Some(&(n, n)));
}

#[test]
fn a_given_file_that_is_refused_is_an_error_or_tuned_anew() {
    let (problems, folder) = (problems(), tempfile::tempdir().unwrap());
    let wanted = wanted(&problems);
    let quick = choosing(&folder.path().join("store"), Some(Effort::Quick));
    let picks = quick.picks(&wanted, HashMap::new(), &mut Favourite::new(TILE));
    let file = folder.path().join("picks.ron");
    write_picks(&file, &picks.unwrap()).unwrap();
    let read = |made: &Made, mode| given(&file, made, &wanted, mode);
    assert_eq!(read(&made(), TuneMode::Off).unwrap().len(), problems.len());

    let text = |error: EngineError| {
        let folder = folder.path().display().to_string();
        error.to_string().replace(&folder, "[dir]")
    };
    let mut here = made();
    here.card.name = "NVIDIA A100".to_owned();
    assert_snapshot!(text(read(&here, TuneMode::Off).unwrap_err()), @"the picks in `[dir]/picks.ron` are refused: they were measured on NVIDIA H200 (capability 9.0, 132 multiprocessors), and this is NVIDIA A100 (capability 9.0, 132 multiprocessors); measure anew with `--tune quick`, or leave the file out");
    assert!(read(&here, TuneMode::Quick).unwrap().is_empty());

    let mut other = self::wanted(&problems);
    other[0].digest = "0".repeat(64);
    let error = given(&file, &made(), &other, TuneMode::Off).unwrap_err();
    assert_snapshot!(text(error), @"the picks in `[dir]/picks.ron` are refused: the kernels of `gemm_bias_f16_n2304_k768` are not those that were measured; this version of gemmule generates others; measure anew with `--tune quick`, or leave the file out");
    let rest = given(&file, &made(), &other, TuneMode::Full).unwrap();
    assert_eq!(rest.len(), problems.len() - 1);

    std::fs::write(&file, "nonsense").unwrap();
    assert_snapshot!(text(read(&made(), TuneMode::Off).unwrap_err()), @"the picks in `[dir]/picks.ron` are refused: they do not read as picks: 1:1-1:9: Expected struct `Document` but found `nonsense`; measure anew with `--tune quick`, or leave the file out");
    assert!(read(&made(), TuneMode::Full).unwrap().is_empty());
    // What is not there at all is nothing that tuning could mend.
    std::fs::remove_file(&file).unwrap();
    assert_snapshot!(text(read(&made(), TuneMode::Full).unwrap_err()), @"`[dir]/picks.ron` cannot be read");
}

#[test]
fn a_mode_reads_back_from_its_name() {
    for mode in [
        TuneMode::Off,
        TuneMode::Quick,
        TuneMode::Full,
        TuneMode::Chain,
    ] {
        assert_eq!(mode.to_string().parse::<TuneMode>().unwrap(), mode);
    }
    assert_snapshot!("on".parse::<TuneMode>().unwrap_err(), @"`on` is no way to tune; expected off, guess, quick, full or chain");
}

#[test]
fn a_changed_kernel_has_another_digest() {
    let problems = problems();
    let all = digests(&problems).unwrap();
    assert_eq!(all, digests(&problems).unwrap());
    let different: std::collections::BTreeSet<_> = all.iter().collect();
    assert_eq!(different.len(), problems.len());
}
