use super::*;
use proptest::prelude::*;
use std::time::SystemTime;

fn key(text: &str) -> CacheKey {
    CacheKey::new(text, &["-std=c++17".to_owned()], (13, 0), Target::Sm80)
}

fn cubin(bytes: &[u8]) -> Cubin {
    let report = CompileReport {
        registers: 64,
        spill_stores: 0,
        spill_loads: 0,
        stack_frame: 16,
        shared_bytes: 2048,
    };
    Cubin {
        symbol: "bias_gelu_f16_w768".into(),
        target: Target::Sm80,
        bytes: bytes.into(),
        report: Some(report),
    }
}

/// Formats a message with the test's folder replaced by ROOT.
fn message(error: &JitError, root: &Path) -> String {
    error
        .to_string()
        .replace(&root.display().to_string(), "ROOT")
}

#[test]
fn a_stored_entry_is_returned() {
    let root = tempfile::tempdir().unwrap();
    let cache = DiskCache::at(root.path());
    assert_eq!(cache.get(&key("a")).unwrap(), None);
    assert_eq!(cache.usage().unwrap(), CacheUsage::default());

    cache.put(&key("a"), &cubin(b"one")).unwrap();
    let without_report = Cubin {
        report: None,
        ..cubin(b"")
    };
    cache.put(&key("b"), &without_report).unwrap();
    assert_eq!(cache.get(&key("a")).unwrap(), Some(cubin(b"one")));
    assert_eq!(
        DiskCache::at(root.path()).get(&key("b")).unwrap(),
        Some(without_report)
    );

    cache.put(&key("a"), &cubin(b"two")).unwrap();
    assert_eq!(cache.get(&key("a")).unwrap(), Some(cubin(b"two")));
    let usage = cache.usage().unwrap();
    assert_eq!((usage.n_entries, usage.n_unfinished), (2, 0));
    let on_disk = |name| fs::metadata(cache.entry_path(&key(name))).unwrap().len();
    assert_eq!(usage.bytes, on_disk("a") + on_disk("b"));
}

#[test]
fn every_input_that_determines_the_code_changes_the_key_and_no_other_does() {
    let options = |list: &[&str]| list.iter().map(|&o| o.to_owned()).collect::<Vec<_>>();
    let keys = [
        CacheKey::new("k", &options(&["a", "b"]), (13, 0), Target::Sm80),
        CacheKey::new("k ", &options(&["a", "b"]), (13, 0), Target::Sm80),
        CacheKey::new("k", &options(&["ab"]), (13, 0), Target::Sm80),
        CacheKey::new("k", &options(&["b", "a"]), (13, 0), Target::Sm80),
        CacheKey::new("ka", &options(&["b"]), (13, 0), Target::Sm80),
        CacheKey::new("k", &options(&["a", "b"]), (13, 1), Target::Sm80),
        CacheKey::new("k", &options(&["a", "b"]), (12, 0), Target::Sm80),
        CacheKey::new("k", &options(&["a", "b"]), (13, 0), Target::Sm86),
    ];
    for (at, one) in keys.iter().enumerate() {
        assert!(keys[at + 1..].iter().all(|other| one != other), "{at}");
    }
    assert_eq!(
        keys[0],
        CacheKey::new("k", &options(&["a", "b"]), (13, 0), Target::Sm80)
    );
}

#[test]
fn the_key_is_stable_across_releases() {
    // The expected hash was computed from the length-prefixed parts with another program.
    assert_eq!(key("kernel").to_string(), KEY_OF_KERNEL);
}

const KEY_OF_KERNEL: &str = "ffc6499d752300f24ea009efeb9e0deb7e16b5876d4a9b0d3ce95e29536ea6b5";

#[test]
fn an_entry_with_any_byte_changed_or_missing_is_damaged() {
    let root = tempfile::tempdir().unwrap();
    let cache = DiskCache::at(root.path());
    let key = key("a");
    cache.put(&key, &cubin(b"some code")).unwrap();
    let path = cache.entry_path(&key);
    let whole = fs::read(&path).unwrap();
    for at in 0..whole.len() {
        let mut changed = whole.clone();
        changed[at] ^= 0x10;
        for bytes in [
            &changed[..],
            &whole[..at],
            &[&whole[..], &whole[..=at]].concat(),
        ] {
            fs::write(&path, bytes).unwrap();
            let error = cache.get(&key).unwrap_err();
            assert_eq!(
                error.cache_fault(),
                Some(CacheFault::Damaged),
                "byte {at}: {error}"
            );
        }
    }
    fs::write(&path, whole).unwrap();
    assert_eq!(cache.get(&key).unwrap(), Some(cubin(b"some code")));
}

