//! Tests of the disk cache of cubins with several processes: concurrent starts, killed processes, and unusable folders.
//!
//! A test starts its own executable again, and names the child's task (its role) in an environment variable. The child process runs only
//! the test `child`.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::{nvrtc, with_nvrtc};
use gemmule::jit::{CacheFault, CacheKey, Cubin, DiskCache, Jit, Source, Target, options};

const ROLE: &str = "GEMMULE_TEST_ROLE";
const ROOT: &str = "GEMMULE_TEST_ROOT";
const N_KERNELS: usize = 8;
const N_PROCESSES: usize = 6;
/// Size of a cache entry in bytes. Writing an entry of this size takes long enough to kill a process in the middle.
const LARGE: usize = 16 << 20;

fn sources() -> Vec<Source> {
    (0..N_KERNELS)
        .map(|at| Source {
            symbol: format!("k{at}"),
            text: format!("extern \"C\" __global__ void k{at}(int* y) {{ y[{at}] = {at}; }}\n"),
        })
        .collect()
}

/// Returns a cache key and a cubin with arbitrary contents that depend on `number`. NVRTC is not needed.
fn made_up(number: usize) -> (CacheKey, Cubin) {
    let key = CacheKey::new(&number.to_string(), &[], (0, 0), Target::Sm80);
    let bytes = vec![number as u8; LARGE];
    (
        key,
        Cubin {
            symbol: number.to_string(),
            target: Target::Sm80,
            bytes,
            report: None,
        },
    )
}

/// Returns a command that starts this executable as a child process in `role`, with its cache in `root`.
fn again(role: &str, root: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    with_nvrtc(&mut command)
        .args([
            "--exact",
            "jit_processes::child",
            "--ignored",
            "--nocapture",
        ])
        .env(ROLE, role)
        .env(ROOT, root)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Returns the lines that a child printed with `say`.
fn said(output: &Output) -> Vec<String> {
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{}\n{stdout}\n{stderr}",
        output.status
    );
    // Drop the other output of the child, such as `test child ...`, which the test harness prints before the child's text on the same line.
    stdout
        .lines()
        .filter_map(|line| Some(line.split_once("said: ")?.1.to_owned()))
        .collect()
}

fn say(words: impl std::fmt::Display) {
    println!("said: {words}");
}

#[test]
#[ignore = "the other tests start it as a process of its own; alone it does nothing"]
fn child() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let root = std::path::PathBuf::from(std::env::var_os(ROOT).unwrap());
    match role.as_str() {
        "compile" => {
            let jit = Jit::new(nvrtc(), Some(DiskCache::at(&root.join("cache"))));
            fs::write(root.join(format!("ready-{}", std::process::id())), "").unwrap();
            wait_until("the start", || root.join("go").exists());
            compile(&jit);
        }
        "open and compile" => compile(&Jit::open().unwrap_or_else(|error| panic!("{error}"))),
        "open" => match Jit::open() {
            Ok(jit) => say(format!("opened {}", jit.nvrtc().path().display())),
            Err(error) => error.to_string().lines().for_each(say),
        },
        "write forever" => {
            let cache = DiskCache::at(&root);
            for number in 0.. {
                let (key, cubin) = made_up(number % 4);
                cache.put(&key, &cubin).unwrap();
            }
        }
        other => panic!("no role {other}"),
    }
}

