use super::{own, trust, write};
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use trust::Writers;

/// Creates a folder that no other user may write to.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn mode(path: &Path) -> u32 {
    path.symlink_metadata().unwrap().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Formats a message with the test's folder replaced by ROOT.
fn message(what: impl std::fmt::Display, root: &Path) -> String {
    let root = root.canonicalize().unwrap().display().to_string();
    what.to_string().replace(&root, "ROOT")
}

fn refused(path: &Path, besides: Writers, root: &Path) -> String {
    match trust::resolve(path, besides) {
        Ok(real) => panic!("{} is trusted", real.display()),
        Err(why) => message(why, root),
    }
}

#[test]
fn a_path_is_trusted_if_no_other_user_may_write_to_it_or_its_parents() {
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

    // Makes the file, its folder, and a folder further up writable in turn.
    for (path, safe) in [(&file, 0o644), (&at("a/b"), 0o755), (&at("a"), 0o755)] {
        for open in [0o777, 0o757, 0o775] {
            set_mode(path, open);
            assert!(trust::resolve(&file, Writers::Nobody).is_err(), "{open:o}");
            // In addition to the owner, only the group may write. The group may consist of the user alone.
            let group_only = open == 0o775;
            let allowed = trust::resolve(&file, Writers::Group).is_ok();
            assert_eq!(allowed, group_only, "{open:o}");
        }
        set_mode(path, safe);
    }

    set_mode(&at("a"), 0o777);
    insta::assert_snapshot!(refused(&file, Writers::Group, root.path()), @"ROOT/a is writable by other users (mode 0777); run `chmod go-w ROOT/a`");
    // A sticky folder such as /tmp may be above a trusted file, because nobody can replace other users' files in it.
    set_mode(&at("a"), 0o1777);
    assert_eq!(trust::resolve(&file, Writers::Nobody).unwrap(), real);
    // A sticky folder itself is not trusted, because anyone can create files in it.
    insta::assert_snapshot!(refused(&at("a"), Writers::Nobody, root.path()), @"ROOT/a is writable by other users (mode 1777); run `chmod go-w ROOT/a`");
    insta::assert_snapshot!(refused(&at("nowhere"), Writers::Nobody, root.path()), @"the owner of ROOT/nowhere cannot be determined: No such file or directory (os error 2)");
}

#[test]
fn a_symbolic_link_is_trusted_if_its_target_is() {
    let root = folder();
    let at = |below: &str| root.path().join(below);
    fs::create_dir_all(at("open")).unwrap();
    fs::write(at("open/file"), "").unwrap();
    set_mode(&at("open"), 0o777);
    symlink(at("open/file"), at("link")).unwrap();
    insta::assert_snapshot!(refused(&at("link"), Writers::Nobody, root.path()), @"ROOT/open is writable by other users (mode 0777); run `chmod go-w ROOT/open`");

    fs::write(at("safe"), "").unwrap();
    set_mode(&at("safe"), 0o644);
    symlink(at("safe"), at("open/link")).unwrap();
    let real = at("safe").canonicalize().unwrap();
    assert_eq!(
        trust::resolve(&at("open/link"), Writers::Nobody).unwrap(),
        real
    );
}

/// Needs root to change a file's owner; does nothing for other users.
#[test]
fn a_file_of_another_user_is_not_trusted_in_any_mode() {
    let root = folder();
    let file = root.path().join("file");
    fs::write(&file, "code").unwrap();
    set_mode(&file, 0o600);
    assert_eq!(own::read(&file, 10).unwrap(), b"code");
    if std::os::unix::fs::chown(&file, Some(12345), None).is_err() {
        return;
    }
    insta::assert_snapshot!(refused(&file, Writers::Group, root.path()), @"ROOT/file belongs to user 12345, neither to you nor to root; change its owner with `chown`, or use one of your own");
    let why = own::read(&file, 10).unwrap_err();
    insta::assert_snapshot!(message(io::Error::from(why), root.path()), @"ROOT/file belongs to user 12345, not to you; change its owner with `chown`, or use one of your own");
}

#[test]
fn libraries_that_the_loader_would_load_from_the_current_folder_are_detected() {
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
            insta::assert_snapshot!(found(paths), @"LD_LIBRARY_PATH has an empty entry, which means the current folder, and that contains `libcuda.so.1`; remove the extra colon");
        }
    }
    insta::assert_snapshot!(found("/a:lib64"), @"LD_LIBRARY_PATH has the entry `lib64`, which is relative to the current folder and contains `libnvrtc.so.13`; make it absolute");
    insta::assert_snapshot!(found(".:/a"), @"LD_LIBRARY_PATH has the entry `.`, which is relative to the current folder and contains `libcuda.so.1`; make it absolute");
}

/// Returns the mode of a new file under this process's umask.
fn default_mode(root: &Path) -> u32 {
    let usual = root.join("usual");
    fs::write(&usual, "").unwrap();
    mode(&usual)
}

/// Returns the names in `root`, to check that no temporary file is left.
fn names(root: &Path) -> Vec<String> {
    let entries = root.read_dir().unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn a_new_file_follows_the_umask_and_an_old_one_keeps_its_mode() {
    let root = folder();
    let usual = default_mode(root.path());
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
fn a_symbolic_link_stays_and_its_target_is_written() {
    let root = folder();
    let usual = default_mode(root.path());
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

    // The target does not exist yet.
    symlink("below/later", at("early")).unwrap();
    write(&at("early"), b"made").unwrap();
    assert_eq!(fs::read(at("below/later")).unwrap(), b"made");
    assert_eq!(mode(&at("below/later")), usual);
    assert!(at("early").symlink_metadata().unwrap().is_symlink());

    symlink("loop", at("loop")).unwrap();
    insta::assert_snapshot!(write(&at("loop"), b"").unwrap_err(), @"Too many levels of symbolic links (os error 40)");
}

#[test]
fn devices_and_pipes_are_written_in_place() {
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
fn folders_and_sockets_are_rejected() {
    let root = folder();
    insta::assert_snapshot!(write(root.path(), b"").unwrap_err(), @"it is a folder; give the name of a file");
    let socket = root.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    insta::assert_snapshot!(write(&socket, b"").unwrap_err(), @"it is a socket; give the name of a file");
    assert_eq!(names(root.path()), ["socket"]);
}

#[test]
fn a_private_file_is_accessible_to_the_user_only() {
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
        message(io::Error::from(error), root.path())
    };
    symlink(&file, at("made/folder/link")).unwrap();
    insta::assert_snapshot!(why(&at("made/folder/link")), @"ROOT/made/folder/link is a symbolic link; replace it with the file itself");
    set_mode(&file, 0o620);
    insta::assert_snapshot!(why(&file), @"ROOT/made/folder/file is writable by other users (mode 0620); run `chmod go-w ROOT/made/folder/file`");
    set_mode(&file, 0o600);

    for open in [0o770, 0o707, 0o1777] {
        set_mode(&at("made/folder"), open);
        let told = why(&file);
        assert!(
            told.starts_with("ROOT/made/folder is writable by other users (mode "),
            "{told}"
        );
        assert!(own::write(&file, b"over it").is_err());
    }
    set_mode(&at("made/folder"), 0o700);
    assert_eq!(own::read(&file, 10).unwrap(), b"mine");
    // Another user could now replace `made/folder`.
    set_mode(&at("made"), 0o777);
    insta::assert_snapshot!(why(&file), @"ROOT/made is writable by other users (mode 0777); run `chmod go-w ROOT/made`");
    set_mode(&at("made"), 0o1777);
    assert_eq!(own::read(&file, 10).unwrap(), b"mine");
}
