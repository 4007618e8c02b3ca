use super::{own, trust, write};
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use trust::Writers;

/// A folder below which nobody else may write.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn mode(path: &Path) -> u32 {
    path.symlink_metadata().unwrap().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// What a text says, with the folder of the test taken out.
fn told(what: impl std::fmt::Display, root: &Path) -> String {
    let root = root.canonicalize().unwrap().display().to_string();
    what.to_string().replace(&root, "ROOT")
}

fn refused(path: &Path, besides: Writers, root: &Path) -> String {
    match trust::resolve(path, besides) {
        Ok(real) => panic!("{} is trusted", real.display()),
        Err(why) => told(why, root),
    }
}

#[test]
fn a_path_is_trusted_if_nobody_else_may_write_to_it_or_above() {
    let root = folder();
    let at = |below: &str| root.path().join(below);
    fs::create_dir_all(at("a/b")).unwrap();
    let file = at("a/b/file");
    fs::write(&file, "").unwrap();
    for path in [at("a"), at("a/b"), file.clone()] {
        set_mode(&path, 0o755);
    }
    let real = file.canonicalize().unwrap();
    assert_eq!(trust::resolve(&file, Writers::Nobody).unwrap(), real);

    // The file, its folder, and one further up.
    for (path, safe) in [(&file, 0o644), (&at("a/b"), 0o755), (&at("a"), 0o755)] {
        for open in [0o777, 0o757, 0o775] {
            set_mode(path, open);
            assert!(trust::resolve(&file, Writers::Nobody).is_err(), "{open:o}");
            // The group may be the user's own.
            let group_only = open == 0o775;
            let allowed = trust::resolve(&file, Writers::Group).is_ok();
            assert_eq!(allowed, group_only, "{open:o}");
        }
        set_mode(path, safe);
    }

    set_mode(&at("a"), 0o777);
    insta::assert_snapshot!(refused(&file, Writers::Group, root.path()), @"others may write to ROOT/a (mode 0777); `chmod go-w ROOT/a` mends it");
    // As /tmp is: nobody replaces what is not theirs.
    set_mode(&at("a"), 0o1777);
    assert_eq!(trust::resolve(&file, Writers::Nobody).unwrap(), real);
    // But the place itself, if it is a folder, is for anyone to fill.
    insta::assert_snapshot!(refused(&at("a"), Writers::Nobody, root.path()), @"others may write to ROOT/a (mode 1777); `chmod go-w ROOT/a` mends it");
    insta::assert_snapshot!(refused(&at("nowhere"), Writers::Nobody, root.path()), @"whose ROOT/nowhere is cannot be found out: No such file or directory (os error 2)");
}

#[test]
fn a_link_is_trusted_as_what_it_leads_to() {
    let root = folder();
    let at = |below: &str| root.path().join(below);
    fs::create_dir_all(at("open")).unwrap();
    fs::write(at("open/file"), "").unwrap();
    set_mode(&at("open"), 0o777);
    symlink(at("open/file"), at("link")).unwrap();
    insta::assert_snapshot!(refused(&at("link"), Writers::Nobody, root.path()), @"others may write to ROOT/open (mode 0777); `chmod go-w ROOT/open` mends it");

    fs::write(at("safe"), "").unwrap();
    set_mode(&at("safe"), 0o644);
    symlink(at("safe"), at("open/link")).unwrap();
    let real = at("safe").canonicalize().unwrap();
    assert_eq!(
        trust::resolve(&at("open/link"), Writers::Nobody).unwrap(),
        real
    );
}

