use super::*;
use std::fs::{self, File};
use std::io::{self, Write};

fn nvrtc() -> Nvrtc {
    crate::jit::nvrtc_for_tests()
}

fn kernel(symbol: &str, body: &str) -> Source {
    Source {
        symbol: symbol.into(),
        text: format!("extern \"C\" __global__ void {symbol}(float* y) {{ {body} }}\n"),
    }
}

fn kernels(n_kernels: usize) -> Vec<Source> {
    (0..n_kernels)
        .map(|at| kernel(&format!("k{at}"), &format!("y[{at}] = {at};")))
        .collect()
}

fn quiet(_: usize, _: usize) {}

/// Returns the numbers of cache hits and of compilations.
fn counts(jit: &Jit) -> (usize, usize) {
    let stats = jit.stats();
    (stats.hits, stats.misses)
}

#[test]
fn cubins_are_in_the_order_of_their_sources_and_each_is_compiled_once() {
    let jit = Jit::new(nvrtc(), None).with_threads(2);
    let mut sources = kernels(4);
    sources.push(sources[1].clone());
    sources.insert(0, sources[3].clone());
    let seen = Mutex::new(Vec::new());
    let progress = |done, total| seen.lock().unwrap().push((done, total));
    let cubins = jit.compile_all(&sources, Target::Sm80, &progress).unwrap();

    let names: Vec<&str> = cubins.iter().map(|cubin| cubin.symbol.as_str()).collect();
    assert_eq!(names, ["k3", "k0", "k1", "k2", "k3", "k1"]);
    assert_eq!(cubins[0], cubins[4]);
    assert_eq!(counts(&jit), (0, 4));
    assert_eq!(
        seen.into_inner().unwrap(),
        [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    );
    let stats = jit.stats();
    assert!(stats.seconds > 0.0 && stats.nvrtc_seconds > 0.0 && stats.cache_notes.is_empty());
}

#[test]
fn no_sources_make_no_cubins() {
    let jit = Jit::new(nvrtc(), None);
    assert_eq!(jit.compile_all(&[], Target::Sm80, &quiet).unwrap(), []);
    assert_eq!(counts(&jit), (0, 0));
}

#[test]
fn the_cache_returns_the_bytes_that_were_compiled() {
    let root = tempfile::tempdir().unwrap();
    let open = || Jit::new(nvrtc(), Some(DiskCache::at(root.path())));
    let cold = open();
    let compiled = cold.compile_all(&kernels(3), Target::Sm80, &quiet).unwrap();
    assert_eq!(counts(&cold), (0, 3));

    let warm = open();
    assert_eq!(
        warm.compile_all(&kernels(4), Target::Sm80, &quiet).unwrap()[..3],
        compiled
    );
    assert_eq!(counts(&warm), (3, 1));
    // Each target has its own entry.
    warm.compile_all(&kernels(1), Target::Sm90a, &quiet)
        .unwrap();
    assert_eq!(counts(&warm), (3, 2));
}

#[test]
fn the_error_is_that_of_the_first_source_that_fails() {
    let mut sources = kernels(6);
    // Longer sources are compiled first. On one thread, source 5 therefore fails before sources 4 and 2 start. The error must still be that
    // of source 2.
    sources[2] = kernel("k2", "y[0] = early;");
    sources[4] = kernel("k4", "y[0] = later_and_longer;");
    sources[5] = kernel("k5", "y[0] = last_and_longest_of_all;");
    for n_threads in [1, 2, 8] {
        let jit = Jit::new(nvrtc(), None).with_threads(n_threads);
        let error = jit.compile_all(&sources, Target::Sm80, &quiet).unwrap_err();
        assert!(
            matches!(&error, JitError::Compile { symbol, .. } if symbol == "k2"),
            "{error}"
        );
    }
}

#[test]
fn cubins_compiled_before_a_failure_are_kept() {
    let root = tempfile::tempdir().unwrap();
    let jit = Jit::new(nvrtc(), Some(DiskCache::at(root.path()))).with_threads(1);
    let sources = [
        kernel("longer", "y[0] = 1; /* compiled first */"),
        kernel("bad", "y = ;"),
    ];
    jit.compile_all(&sources, Target::Sm80, &quiet).unwrap_err();
    assert_eq!(jit.cache().unwrap().usage().unwrap().n_entries, 1);
}

#[test]
fn an_entry_for_another_symbol_is_not_used() {
    let root = tempfile::tempdir().unwrap();
    let jit = Jit::new(nvrtc(), Some(DiskCache::at(root.path())));
    let right = kernel("right", "y[0] = 1;");
    jit.compile_all(std::slice::from_ref(&right), Target::Sm80, &quiet)
        .unwrap();
    let wrong = Source {
        symbol: "wrong".into(),
        ..right
    };
    assert!(matches!(
        jit.compile_all(&[wrong], Target::Sm80, &quiet),
        Err(JitError::NotOneKernel { symbol, found }) if symbol == "wrong" && found == ["right"]
    ));
}

#[test]
fn a_damaged_entry_is_compiled_again_and_replaced() {
    let root = tempfile::tempdir().unwrap();
    let open = || Jit::new(nvrtc(), Some(DiskCache::at(root.path())));
    let compiled = open()
        .compile_all(&kernels(2), Target::Sm80, &quiet)
        .unwrap();
    for entry in open().cache().unwrap().path().read_dir().unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0xff;
        fs::write(&path, bytes).unwrap();
    }

    let mending = open();
    assert_eq!(
        mending
            .compile_all(&kernels(2), Target::Sm80, &quiet)
            .unwrap(),
        compiled
    );
    assert_eq!(counts(&mending), (0, 2));
    let faults: Vec<CacheFault> = mending
        .stats()
        .cache_notes
        .iter()
        .map(|note| note.fault)
        .collect();
    assert_eq!(faults, [CacheFault::Damaged, CacheFault::Damaged]);

    let mended = open();
    assert_eq!(
        mended
            .compile_all(&kernels(2), Target::Sm80, &quiet)
            .unwrap(),
        compiled
    );
    assert_eq!(counts(&mended), (2, 0));
    assert!(mended.stats().cache_notes.is_empty());
}

