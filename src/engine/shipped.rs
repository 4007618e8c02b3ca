//! Picks that come with the project: files of `picks/`, one a card, measured by `gemmule tune shipped`.

use std::collections::HashMap;

use include_dir::{Dir, File, include_dir};

use super::{
    CompileOptions, Compiled, EngineError, compile, description,
    picks::{digests, refused},
    shipped_configs,
    tune::{Chosen, say},
};
use crate::{
    kernels::Instructions,
    tensor::DType,
    tune::{Card, Made, Origin, Picked, Picks, Problem},
};

static FILES: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/picks");

/// Name and picks of every file that comes with the project.
///
/// # Errors
/// [`EngineError::Picks`] of a file that is none, which a test of the project would have told.
pub fn shipped_picks() -> Result<Vec<(String, Picks)>, EngineError> {
    let files = FILES.files();
    let files = files.filter(|f| f.path().extension().is_some_and(|e| e == "ron"));
    files
        .map(|file| {
            let picks = Picks::parse(file.contents()).map_err(|e| refused(file.path(), e))?;
            Ok((file.path().display().to_string(), picks))
        })
        .collect()
}

/// The file that the picks of a card ship in: its name in lower case, with hyphens for what is neither
/// letter nor digit.
pub fn shipped_file(card: &Card) -> String {
    let plain = |c: char| match c.is_ascii_alphanumeric() {
        true => c.to_ascii_lowercase(),
        false => '-',
    };
    let name: String = card.name.chars().map(plain).collect();
    format!("{name}.ron")
}

/// What has several kernels to choose from in the models that come with the project, at their published
/// sizes, each once; all of one storage type, then those of the next.
pub fn shipped_problems(
    dtypes: &[DType],
    instructions: Instructions,
) -> Result<Vec<Problem>, EngineError> {
    let mut problems: Vec<Problem> = Vec::new();
    for compiled in shipped_programs(dtypes, instructions)? {
        for problem in compiled.problems()? {
            if !problems.contains(&problem) {
                problems.push(problem);
            }
        }
    }
    Ok(problems)
}

/// The models that come with the project, at their published sizes; all of one storage type, then those of the next.
pub fn shipped_programs(
    dtypes: &[DType],
    instructions: Instructions,
) -> Result<Vec<Compiled>, EngineError> {
    let mut programs = Vec::new();
    for &dtype in dtypes {
        for (_, name, config) in shipped_configs()? {
            let description = description(name)?;
            let options = CompileOptions {
                instructions,
                ..CompileOptions::new(dtype)
            };
            programs.push(compile(&description, &config, &options)?);
        }
    }
    Ok(programs)
}

/// Problems of picks that this build would not use, each with the reason.
pub fn stale(picks: &Picks, problems: &[Problem]) -> Result<Vec<String>, EngineError> {
    let mut stale = Vec::new();
    for (problem, digest) in problems.iter().zip(digests(problems)?) {
        if let Err(reason) = picks.check_problem(problem, &digest) {
            stale.push(reason.to_string());
        }
    }
    let keys: Vec<String> = problems.iter().map(Problem::key).collect();
    for key in picks.problems.keys().filter(|key| !keys.contains(key)) {
        stale.push(format!("`{key}` is a problem of no shipped model"));
    }
    Ok(stale)
}

/// What of the picks of a card holds for the kernels of this build. What does not is told to those who
/// listen, and no more: there is always the first guess.
pub(super) fn held(
    card: &Card,
    problems: &[Problem],
) -> Result<HashMap<String, Picked>, EngineError> {
    let Some(file) = file_of(card) else {
        return Ok(HashMap::new());
    };
    match Picks::parse(file.contents()) {
        Ok(picks) => {
            let (major, minor) = picks.made.nvrtc;
            tracing::info!(
                "picks come with gemmule for {card}, measured with NVRTC {major}.{minor}"
            );
            of_picks(&picks, card, problems)
        }
        Err(problem) => {
            let name = file.path().display();
            tracing::warn!("the shipped picks `{name}` are not used: {problem}");
            Ok(HashMap::new())
        }
    }
}

fn file_of(card: &Card) -> Option<&'static File<'static>> {
    let file = FILES.get_file(shipped_file(card));
    if file.is_none() {
        tracing::info!("no picks come with gemmule for {card}");
    }
    file
}

/// As [`held`], of these picks.
pub(super) fn of_picks(
    picks: &Picks,
    card: &Card,
    problems: &[Problem],
) -> Result<HashMap<String, Picked>, EngineError> {
    let mut held = HashMap::new();
    if picks.made.card != *card {
        tracing::info!(
            "the shipped picks of {} are not used on {card}",
            picks.made.card
        );
        return Ok(held);
    }
    // A pick is only one of the candidates, so another NVRTC is no reason to refuse it.
    // Candidates are rendered for their digests only where there is something to compare with.
    let known = |problem: &&Problem| picks.problems.contains_key(&problem.key());
    let problems: Vec<Problem> = problems.iter().filter(known).cloned().collect();
    for (problem, digest) in problems.iter().zip(digests(&problems)?) {
        match picks.check_problem(problem, &digest) {
            Err(reason) => tracing::info!("shipped picks are not used: {reason}"),
            Ok(()) => {
                let key = problem.key();
                let picked = picks.problems.get(&key).cloned();
                held.extend(picked.map(|picked| (key, picked)));
            }
        }
    }
    Ok(held)
}