/// Compiles all sources, and prints a digest of the cubins and the counts of the cache.
fn compile(jit: &Jit) {
    let cubins = jit
        .compile_all(&sources(), Target::Sm80, &|_, _| ())
        .unwrap();
    let bytes: Vec<u8> = cubins
        .iter()
        .flat_map(|cubin| cubin.bytes.clone())
        .collect();
    let bytes = String::from_utf8_lossy(&bytes).into_owned();
    say(CacheKey::new(&bytes, &[], (0, 0), Target::Sm80));
    let stats = jit.stats();
    say(stats.hits);
    say(stats.misses);
    let faults: Vec<CacheFault> = stats.cache_notes.iter().map(|note| note.fault).collect();
    say(format!("{faults:?}"));
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "waited too long for {what}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A process that is killed at the end of the test, even if the test fails.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn processes_that_start_at_once_on_an_empty_cache_all_succeed_and_agree() {
    let root = tempfile::tempdir().unwrap();
    let start = || again("compile", root.path()).spawn().unwrap();
    let children: Vec<Child> = (0..N_PROCESSES).map(|_| start()).collect();
    let n_ready = || {
        let names = root
            .path()
            .read_dir()
            .unwrap()
            .map(|entry| entry.unwrap().file_name());
        names
            .filter(|name| name.to_string_lossy().starts_with("ready-"))
            .count()
    };
    wait_until("the processes to be ready", || n_ready() == N_PROCESSES);
    fs::write(root.path().join("go"), "").unwrap();
    let outputs: Vec<Vec<String>> = children
        .into_iter()
        .map(|child| said(&child.wait_with_output().unwrap()))
        .collect();

    for output in &outputs {
        assert_eq!(output.len(), 4, "{output:?}");
        assert_eq!(output[0], outputs[0][0], "the same code in each process");
        let count = |at: usize| output[at].parse::<usize>().unwrap();
        assert_eq!(count(1) + count(2), N_KERNELS);
        assert_eq!(output[3], "[]", "no trouble with the cache");
    }
    let cache = DiskCache::at(&root.path().join("cache"));
    let usage = cache.usage().unwrap();
    assert_eq!((usage.n_entries, usage.n_unfinished), (N_KERNELS, 0));

    let later = said(&start().wait_with_output().unwrap());
    assert_eq!(later, [outputs[0][0].as_str(), "8", "0", "[]"]);
}

#[test]
fn a_process_killed_while_it_writes_leaves_whole_entries_only() {
    let root = tempfile::tempdir().unwrap();
    let cache = DiskCache::at(root.path());
    let start = Instant::now();
    // Repeat until a process is killed after it creates a temporary file and before it renames this file to an entry. A process spends most
    // of its time between these operations.
    loop {
        let writer = Killed(again("write forever", root.path()).spawn().unwrap());
        wait_until("an entry, and another being written", || {
            let usage = cache.usage().unwrap();
            usage.n_entries > 0 && usage.n_unfinished > 0
        });
        drop(writer);
        if cache.usage().unwrap().n_unfinished > 0 {
            break;
        }
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "no writer was met while writing"
        );
    }

    let usage = cache.usage().unwrap();
    let found: Vec<Cubin> = (0..4)
        .filter_map(|number| cache.get(&made_up(number).0).unwrap())
        .collect();
    assert_eq!(found.len(), usage.n_entries);
    for cubin in found {
        let (_, expected) = made_up(cubin.symbol.parse().unwrap());
        assert!(cubin == expected, "entry {} differs", cubin.symbol);
    }

    // The cache can still be written. Writing does not remove the unfinished files of killed processes until these files are old.
    let (key, cubin) = made_up(5);
    cache.put(&key, &cubin).unwrap();
    assert_eq!(
        cache.usage().unwrap().n_unfinished,
        usage.n_unfinished,
        "too young to remove"
    );
    std::thread::sleep(Duration::from_millis(20));
    let n_removed = cache.remove_abandoned(Duration::from_millis(10)).unwrap();
    assert_eq!(n_removed, usage.n_unfinished);
    let after = cache.usage().unwrap();
    assert_eq!(
        (after.n_entries, after.n_unfinished),
        (usage.n_entries + 1, 0)
    );
}

#[test]
fn a_process_killed_while_it_compiles_is_carried_on_by_the_next() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("go"), "").unwrap();
    let cache = DiskCache::at(&root.path().join("cache"));
    let first = Killed(again("compile", root.path()).spawn().unwrap());
    wait_until("a first entry", || cache.usage().unwrap().n_entries > 0);
    drop(first);
    let n_before = cache.usage().unwrap().n_entries;

    let next = said(&again("compile", root.path()).output().unwrap());
    assert_eq!(next[1], n_before.to_string());
    assert_eq!(next[2], (N_KERNELS - n_before).to_string());
    assert_eq!(next[3], "[]");
    assert_eq!(cache.usage().unwrap().n_entries, N_KERNELS);
}

