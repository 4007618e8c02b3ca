use super::*;
use crate::jit::Nvrtc;
use std::fs;

/// Formats a message with the test's folder replaced by ROOT.
fn message(error: &JitError, root: &Path) -> String {
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

/// Creates a link to this machine's NVRTC at `root/below/libnvrtc.so.13`.
fn link(root: &Path, below: &str) -> PathBuf {
    let real = crate::jit::nvrtc_for_tests();
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
    let error = refused(&Surroundings {
        choice: None,
        loader_refused: None,
        loader_names: vec!["libgemmule-has-no-such.so.13".into()],
        cuda: vec![at("cuda"), at("cuda-13.0")],
        environments: vec![("VIRTUAL_ENV", None), ("CONDA_PREFIX", Some(at("conda")))],
        python: Some(at("python3")),
    });
    insta::assert_snapshot!(message(&error, root.path()));
}

#[test]
fn an_explicit_path_is_never_replaced() {
    let root = tempfile::tempdir().unwrap();
    link(root.path(), "cuda/lib64");
    let cuda = vec![root.path().join("cuda")];
    let choose = |value: PathBuf| {
        let choice = Some(value);
        message(
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
fn a_library_that_is_not_nvrtc_is_skipped_and_named() {
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
fn an_explicit_path_may_be_a_file_a_folder_or_a_toolkit() {
    let root = tempfile::tempdir().unwrap();
    let file = link(root.path(), "toolkit/lib64");
    let in_python = link(
        root.path(),
        "venv/lib/python3.11/site-packages/nvidia/cu13/lib",
    );
    for (choice, file) in [
        (file.clone(), &file),
        (root.path().join("toolkit/lib64"), &file),
        (root.path().join("toolkit"), &file),
        (root.path().join("venv"), &in_python),
    ] {
        let surroundings = Surroundings {
            choice: Some(choice),
            ..Default::default()
        };
        assert_eq!(Nvrtc::find_in(&surroundings).unwrap().path(), file);
    }
}

/// Returns the log of a search of only the places that `change` adds.
fn log_of(root: &Path, change: impl FnOnce(&mut Surroundings)) -> String {
    let mut surroundings = Surroundings::default();
    change(&mut surroundings);
    message(&refused(&surroundings), root)
}

fn set_mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Puts NVRTC into several folders below the current folder, and checks that none is opened.
#[test]
fn no_path_that_depends_on_the_current_folder_is_searched() {
    let root = tempfile::tempdir_in(env::current_dir().unwrap()).unwrap();
    let below = PathBuf::from(root.path().file_name().unwrap());
    link(root.path(), "lib64");
    link(root.path(), "lib/python3.11/site-packages/nvidia/cu13/lib");
    assert!(below.join("lib64/libnvrtc.so.13").exists());
    let message = |error: String| error.replace(&below.display().to_string(), "BELOW");

    insta::assert_snapshot!(message(log_of(root.path(), |s| {
        s.loader_refused = Some("LD_LIBRARY_PATH has an empty entry".to_owned());
        s.loader_names = vec!["libnvrtc.so.13".into()];
        s.cuda = vec![below.clone()];
        s.environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].map(|name| (name, Some(below.clone()))).into();
    })), @r"
    NVRTC, which compiles the generated CUDA source, was not found. Searched:
      GEMMULE_NVRTC: not set
      the loader's path: not searched: LD_LIBRARY_PATH has an empty entry
      CUDA, BELOW: not searched, because a relative path depends on the current folder; make it absolute
      VIRTUAL_ENV, BELOW: not searched, because a relative path depends on the current folder; make it absolute
      CONDA_PREFIX, BELOW: not searched, because a relative path depends on the current folder; make it absolute
    Install it with `pip install nvidia-cuda-nvrtc`, or set GEMMULE_NVRTC to the file libnvrtc.so.13 or to the folder that holds it
    ");
    insta::assert_snapshot!(message(log_of(root.path(), |s| s.choice = Some(below.join("lib64")))), @r"
    GEMMULE_NVRTC is set to BELOW/lib64, which cannot be used:
      GEMMULE_NVRTC, BELOW/lib64: a relative path depends on the current folder; make it absolute
    Set it to the file libnvrtc.so.13, to the folder or the Python environment that holds it, or unset it to let NVRTC be searched for
    ");
}

#[test]
fn files_writable_by_others_are_not_opened() {
    let root = tempfile::tempdir().unwrap();
    let at = |below: &str| root.path().join(below);
    // The target of the link is the library itself, which is trusted.
    let safe = link(root.path(), "toolkit/lib64");
    fs::create_dir_all(at("open/lib64")).unwrap();
    fs::write(at("open/lib64/libnvrtc.so.13"), "planted").unwrap();
    set_mode(&at("open/lib64/libnvrtc.so.13"), 0o644);
    set_mode(&at("open"), 0o777);

    insta::assert_snapshot!(log_of(root.path(), |s| {
        s.cuda = vec![at("open")];
        s.environments = vec![("CONDA_PREFIX", Some(at("open")))];
    }), @r"
    NVRTC, which compiles the generated CUDA source, was not found. Searched:
      GEMMULE_NVRTC: not set
      CUDA, ROOT/open/lib64/libnvrtc.so.13: not opened: ROOT/open is writable by other users (mode 0777); run `chmod go-w ROOT/open`
      CONDA_PREFIX, ROOT/open: no NVRTC in it
    Install it with `pip install nvidia-cuda-nvrtc`, or set GEMMULE_NVRTC to the file libnvrtc.so.13 or to the folder that holds it
    ");
    set_mode(&at("open"), 0o755);
    set_mode(&at("open/lib64/libnvrtc.so.13"), 0o666);
    insta::assert_snapshot!(log_of(root.path(), |s| s.choice = Some(at("open"))), @r"
    GEMMULE_NVRTC is set to ROOT/open, which cannot be used:
      GEMMULE_NVRTC, ROOT/open/lib64/libnvrtc.so.13: not opened: ROOT/open/lib64/libnvrtc.so.13 is writable by other users (mode 0666); run `chmod go-w ROOT/open/lib64/libnvrtc.so.13`
    Set it to the file libnvrtc.so.13, to the folder or the Python environment that holds it, or unset it to let NVRTC be searched for
    ");

    // Without `GEMMULE_NVRTC`, the search continues with the next place.
    let nvrtc = Nvrtc::find_in(&Surroundings {
        cuda: vec![at("open"), at("toolkit")],
        ..Default::default()
    });
    assert_eq!(nvrtc.unwrap().path(), safe);

    // A folder that is writable by the group is not searched, but it is trusted if the user names
    // it.
    set_mode(&at("toolkit"), 0o775);
    let real = safe.canonicalize().unwrap();
    let copy = at("toolkit/lib64/libnvrtc.so.14");
    fs::copy(&real, &copy).unwrap();
    let told = log_of(root.path(), |s| s.cuda = vec![at("toolkit/lib64")]);
    assert!(told.contains("no NVRTC in it"), "{told}");
    let nvrtc = |s: Surroundings| Nvrtc::find_in(&s).unwrap().path().to_owned();
    let searched = Surroundings {
        cuda: vec![at("toolkit")],
        ..Default::default()
    };
    assert_eq!(nvrtc(searched), safe, "the link is what is left");
    let chosen = Surroundings {
        choice: Some(copy.clone()),
        ..Default::default()
    };
    assert_eq!(nvrtc(chosen), copy);
}

#[test]
fn an_interpreter_is_used_only_from_absolute_folders_that_others_cannot_write_to() {
    let root = tempfile::tempdir().unwrap();
    let at = |below: &str| root.path().join(below);
    for folder in ["first", "second"] {
        fs::create_dir(at(folder)).unwrap();
        fs::write(
            at(folder).join("python3"),
            "#!/bin/sh\necho ran > \"$0.ran\"\n",
        )
        .unwrap();
        set_mode(&at(folder).join("python3"), 0o755);
    }
    set_mode(&at("first/python3"), 0o644);
    let paths = |text: String| in_path("python3", OsStr::new(&text));
    let second = at("second").display().to_string();
    assert_eq!(
        paths(format!("{}:{second}", at("first").display())),
        Some(at("second/python3"))
    );
    set_mode(&at("first/python3"), 0o755);
    assert_eq!(
        paths(format!("{}:{second}", at("first").display())),
        Some(at("first/python3"))
    );
    assert_eq!(
        paths(format!(":.:first:{second}")),
        Some(at("second/python3"))
    );
    assert_eq!(paths(":.:first:".to_owned()), None);

    set_mode(&at("first"), 0o777);
    insta::assert_snapshot!(log_of(root.path(), |s| s.python = Some(at("first/python3"))), @r"
    NVRTC, which compiles the generated CUDA source, was not found. Searched:
      GEMMULE_NVRTC: not set
      ROOT/first/python3: not started: ROOT/first is writable by other users (mode 0777); run `chmod go-w ROOT/first`
    Install it with `pip install nvidia-cuda-nvrtc`, or set GEMMULE_NVRTC to the file libnvrtc.so.13 or to the folder that holds it
    ");
    assert!(!at("first/python3.ran").exists());
    log_of(root.path(), |s| s.python = Some(at("second/python3")));
    assert!(
        at("second/python3.ran").exists(),
        "or the test would see nothing"
    );
}

/// Uses a fake interpreter to record the folder and the arguments that it is started with.
#[test]
fn the_interpreter_is_started_away_from_the_current_folder() {
    let root = tempfile::tempdir().unwrap();
    let at = |below: &str| root.path().join(below);
    let script = "#!/bin/sh\npwd > \"$(dirname \"$0\")/where\"\nprintf '%s\\n' \"$@\" > \"$(dirname \"$0\")/arguments\"\n";
    fs::write(at("python3"), script).unwrap();
    set_mode(&at("python3"), 0o755);
    log_of(root.path(), |s| s.python = Some(at("python3")));
    assert_eq!(fs::read_to_string(at("where")).unwrap(), "/\n");
    insta::assert_snapshot!(fs::read_to_string(at("arguments")).unwrap(), @r"
    -I
    -c
    import site, sys; print('\n'.join([*sys.path, site.getusersitepackages()]))
    ");

    // A real interpreter must accept these arguments.
    let Some(python) = in_path("python3", &env::var_os("PATH").unwrap()) else {
        return;
    };
    let output = Command::new(python)
        .args(PYTHON_ARGUMENTS)
        .output()
        .unwrap();
    let folders = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && folders.contains("site-packages"),
        "{folders}"
    );
    assert!(
        folders
            .lines()
            .all(|folder| Path::new(folder).is_absolute()),
        "{folders}"
    );
}

#[test]
fn places_are_tried_in_the_documented_order() {
    let root = tempfile::tempdir().unwrap();
    let at = |below: &str| root.path().join(below);
    // Each step adds a place that takes precedence over the previous ones.
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

    let file = link(root.path(), "conda/lib");
    let conda = |s: &mut Surroundings| s.environments = vec![("CONDA_PREFIX", Some(at("conda")))];
    assert_eq!(expect(&file, &conda), Origin::Environment("CONDA_PREFIX"));
    // Packages take precedence over the environment's own libraries. Newer interpreters and newer
    // CUDA folders take precedence over older ones.
    for packages in [
        "python3.9/site-packages/nvidia/cuda_nvrtc/lib",
        "python3.11/site-packages/nvidia/cuda_nvrtc/lib",
        "python3.11/site-packages/nvidia/cu13/lib",
        "python3.11/site-packages/nvidia/cu14/lib",
    ] {
        let file = link(root.path(), &format!("conda/lib/{packages}"));
        expect(&file, &|_| ());
    }

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
    let paths = env::var_os("PATH").unwrap();
    let false_program = in_path("false", &paths).unwrap();
    let surroundings = Surroundings {
        python: Some(false_program.clone()),
        ..Default::default()
    };
    let told = refused(&surroundings).to_string();
    insta::assert_snapshot!(told.replace(&false_program.display().to_string(), "/…/false"));
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
    let python = surroundings.python.unwrap_or("/".into());
    assert!(python.is_absolute(), "{}", python.display());
}