#[test]
fn an_entry_under_a_wrong_name_is_damaged() {
    let root = tempfile::tempdir().unwrap();
    let cache = DiskCache::at(root.path());
    cache.put(&key("a"), &cubin(b"one")).unwrap();
    fs::rename(cache.entry_path(&key("a")), cache.entry_path(&key("b"))).unwrap();
    assert_eq!(
        cache.get(&key("b")).unwrap_err().cache_fault(),
        Some(CacheFault::Damaged)
    );
}

#[test]
fn damage_is_described() {
    let root = tempfile::tempdir().unwrap();
    let cache = DiskCache::at(root.path());
    let key = key("a");
    cache.put(&key, &cubin(b"one")).unwrap();
    let path = cache.entry_path(&key);
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    let message_of = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        message(&cache.get(&key).unwrap_err(), root.path()).replace(&key.to_string(), "KEY")
    };
    insta::assert_snapshot!(message_of(&bytes), @"the kernel cache entry ROOT/cubins/KEY.cubin is damaged: its contents do not match its hash. It is compiled again and replaced");
    insta::assert_snapshot!(message_of(&bytes[..bytes.len() - 1]), @"the kernel cache entry ROOT/cubins/KEY.cubin is damaged: it should hold 62 bytes and holds 61. It is compiled again and replaced");
    insta::assert_snapshot!(message_of(&bytes[..20]), @"the kernel cache entry ROOT/cubins/KEY.cubin is damaged: it has 20 bytes, which is shorter than any entry. It is compiled again and replaced");
    insta::assert_snapshot!(message_of(&[b'x'; 100]), @"the kernel cache entry ROOT/cubins/KEY.cubin is damaged: it does not start with an entry's magic number. It is compiled again and replaced");
}

#[test]
fn a_file_in_place_of_the_cache_is_reported() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("file"), "in the way").unwrap();
    let cache = DiskCache::at(&root.path().join("file"));
    let error = cache.put(&key("a"), &cubin(b"one")).unwrap_err();
    assert_eq!(error.cache_fault(), Some(CacheFault::NotAFolder));
    insta::assert_snapshot!(message(&error, root.path()).replace(&key("a").to_string(), "KEY"), @"cannot write the kernel cache at ROOT/file/cubins/KEY.cubin: Not a directory (os error 20). To fix it, remove the file that is in place of a folder, or set GEMMULE_CACHE to another folder; until then, kernels are compiled again at each start");
    insta::assert_snapshot!(message(&cache.check_writable().unwrap_err(), root.path()), @"cannot write the kernel cache at ROOT/file/cubins: Not a directory (os error 20). To fix it, remove the file that is in place of a folder, or set GEMMULE_CACHE to another folder; until then, kernels are compiled again at each start");
    insta::assert_snapshot!(
        message(&cache.get(&key("a")).unwrap_err(), root.path()).replace(&key("a").to_string(), "KEY"),
        @"cannot read the kernel cache at ROOT/file/cubins/KEY.cubin: Not a directory (os error 20). To fix it, remove the file that is in place of a folder, or set GEMMULE_CACHE to another folder; until then, kernels are compiled again at each start"
    );
    assert!(cache.usage().is_err());
}

/// Writes half of the bytes, and then fails like a full disk, using /dev/full.
fn onto_a_full_disk(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    file.write_all(&bytes[..bytes.len() / 2])?;
    File::options()
        .write(true)
        .open("/dev/full")?
        .write_all(bytes)
}

#[test]
fn a_full_disk_is_reported_and_leaves_no_file() {
    let root = tempfile::tempdir().unwrap();
    let good = DiskCache::at(root.path());
    good.put(&key("a"), &cubin(b"before")).unwrap();

    let full = DiskCache::writing_with(root.path(), onto_a_full_disk);
    let error = full.put(&key("a"), &cubin(b"after")).unwrap_err();
    assert_eq!(error.cache_fault(), Some(CacheFault::Full));
    insta::assert_snapshot!(message(&error, root.path()).replace(&key("a").to_string(), "KEY"), @"cannot write the kernel cache at ROOT/cubins/KEY.cubin: No space left on device (os error 28). To fix it, free some space, or set GEMMULE_CACHE to another folder; until then, kernels are compiled again at each start");
    assert_eq!(
        full.check_writable().unwrap_err().cache_fault(),
        Some(CacheFault::Full)
    );

    assert_eq!(full.get(&key("a")).unwrap(), Some(cubin(b"before")));
    let usage = good.usage().unwrap();
    assert_eq!((usage.n_entries, usage.n_unfinished), (1, 0));
}

