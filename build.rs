//! Tells Cargo to watch the folders that `include_dir!` embeds, because otherwise new files would
//! be missing from the binary. Also embeds a digest of the kernel sources, which identifies the
//! kernels that a timing belongs to.

use std::{
    fs,
    path::{Path, PathBuf},
};

const EMBEDDED: [&str; 2] = ["templates", "machines"];
/// Folders that determine the kernels' sources.
const KERNELS: [&str; 2] = ["templates", "src/kernels"];

fn main() {
    for folder in EMBEDDED.iter().chain(&KERNELS) {
        println!("cargo::rerun-if-changed={folder}");
    }
    let mut files = Vec::new();
    for folder in KERNELS {
        collect(Path::new(folder), &mut files);
    }
    files.sort();
    // FNV-1a (Fowler, Noll, Vo): sufficient to distinguish versions, without a dependency.
    let mut digest: u64 = 0xcbf2_9ce4_8422_2325;
    for file in files {
        let text = fs::read(&file).unwrap_or_default();
        for byte in text.into_iter().chain([0]) {
            digest = (digest ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    println!("cargo::rustc-env=GEMMULE_KERNELS={digest:016x}");
}

fn collect(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        match path.is_dir() {
            true => collect(&path, into),
            false => into.push(path),
        }
    }
}