#[test]
fn the_cache_is_where_the_environment_says() {
    let root = tempfile::tempdir().unwrap();
    let own = root.path().join("own");
    let mut command = again("open and compile", root.path());
    let output = said(&command.env("GEMMULE_CACHE", &own).output().unwrap());
    assert_eq!(output[1..], ["0", "8", "[]"]);
    assert_eq!(DiskCache::at(&own).usage().unwrap().n_entries, N_KERNELS);

    let nvrtc = nvrtc();
    let text = &sources()[0].text;
    let key = CacheKey::new(
        text,
        &options(Target::Sm80, nvrtc.version()),
        nvrtc.version(),
        Target::Sm80,
    );
    assert_eq!(DiskCache::at(&own).get(&key).unwrap().unwrap().symbol, "k0");
}

#[test]
fn without_any_folder_for_a_cache_kernels_are_compiled_and_it_is_told() {
    let root = tempfile::tempdir().unwrap();
    let mut command = again("open and compile", root.path());
    for name in ["GEMMULE_CACHE", "XDG_CACHE_HOME", "HOME"] {
        command.env_remove(name);
    }
    assert_eq!(
        said(&command.output().unwrap())[1..],
        ["0", "8", "[NoFolder]"]
    );
}

/// The cache is in `/sys`, where even root cannot create folders.
#[cfg(target_os = "linux")]
#[test]
fn a_cache_in_a_folder_that_nobody_may_write_to_is_told_and_gone_without() {
    let root = tempfile::tempdir().unwrap();
    let mut command = again("open and compile", root.path());
    let output = said(
        &command
            .env("GEMMULE_CACHE", "/sys/gemmule")
            .output()
            .unwrap(),
    );
    assert_eq!(output[1..3], ["0", "8"]);
    assert!(
        ["[Denied]", "[ReadOnly]"].contains(&output[3].as_str()),
        "{output:?}"
    );
}

/// A cache folder that everyone can write to is not used, because another user may have written its entries. The notes
/// of the cache report this as `CacheFault::Foreign`.
#[cfg(unix)]
#[test]
fn a_cache_that_others_may_write_to_is_told_and_gone_without() {
    use std::os::unix::fs::PermissionsExt;
    let root = tempfile::tempdir().unwrap();
    let start = || {
        let mut command = again("open and compile", root.path());
        said(&command.env("GEMMULE_CACHE", root.path()).output().unwrap())
    };
    let code = start();
    assert_eq!(code[1..], ["0", "8", "[]"]);
    let folder = DiskCache::at(root.path()).path().to_owned();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o1777)).unwrap();
    let before = DiskCache::at(root.path()).usage().unwrap();
    assert_eq!(start(), [&code[0], "0", "8", "[Foreign]"]);
    assert_eq!(DiskCache::at(root.path()).usage().unwrap(), before);
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(start(), [&code[0], "8", "0", "[]"]);
}

#[test]
fn an_nvrtc_that_is_chosen_and_not_there_is_an_error_of_the_process() {
    let root = tempfile::tempdir().unwrap();
    let nowhere = root.path().join("nowhere");
    let output = again("open", root.path())
        .env("GEMMULE_NVRTC", &nowhere)
        .output()
        .unwrap();
    let told = said(&output)
        .join("\n")
        .replace(&root.path().display().to_string(), "ROOT");
    insta::assert_snapshot!(told, @r"
    GEMMULE_NVRTC is set to ROOT/nowhere, which cannot be used:
      GEMMULE_NVRTC, ROOT/nowhere: not there
    Set it to the file libnvrtc.so.13, to the folder or the Python environment that holds it, or unset it to let NVRTC be searched for
    ");
}
