//! Picks that come with the project: each names candidates of its problems, and was measured on the
//! kernels as they are.

use std::{collections::BTreeMap, path::Path};

use gemmule::{
    DType,
    engine::{shipped_file, shipped_picks, shipped_problems, stale, target_of},
};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn what_is_in_the_folder_is_in_the_binary() {
    let mut files: Vec<String> = std::fs::read_dir(root().join("picks"))
        .expect("the folder is there")
        .map(|entry| entry.expect("an entry").file_name().display().to_string())
        .filter(|name| name.ends_with(".ron"))
        .collect();
    files.sort();
    let mut embedded: Vec<String> = shipped_picks()
        .expect("they are picks")
        .into_iter()
        .map(|(file, _)| file)
        .collect();
    embedded.sort();
    assert_eq!(
        embedded, files,
        "`touch src/engine/shipped.rs` builds them in"
    );
}

#[test]
fn every_file_is_of_these_kernels_or_deferred_with_a_reason() {
    let file = root().join("snapshots/picks_deferred.ron");
    let text = std::fs::read_to_string(file).expect("the list is there");
    let deferred: BTreeMap<String, String> = ron::from_str(&text).expect("the list is RON");
    let shipped = shipped_picks().expect("they are picks");
    for name in deferred.keys() {
        let there = shipped.iter().any(|(file, _)| file == name);
        assert!(there, "`{name}` is deferred and not there");
    }
    for (file, picks) in shipped {
        assert_eq!(file, shipped_file(&picks.made.card));
        let target = target_of(&picks.made.card).expect("the card has a target");
        let dtypes = [DType::F16, DType::BF16];
        let problems = shipped_problems(&dtypes, target.instructions()).expect("they compile");
        // Whether or not they are of these kernels, they are picks.
        picks.check().expect("they are sound");
        let stale = stale(&picks, &problems).expect("asked");
        let reason = deferred.get(&file).filter(|reason| !reason.is_empty());
        assert!(
            stale.is_empty() || reason.is_some(),
            "{} of {} problems of picks/{file} are not used; measure them anew as picks/README.md says, or put the file into snapshots/picks_deferred.ron:\n{}",
            stale.len(),
            picks.problems.len(),
            stale.join("\n")
        );
    }
}