#[test]
fn faults_of_the_system_are_distinguished() {
    // Linux error numbers: EACCES, EEXIST, ENOTDIR, EIO, ENOSPC, EROFS, EDQUOT.
    let expected = [
        (13, CacheFault::Denied),
        (17, CacheFault::NotAFolder),
        (20, CacheFault::NotAFolder),
        (5, CacheFault::Io),
        (28, CacheFault::Full),
        (30, CacheFault::ReadOnly),
        (122, CacheFault::Full),
    ];
    for (number, fault) in expected {
        assert_eq!(
            CacheFault::of(&io::Error::from_raw_os_error(number)),
            fault,
            "{number}"
        );
    }
}

#[test]
fn files_of_killed_processes_are_ignored_and_removed_when_old() {
    let root = tempfile::tempdir().unwrap();
    let cache = DiskCache::at(root.path());
    cache.put(&key("a"), &cubin(b"one")).unwrap();
    let left = |name: &str, hours: u64| {
        let path = cache.path().join(name);
        let file = File::create(&path).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(3600 * hours))
            .unwrap();
        path
    };
    let old = left(".unfinished-old", 2);
    let new = left(".unfinished-new", 0);
    let foreign = left("notes.txt", 2);
    assert_eq!(cache.usage().unwrap().n_unfinished, 2);

    // A new process cleans up at its first write. It removes only unfinished files of the cache, and only old ones.
    DiskCache::at(root.path())
        .put(&key("b"), &cubin(b"two"))
        .unwrap();
    assert!(!old.exists() && new.exists() && foreign.exists());
    let usage = cache.usage().unwrap();
    assert_eq!((usage.n_entries, usage.n_unfinished), (2, 1));
    assert_eq!(cache.get(&key("a")).unwrap(), Some(cubin(b"one")));
}

#[cfg(unix)]
fn mode(path: &Path) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[cfg(unix)]
fn set_mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[cfg(unix)]
#[test]
fn folders_and_entries_are_private() {
    let root = tempfile::tempdir().unwrap();
    let cache = DiskCache::at(&root.path().join("a/b"));
    cache.put(&key("a"), &cubin(b"one")).unwrap();
    assert_eq!(mode(&cache.entry_path(&key("a"))), 0o600);
    for folder in [
        &root.path().join("a"),
        &root.path().join("a/b"),
        cache.path(),
    ] {
        assert_eq!(mode(folder), 0o700, "{}", folder.display());
    }
}

/// Anyone who can write to the folder can forge entries, because their hash has no secret key.
#[cfg(unix)]
#[test]
fn a_folder_writable_by_others_is_neither_read_nor_written() {
    let root = tempfile::tempdir().unwrap();
    let cache = DiskCache::at(root.path());
    cache.put(&key("a"), &cubin(b"forged")).unwrap();
    for open in [0o777, 0o770, 0o702, 0o1777] {
        set_mode(cache.path(), open);
        for error in [
            cache.get(&key("a")).unwrap_err(),
            cache.put(&key("b"), &cubin(b"two")).unwrap_err(),
            cache.check_writable().unwrap_err(),
            cache.check_owner().unwrap_err(),
        ] {
            assert_eq!(error.cache_fault(), Some(CacheFault::Foreign), "{open:o}");
            insta::allow_duplicates! {
                insta::assert_snapshot!(message(&error, root.path()).replace(&format!("{open:04o}"), "MODE"), @"the kernel cache ROOT/cubins is neither read nor written: ROOT/cubins is writable by other users (mode MODE); run `chmod go-w ROOT/cubins`. Code that another user put there would run on the GPU as yours. Fix the permissions, or set GEMMULE_CACHE to a folder of your own; until then, kernels are compiled again at each start");
            }
        }
        assert_eq!(cache.usage().unwrap().n_entries, 1);
    }
    set_mode(cache.path(), 0o700);
    cache.check_owner().unwrap();
    assert_eq!(cache.get(&key("a")).unwrap(), Some(cubin(b"forged")));

    // If the parent folder is writable by others, they can replace the cache's folder, unless the
    // parent is sticky.
    set_mode(root.path(), 0o777);
    insta::assert_snapshot!(message(&cache.get(&key("a")).unwrap_err(), root.path()), @"the kernel cache ROOT/cubins is neither read nor written: ROOT is writable by other users (mode 0777); run `chmod go-w ROOT`. Code that another user put there would run on the GPU as yours. Fix the permissions, or set GEMMULE_CACHE to a folder of your own; until then, kernels are compiled again at each start");
    set_mode(root.path(), 0o1777);
    assert_eq!(cache.get(&key("a")).unwrap(), Some(cubin(b"forged")));
}