fn onto_a_full_disk(_: &mut File, bytes: &[u8]) -> io::Result<()> {
    File::options()
        .write(true)
        .open("/dev/full")?
        .write_all(bytes)
}

fn onto_a_read_only_disk(_: &mut File, _: &[u8]) -> io::Result<()> {
    const EROFS: i32 = 30;
    Err(io::Error::from_raw_os_error(EROFS))
}

/// Compiles three kernels three times, and checks that the cache error is reported once.
fn note_of_failing_cache(cache: DiskCache) -> CacheNote {
    let jit = Jit::new(nvrtc(), Some(cache)).with_threads(2);
    let expected = Jit::new(nvrtc(), None)
        .compile_all(&kernels(3), Target::Sm80, &quiet)
        .unwrap();
    for round in 1..=3 {
        let cubins = jit.compile_all(&kernels(3), Target::Sm80, &quiet).unwrap();
        assert_eq!(cubins, expected);
        assert_eq!(counts(&jit), (0, 3 * round));
    }
    let notes = jit.stats().cache_notes;
    assert_eq!(notes.len(), 1, "{notes:?}");
    notes[0].clone()
}

#[test]
fn a_full_disk_is_reported_once_and_does_not_fail_a_compilation() {
    let root = tempfile::tempdir().unwrap();
    let note = note_of_failing_cache(DiskCache::writing_with(root.path(), onto_a_full_disk));
    assert_eq!(note.fault, CacheFault::Full);
    assert_eq!(
        DiskCache::at(root.path()).usage().unwrap(),
        Default::default()
    );
}

#[test]
fn a_read_only_disk_is_reported_once_and_does_not_fail_a_compilation() {
    let root = tempfile::tempdir().unwrap();
    let note = note_of_failing_cache(DiskCache::writing_with(root.path(), onto_a_read_only_disk));
    assert_eq!(note.fault, CacheFault::ReadOnly);
    let (head, tail) = note
        .message
        .split_once(&root.path().display().to_string())
        .unwrap();
    let (_, tail) = tail.split_once(".cubin").unwrap();
    insta::assert_snapshot!(format!("{head}ROOT/….cubin{tail}"), @"cannot write the kernel cache at ROOT/….cubin: Read-only file system (os error 30). To fix it, remount the file system read-write, or set GEMMULE_CACHE to another folder; until then, kernels are compiled again at each start");
}

#[test]
fn a_cache_that_is_a_file_is_reported_once_and_does_not_fail_a_compilation() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    fs::write(&file, "in the way").unwrap();
    // The cache's folder is the file itself or a path below it. Even the superuser cannot create a folder there.
    for place in [file.clone(), file.join("below")] {
        assert_eq!(
            note_of_failing_cache(DiskCache::at(&place)).fault,
            CacheFault::NotAFolder
        );
    }
}

#[cfg(unix)]
#[test]
fn a_cache_writable_by_others_is_reported_once_and_its_code_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let root = tempfile::tempdir().unwrap();
    let open = || DiskCache::at(root.path());
    // Create entries with the right keys and matching hashes, but with other code.
    let nvrtc = nvrtc();
    for source in kernels(3) {
        let wrong = kernel(&source.symbol, "y[0] = 666.0f;");
        let options = options(Target::Sm80, nvrtc.version());
        let key = CacheKey::new(&source.text, &options, nvrtc.version(), Target::Sm80);
        let forged = nvrtc.compile(&wrong, Target::Sm80).unwrap();
        open().put(&key, &forged).unwrap();
    }
    fs::set_permissions(open().path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let jit = Jit::new(nvrtc.clone(), Some(open()));
    assert!(
        jit.own_cache().is_none(),
        "for what is kept beside the cubins"
    );
    assert_eq!(jit.stats().cache_notes.len(), 1);
    assert_eq!(note_of_failing_cache(open()).fault, CacheFault::Foreign);
    assert_eq!(open().usage().unwrap().n_entries, 3);
}

#[test]
fn a_read_only_cache_can_be_read() {
    let root = tempfile::tempdir().unwrap();
    let open = |write| Jit::new(nvrtc(), Some(DiskCache::writing_with(root.path(), write)));
    let whole: fn(&mut File, &[u8]) -> io::Result<()> = |file, bytes| file.write_all(bytes);
    open(whole)
        .compile_all(&kernels(2), Target::Sm80, &quiet)
        .unwrap();

    let jit = open(onto_a_read_only_disk);
    jit.compile_all(&kernels(3), Target::Sm80, &quiet).unwrap();
    jit.compile_all(&kernels(3), Target::Sm80, &quiet).unwrap();
    assert_eq!(counts(&jit), (4, 2));
}