/// Only root can make a file another user's: run by others, this has nothing to look at.
#[test]
fn what_another_user_owns_is_not_trusted_in_any_mode() {
    let root = folder();
    let file = root.path().join("file");
    fs::write(&file, "code").unwrap();
    set_mode(&file, 0o600);
    assert_eq!(own::read(&file, 10).unwrap(), b"code");
    if std::os::unix::fs::chown(&file, Some(12345), None).is_err() {
        return;
    }
    insta::assert_snapshot!(refused(&file, Writers::Group, root.path()), @"ROOT/file belongs to the user 12345, neither to you nor to root; give it to yourself with `chown`, or take one of your own");
    let why = own::read(&file, 10).unwrap_err();
    insta::assert_snapshot!(told(io::Error::from(why), root.path()), @"ROOT/file belongs to the user 12345, not to you; give it to yourself with `chown`, or take one of your own");
}

#[test]
fn libraries_that_the_loader_would_take_from_the_current_folder_are_found() {
    let root = tempfile::tempdir().unwrap();
    let found = |paths: &str| trust::planted_in(paths, root.path()).unwrap_or_default();
    fs::create_dir(root.path().join("lib64")).unwrap();
    fs::write(root.path().join("libother.so"), "").unwrap();
    let harmless = [
        "",
        ":",
        "/a:",
        "/a:/b",
        "$ORIGIN/lib:${ORIGIN}/../lib",
        "lib64",
        "nowhere:/a",
    ];
    for paths in harmless {
        assert_eq!(found(paths), "", "{paths}");
    }
    fs::write(root.path().join("libcuda.so.1"), "").unwrap();
    fs::write(root.path().join("lib64/libnvrtc.so.13"), "").unwrap();
    for paths in ["", "/a:/b", "$ORIGIN/lib:${ORIGIN}/../lib", "/a;/b"] {
        assert_eq!(found(paths), "", "{paths}");
    }
    for paths in [":", "/a:", ":/a", "/a::/b", "/a;"] {
        insta::allow_duplicates! {
            insta::assert_snapshot!(found(paths), @"LD_LIBRARY_PATH has an empty entry, which means the current folder, where `libcuda.so.1` lies; take the surplus colon out");
        }
    }
    insta::assert_snapshot!(found("/a:lib64"), @"LD_LIBRARY_PATH has the entry `lib64`, which depends on the current folder and holds `libnvrtc.so.13`; make it absolute");
    insta::assert_snapshot!(found(".:/a"), @"LD_LIBRARY_PATH has the entry `.`, which depends on the current folder and holds `libcuda.so.1`; make it absolute");
}

/// What a program's own writing leaves here under the umask of this process.
fn usual_mode(root: &Path) -> u32 {
    let usual = root.join("usual");
    fs::write(&usual, "").unwrap();
    mode(&usual)
}

