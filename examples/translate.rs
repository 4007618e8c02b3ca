//! Translates lines with four beams, all of a batch at once.
//!
//!     cargo run --release --example translate -- CHECKPOINT_DIR < TEXTS

use std::{io, ops::ControlFlow};

use gemmule::{
    Engine,
    engine::{Folder, TextEncoder, generation_config},
    search::Beams,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args()
        .nth(1)
        .ok_or("usage: translate CHECKPOINT_DIR < TEXTS")?;
    let engine = Engine::from_checkpoint(&folder).generating().build()?;
    let encoder = TextEncoder::for_prompts(Folder::open(folder.as_ref())?)?;
    // config.json says what stands before the first new token, and what ends a translation.
    let mut options = generation_config(folder.as_ref())?;
    options.sampling = None;
    options.beams = Some(Beams::of(4));
    options.rules.max_new_tokens = 60;
    let lines: Vec<String> = io::stdin().lines().collect::<Result<_, _>>()?;
    let sources = encoder.prompts(&lines)?;
    let translations = engine.generate(&sources, &options, |_, _| ControlFlow::Continue(()))?;
    for translation in translations {
        println!("{}", encoder.decode(&translation.tokens)?);
    }
    Ok(())
}
