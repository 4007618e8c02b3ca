//! `include_dir!` embeds these folders whole, and Cargo knows only the files that were in them when it last
//! built: without this a file that is new would not be in the binary.

const EMBEDDED: [&str; 2] = ["templates", "picks"];

fn main() {
    for folder in EMBEDDED {
        println!("cargo::rerun-if-changed={folder}");
    }
}
