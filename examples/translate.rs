//! Translates a file line by line, with the generation settings in the checkpoint folder.
//!
//!     cargo run --release --example translate -- CHECKPOINT_DIR FILE

use std::{
    fs::File,
    io::{BufRead, BufReader},
    ops::ControlFlow,
};

use gemmule::{
    Engine,
    generate::generation_config,
    text::{Folder, TextEncoder},
};

/// Max number of lines that are read and translated together.
const CHUNK: usize = 256;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(folder), Some(file)) = (args.next(), args.next()) else {
        return Err("usage: translate CHECKPOINT_DIR FILE".into());
    };
    let engine = Engine::from_checkpoint(&folder).generating().build()?;
    let encoder = TextEncoder::for_prompts(Folder::open(folder.as_ref())?)?;
    // The folder's settings determine the beam search, the tokens before the first new token, and the tokens that end a translation.
    let options = generation_config(folder.as_ref())?;
    let mut lines = BufReader::new(File::open(file)?).lines();
    loop {
        let chunk: Vec<String> = lines.by_ref().take(CHUNK).collect::<Result<_, _>>()?;
        if chunk.is_empty() {
            return Ok(());
        }
        let sources = encoder.prompts(&chunk)?;
        let written = engine.generate(&sources, &options, |_, _| ControlFlow::Continue(()))?;
        for (line, translation) in chunk.iter().zip(written) {
            if let Some(problem) = translation.problem {
                eprintln!("`{line}` failed: {problem}");
            }
            println!("{}", encoder.decode(&translation.tokens)?);
        }
    }
}
