//! Lists the files that are embedded in the binary. Also embeds a digest of the kernel sources, which
//! identifies the kernels that a timing belongs to.

use std::{
    env,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

const EMBEDDED: [&str; 2] = ["templates", "machines"];
/// Folders that determine the kernels' sources.
const KERNELS: [&str; 3] = ["templates", "src/kernels", "src/ops"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for folder in EMBEDDED.iter().chain(&KERNELS) {
        println!("cargo::rerun-if-changed={folder}");
    }
    let out = PathBuf::from(env::var("OUT_DIR")?);
    for folder in EMBEDDED {
        fs::write(
            out.join(folder).with_extension("rs"),
            list(Path::new(folder))?,
        )?;
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
    Ok(())
}

/// Returns a Rust expression: a slice of pairs with the name and the text of each file in a folder, sorted by name.
fn list(folder: &Path) -> Result<String, Box<dyn std::error::Error>> {
    let root = env::current_dir()?;
    let mut files = Vec::new();
    collect(folder, &mut files);
    files.sort();
    let mut list = "&[\n".to_owned();
    for file in files {
        let inside = file.strip_prefix(folder)?.iter();
        let name: Vec<_> = inside.map(|part| part.to_string_lossy()).collect();
        let path = root.join(&file);
        writeln!(list, "    ({:?}, include_str!({path:?})),", name.join("/"))?;
    }
    list.push_str("]\n");
    Ok(list)
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
