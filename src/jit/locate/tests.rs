use super::*;
use crate::jit::Nvrtc;
use std::fs;

/// The message, with the folder of the test taken out.
fn told(error: &JitError, root: &Path) -> String {
    error
        .to_string()
        .replace(&root.display().to_string(), "ROOT")
}

fn refused(surroundings: &Surroundings) -> JitError {
    match search(surroundings) {
        Ok((loaded, _)) => panic!("found {}", loaded.path.display()),
        Err(error) => error,
    }
}

/// The NVRTC of this machine, linked to as `root/below/libnvrtc.so.13`.
fn link(root: &Path, below: &str) -> PathBuf {
    let real = Nvrtc::find().unwrap_or_else(|error| panic!("{error}"));
    let folder = root.join(below);
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("libnvrtc.so.13");
    std::os::unix::fs::symlink(real.path().canonicalize().unwrap(), &file).unwrap();
    file
}

#[test]
fn when_nvrtc_is_missing_every_place_and_the_remedy_are_told() {
    let root = tempfile::tempdir().unwrap();
    let at = |below: &str| root.path().join(below);
    fs::create_dir_all(at("cuda/lib64")).unwrap();
    fs::create_dir_all(at("conda/lib")).unwrap();
    fs::write(at("conda/lib/libnvrtc.so.12"), "").unwrap();
    fs::create_dir_all(at("project/lib/python3.11/site-packages/nvidia/cu13/lib")).unwrap();
    let error = refused(&Surroundings {
        choice: None,
        loader_names: vec!["libgemmule-has-no-such.so.13".into()],
        cuda: vec![at("cuda"), at("cuda-13.0")],
        environments: vec![("VIRTUAL_ENV", None), ("CONDA_PREFIX", Some(at("conda")))],
        projects: vec![at("project")],
        python: Some(at("python3")),
    });
    insta::assert_snapshot!(told(&error, root.path()));
}

#[test]
fn a_chosen_path_is_never_replaced_by_another() {
    let root = tempfile::tempdir().unwrap();
    link(root.path(), "cuda/lib64");
    let cuda = vec![root.path().join("cuda")];
    let choose = |value: PathBuf| {
        let choice = Some(value);
        told(
            &refused(&Surroundings {
                choice,
                cuda: cuda.clone(),
                ..Default::default()
            }),
            root.path(),
        )
    };
    fs::create_dir(root.path().join("empty")).unwrap();
    fs::write(root.path().join("text"), "not a library").unwrap();
    insta::assert_snapshot!("choice_absent", choose(root.path().join("nowhere")));
    insta::assert_snapshot!("choice_empty_folder", choose(root.path().join("empty")));
    insta::assert_snapshot!("choice_not_a_library", choose(root.path().join("text")));
}

#[test]
fn a_library_that_is_not_nvrtc_is_passed_over_by_name() {
    let root = tempfile::tempdir().unwrap();
    let file = link(root.path(), "cuda/lib64");
    let surroundings = Surroundings {
        loader_names: vec!["libc.so.6".into()],
        cuda: vec![root.path().join("cuda")],
        ..Default::default()
    };
    let nvrtc = Nvrtc::find_in(&surroundings).unwrap();
    assert_eq!(nvrtc.path(), file);
    let log: Vec<String> = nvrtc.search_log().iter().map(Looked::to_string).collect();
    insta::assert_snapshot!(log[1], @"the loader's path, libc.so.6: it has no function `nvrtcVersion`, so it is not NVRTC 11.2 or newer");
    assert_eq!(log.len(), 3);
    assert!(matches!(
        Nvrtc::at(Path::new("libc.so.6")),
        Err(JitError::NvrtcUnusable { why, .. }) if why.contains("nvrtcVersion")
    ));
}

#[test]
fn a_choice_may_be_a_file_a_folder_or_a_toolkit() {
    let root = tempfile::tempdir().unwrap();
    let file = link(root.path(), "toolkit/lib64");
    for choice in [
        file.clone(),
        root.path().join("toolkit/lib64"),
        root.path().join("toolkit"),
    ] {
        let surroundings = Surroundings {
            choice: Some(choice),
            ..Default::default()
        };
        assert_eq!(Nvrtc::find_in(&surroundings).unwrap().path(), file);
    }
}