/// The kernels of `problems` where nothing is measured and no file is given: as shipped for the card, else
/// the cost model's guess.
pub(super) fn choose(card: &Card, problems: &[Problem]) -> Result<Chosen, EngineError> {
    let made = Made {
        card: card.clone(),
        nvrtc: (0, 0),
    };
    let mut chosen = Chosen::new(made);
    let mut held = held(card, problems)?;
    for problem in problems {
        let key = problem.key();
        match held.remove(&key) {
            Some(picked) => {
                say(&key, &picked.ranges, Origin::Shipped);
                chosen.add(key, picked, Origin::Shipped);
            }
            None => chosen.guess(problem),
        }
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::{Choice, Effort};

    fn card() -> Card {
        Card {
            name: "NVIDIA H200".to_owned(),
            capability: (9, 0),
            n_sms: 132,
        }
    }

    /// Of every problem the first guess, as a file of this build would have it.
    fn made_up(problems: &[Problem]) -> Picks {
        let made = Made {
            card: card(),
            nvrtc: (12, 8),
        };
        let mut picks = Picks::new(made);
        let digests = digests(problems).expect("they render");
        for (problem, digest) in problems.iter().zip(digests) {
            let picked = Picked {
                digest,
                effort: Effort::Full,
                ranges: problem.guess(),
                timings: Vec::new(),
            };
            picks.problems.insert(problem.key(), picked);
        }
        picks
    }

    #[test]
    fn files_are_named_after_their_card() {
        assert_eq!(shipped_file(&card()), "nvidia-h200.ron");
    }

    #[test]
    fn what_changed_since_is_stale_and_not_used_and_the_rest_is() {
        let problems = shipped_problems(&[DType::F16], Instructions::Hopper).expect("they compile");
        // Four GEMMs, a norm and attention of each size at least.
        assert!(problems.len() >= 15, "{}", problems.len());
        let mut picks = made_up(&problems);
        assert_eq!(stale(&picks, &problems).expect("asked"), [""; 0]);
        assert_eq!(
            of_picks(&picks, &card(), &problems)
                .expect("they render")
                .len(),
            problems.len()
        );

        let (first, second) = (problems[0].key(), problems[1].key());
        let changed = |picks: &mut Picks, key: &str| {
            let picked = picks.problems.get_mut(key).expect("it is there");
            picked.digest = "0".repeat(64);
        };
        changed(&mut picks, &first);
        let range = &mut picks.problems.get_mut(&second).expect("it is there").ranges[0];
        range.choice = Choice::MhaShort { max_len: 7 };
        picks.problems.insert(
            "gone".to_owned(),
            Picked {
                digest: "0".repeat(64),
                effort: Effort::Quick,
                ranges: problems[0].guess(),
                timings: Vec::new(),
            },
        );
        let stale = stale(&picks, &problems).expect("asked");
        assert_eq!(stale.len(), 3, "{stale:?}");
        assert!(stale[0].contains(&first) && stale[0].contains("not those that were measured"));
        assert!(stale[1].contains("has no candidate mha_short_l7"));
        assert_eq!(stale[2], "`gone` is a problem of no shipped model");
        let held = of_picks(&picks, &card(), &problems).expect("they render");
        assert_eq!(held.len(), problems.len() - 2);
        assert!(!held.contains_key(&first) && !held.contains_key(&second));
    }

    #[test]
    fn another_card_of_the_name_gets_none() {
        let problems = shipped_problems(&[DType::F16], Instructions::Hopper).expect("they compile");
        let picks = made_up(&problems);
        let part = Card {
            n_sms: 66,
            ..card()
        };
        let held = of_picks(&picks, &part, &problems).expect("they render");
        assert!(held.is_empty());
    }

    #[test]
    fn guesses_keep_out_what_ships_for_the_card() {
        let problems = shipped_problems(&[DType::F16], Instructions::Hopper).expect("they compile");
        let usual = choose(&card(), &problems).expect("it cannot fail");
        assert!(usual.origins.values().any(|o| *o == Origin::Shipped));
        let guesses = Chosen::guesses(&card(), &problems);
        assert!(guesses.picks.problems.is_empty());
        assert!(guesses.origins.values().all(|o| *o == Origin::Guess));
        assert!(guesses.origins.keys().eq(usual.origins.keys()));
    }

    #[test]
    fn a_card_without_a_file_gets_the_guess_and_says_so() {
        let problems = shipped_problems(&[DType::F16], Instructions::Ampere).expect("they compile");
        let unknown = Card {
            name: "no such card".to_owned(),
            ..card()
        };
        let chosen = choose(&unknown, &problems).expect("it cannot fail");
        assert!(chosen.picks.problems.is_empty());
        assert_eq!(chosen.origins.len(), problems.len());
        assert!(chosen.origins.values().all(|o| *o == Origin::Guess));
    }
}