/// Nothing is left beside what was written.
fn names(root: &Path) -> Vec<String> {
    let entries = root.read_dir().unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn a_new_file_is_as_readable_as_others_and_an_old_one_keeps_its_mode() {
    let root = folder();
    let usual = usual_mode(root.path());
    let file = root.path().join("file");
    write(&file, b"one").unwrap();
    assert_eq!(
        (fs::read(&file).unwrap(), mode(&file)),
        (b"one".to_vec(), usual)
    );
    for kept in [0o600, 0o640, 0o755] {
        set_mode(&file, kept);
        write(&file, b"two").unwrap();
        assert_eq!(
            (fs::read(&file).unwrap(), mode(&file)),
            (b"two".to_vec(), kept)
        );
    }
    assert_eq!(names(root.path()), ["file", "usual"]);
}

#[test]
fn a_link_stays_and_what_it_leads_to_is_written() {
    let root = folder();
    let usual = usual_mode(root.path());
    let at = |below: &str| root.path().join(below);
    fs::create_dir(at("below")).unwrap();
    fs::write(at("below/target"), "old").unwrap();
    set_mode(&at("below/target"), 0o640);
    symlink("below/target", at("link")).unwrap();
    symlink("link", at("link of link")).unwrap();
    write(&at("link of link"), b"new").unwrap();
    assert_eq!(fs::read(at("below/target")).unwrap(), b"new");
    assert_eq!(mode(&at("below/target")), 0o640);
    for link in ["link", "link of link"] {
        assert!(at(link).symlink_metadata().unwrap().is_symlink());
    }

    // What it leads to is not there yet.
    symlink("below/later", at("early")).unwrap();
    write(&at("early"), b"made").unwrap();
    assert_eq!(fs::read(at("below/later")).unwrap(), b"made");
    assert_eq!(mode(&at("below/later")), usual);
    assert!(at("early").symlink_metadata().unwrap().is_symlink());

    symlink("loop", at("loop")).unwrap();
    insta::assert_snapshot!(write(&at("loop"), b"").unwrap_err(), @"Too many levels of symbolic links (os error 40)");
}

#[test]
fn devices_and_pipes_are_written_to_and_stay() {
    write(Path::new("/dev/null"), b"gone").unwrap();
    let null = Path::new("/dev/null").symlink_metadata().unwrap();
    assert!(null.file_type().is_char_device());
    insta::assert_snapshot!(write(Path::new("/dev/full"), b"x").unwrap_err(), @"No space left on device (os error 28)");

    let root = folder();
    let pipe = root.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    let reader = {
        let pipe = pipe.clone();
        std::thread::spawn(move || {
            let mut read = Vec::new();
            fs::File::open(pipe)
                .unwrap()
                .read_to_end(&mut read)
                .unwrap();
            read
        })
    };
    write(&pipe, b"through the pipe").unwrap();
    assert_eq!(reader.join().unwrap(), b"through the pipe");
    assert!(pipe.symlink_metadata().unwrap().file_type().is_fifo());
}

#[test]
fn folders_and_sockets_are_refused() {
    let root = folder();
    insta::assert_snapshot!(write(root.path(), b"").unwrap_err(), @"it is a folder; give the name of a file");
    let socket = root.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    insta::assert_snapshot!(write(&socket, b"").unwrap_err(), @"it is a socket; give the name of a file");
    assert_eq!(names(root.path()), ["socket"]);
}

#[test]
fn a_file_of_the_users_own_is_nobody_elses() {
    let root = folder();
    let at = |below: &str| root.path().join(below);
    let file = at("made/folder/file");
    own::write(&file, b"mine").unwrap();
    assert_eq!(mode(&at("made")), 0o700);
    assert_eq!(mode(&at("made/folder")), 0o700);
    assert_eq!(mode(&file), 0o600);
    assert_eq!(own::read(&file, 10).unwrap(), b"mine");
    assert_eq!(own::read(&file, 2).unwrap(), b"min");

    let why = |file: &PathBuf| {
        let error = own::read(file, 10).unwrap_err();
        told(io::Error::from(error), root.path())
    };
    symlink(&file, at("made/folder/link")).unwrap();
    insta::assert_snapshot!(why(&at("made/folder/link")), @"ROOT/made/folder/link is a symbolic link; put the file itself there");
    set_mode(&file, 0o620);
    insta::assert_snapshot!(why(&file), @"others may write to ROOT/made/folder/file (mode 0620); `chmod go-w ROOT/made/folder/file` mends it");
    set_mode(&file, 0o600);

    for open in [0o770, 0o707, 0o1777] {
        set_mode(&at("made/folder"), open);
        let told = why(&file);
        assert!(
            told.starts_with("others may write to ROOT/made/folder (mode "),
            "{told}"
        );
        assert!(own::write(&file, b"over it").is_err());
    }
    set_mode(&at("made/folder"), 0o700);
    assert_eq!(own::read(&file, 10).unwrap(), b"mine");
    // Another folder could be put in its place.
    set_mode(&at("made"), 0o777);
    insta::assert_snapshot!(why(&file), @"others may write to ROOT/made (mode 0777); `chmod go-w ROOT/made` mends it");
    set_mode(&at("made"), 0o1777);
    assert_eq!(own::read(&file, 10).unwrap(), b"mine");
}