#[cfg(unix)]
#[test]
fn an_entry_writable_by_others_is_not_read_and_is_replaced() {
    let root = tempfile::tempdir().unwrap();
    let cache = DiskCache::at(root.path());
    let key = key("a");
    let path = cache.entry_path(&key);
    let refused = || {
        let error = cache.get(&key).unwrap_err();
        assert_eq!(error.cache_fault(), Some(CacheFault::Foreign));
        message(&error, root.path()).replace(&key.to_string(), "KEY")
    };
    let replaced = || {
        cache.put(&key, &cubin(b"right")).unwrap();
        assert_eq!(cache.get(&key).unwrap(), Some(cubin(b"right")));
        assert!(path.symlink_metadata().unwrap().is_file());
    };
    replaced();
    set_mode(&path, 0o622);
    insta::assert_snapshot!(refused(), @"the kernel cache entry ROOT/cubins/KEY.cubin is not used: it is writable by other users (mode 0622), so its code may be another user's. It is compiled again and replaced");
    replaced();

    let elsewhere = root.path().join("elsewhere");
    fs::rename(&path, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
    insta::assert_snapshot!(refused(), @"the kernel cache entry ROOT/cubins/KEY.cubin is not used: it is a symbolic link, so its code may be another user's. It is compiled again and replaced");
    replaced();

    // Only root can change a file's owner, so the rest is tested only as root.
    if std::os::unix::fs::chown(&path, Some(12345), None).is_ok() {
        insta::assert_snapshot!(refused(), @"the kernel cache entry ROOT/cubins/KEY.cubin is not used: it belongs to user 12345, so its code may be another user's. It is compiled again and replaced");
        replaced();
        std::os::unix::fs::chown(cache.path(), Some(12345), None).unwrap();
        insta::assert_snapshot!(refused(), @"the kernel cache ROOT/cubins is neither read nor written: ROOT/cubins belongs to user 12345, not to you; change its owner with `chown`, or use one of your own. Code that another user put there would run on the GPU as yours. Fix the permissions, or set GEMMULE_CACHE to a folder of your own; until then, kernels are compiled again at each start");
    }
}

#[test]
fn the_default_folder_depends_on_the_environment_in_order() {
    let root = |set: &[(&str, &str)]| {
        default_root(|name| {
            set.iter()
                .find(|(n, _)| *n == name)
                .map(|(_, v)| PathBuf::from(v))
        })
    };
    let home = ("HOME", "/home/a");
    assert_eq!(root(&[home]), Some("/home/a/.cache/gemmule".into()));
    assert_eq!(
        root(&[home, ("XDG_CACHE_HOME", "/x")]),
        Some("/x/gemmule".into())
    );
    assert_eq!(
        root(&[home, ("XDG_CACHE_HOME", "rel")]),
        Some("/home/a/.cache/gemmule".into())
    );
    assert_eq!(
        root(&[home, ("XDG_CACHE_HOME", "/x"), ("GEMMULE_CACHE", "mine")]),
        Some("mine".into())
    );
    assert_eq!(
        root(&[home, ("GEMMULE_CACHE", "")]),
        Some("/home/a/.cache/gemmule".into())
    );
    assert_eq!(root(&[]), None);
    insta::assert_snapshot!(JitError::NoCacheFolder, @"there is no folder for the kernel cache: GEMMULE_CACHE is not set, and neither XDG_CACHE_HOME nor HOME holds an absolute path. Set GEMMULE_CACHE to a folder");
}

proptest! {
    #[test]
    fn any_cubin_survives_encoding_and_decoding(
        symbol in "\\PC{0,40}",
        bytes in proptest::collection::vec(any::<u8>(), 0..2000),
    ) {
        let cubin = Cubin { symbol, ..cubin(&bytes) };
        prop_assert_eq!(decode(&key("a"), &encode(&key("a"), &cubin)), Ok(cubin));
    }

    #[test]
    fn no_file_makes_the_reader_panic(
        header_len in any::<u32>(),
        cubin_len in any::<u64>(),
        rest in proptest::collection::vec(any::<u8>(), 0..100),
    ) {
        let bytes =
            [&MAGIC[..], &header_len.to_le_bytes(), &cubin_len.to_le_bytes(), &rest].concat();
        prop_assert!(decode(&key("a"), &bytes).is_err());
    }
}