#[test]
fn places_are_tried_in_the_documented_order() {
    let root = tempfile::tempdir().unwrap();
    let at = |below: &str| root.path().join(below);
    // Each step adds a place before those of the steps above it.
    let mut surroundings = Surroundings::default();
    let mut expect = |file: &Path, change: &dyn Fn(&mut Surroundings)| {
        change(&mut surroundings);
        let nvrtc = Nvrtc::find_in(&surroundings).unwrap();
        assert_eq!(nvrtc.path(), file);
        let taken = nvrtc.search_log().last().unwrap();
        assert_eq!(
            taken.outcome,
            Outcome::Taken(nvrtc.version().0, nvrtc.version().1)
        );
        taken.origin.clone()
    };

    let file = link(root.path(), "py/site-packages/nvidia/cu13/lib");
    let python = at("python3");
    let script = format!(
        "#!/bin/sh\necho\necho {}\n",
        at("py/site-packages").display()
    );
    fs::write(&python, script).unwrap();
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let origin = expect(&file, &|s| s.python = Some(python.clone()));
    assert_eq!(origin, Origin::Python(python.clone()));

    let file = link(
        root.path(),
        "project/lib/python3.9/site-packages/nvidia/cuda_nvrtc/lib",
    );
    assert_eq!(
        expect(&file, &|s| s.projects = vec![at("project")]),
        Origin::Project
    );
    // A later interpreter, and the folder of a later CUDA, come first.
    let file = link(
        root.path(),
        "project/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib",
    );
    expect(&file, &|_| ());
    let file = link(
        root.path(),
        "project/lib/python3.11/site-packages/nvidia/cu13/lib",
    );
    expect(&file, &|_| ());
    let file = link(
        root.path(),
        "project/lib/python3.11/site-packages/nvidia/cu14/lib",
    );
    expect(&file, &|_| ());

    let file = link(root.path(), "conda/lib");
    let conda = |s: &mut Surroundings| s.environments = vec![("CONDA_PREFIX", Some(at("conda")))];
    assert_eq!(expect(&file, &conda), Origin::Environment("CONDA_PREFIX"));

    let file = link(root.path(), "cuda/lib64");
    assert_eq!(expect(&file, &|s| s.cuda = vec![at("cuda")]), Origin::Cuda);

    let file = link(root.path(), "loader");
    let loader = |s: &mut Surroundings| s.loader_names = vec![file.clone()];
    assert_eq!(expect(&file, &loader), Origin::Loader);

    let file = link(root.path(), "chosen");
    assert_eq!(
        expect(&file, &|s| s.choice = Some(at("chosen"))),
        Origin::Choice
    );
}

#[test]
fn an_interpreter_that_fails_is_passed_over_by_name() {
    let surroundings = Surroundings {
        python: Some("false".into()),
        ..Default::default()
    };
    insta::assert_snapshot!(refused(&surroundings));
}

#[test]
fn only_numbered_names_count_as_versions_and_the_highest_comes_first() {
    let root = tempfile::tempdir().unwrap();
    for name in [
        "libnvrtc.so",
        "libnvrtc.so.9.2",
        "libnvrtc.so.13",
        "libnvrtc.so.13.0.88",
        "libnvrtc.alt.so.13",
        "libnvrtc-builtins.so.13.0",
        "libnvrtc.so.old",
        "libnvrtc.so.",
    ] {
        fs::write(root.path().join(name), "").unwrap();
    }
    let names: Vec<String> = libraries(root.path())
        .iter()
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    assert_eq!(
        names,
        [
            "libnvrtc.so.13.0.88",
            "libnvrtc.so.13",
            "libnvrtc.so.9.2",
            "libnvrtc.so"
        ]
    );
}

#[test]
fn the_surroundings_of_a_process_name_the_usual_places() {
    let surroundings = Surroundings::of_this_process();
    assert!(surroundings.loader_names.contains(&"libnvrtc.so.13".into()));
    assert!(surroundings.cuda.contains(&"/usr/local/cuda".into()));
    let names: Vec<_> = surroundings
        .environments
        .iter()
        .map(|(name, _)| *name)
        .collect();
    assert_eq!(names, ["VIRTUAL_ENV", "CONDA_PREFIX"]);
    assert_eq!(surroundings.python, Some("python3".into()));
}
