//! Admits prompts one after another while other texts are being generated, and prints the result for each prompt.
//!
//!     cargo run --release --example admit -- CHECKPOINT_DIR "a prompt" "another one"

use std::collections::HashMap;

use gemmule::{
    Engine,
    generate::{AdmitError, Event, Request, generation_config},
    text::{Folder, TextEncoder},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().ok_or("usage: admit CHECKPOINT_DIR PROMPT…")?;
    let prompts: Vec<String> = args.collect();

    let engine = Engine::from_checkpoint(&folder).generating().build()?;
    let encoder = TextEncoder::for_prompts(Folder::open(folder.as_ref())?)?;
    let options = generation_config(folder.as_ref())?;
    let ids = encoder.prompts(&prompts)?;

    // Make room for two prompts of the maximum length. Other prompts wait until a text ends.
    let longest = ids.iter().map(Vec::len).max().unwrap_or(1);
    let room = engine.cache_bytes_needed(&[longest, longest], &options)?;
    let mut generator = engine.generator(room)?;
    let mut waiting = ids.into_iter().enumerate().peekable();
    let mut written = HashMap::new();
    while waiting.peek().is_some() || generator.is_busy() {
        while let Some((index, prompt)) = waiting.peek().cloned() {
            let options = options.clone();
            match generator.admit(Request { prompt, options }) {
                Ok(ticket) => written.insert(ticket, (index, Vec::new())),
                Err(AdmitError::Full { .. }) => break,
                Err(problem) => return Err(problem.into()),
            };
            waiting.next();
        }
        for event in generator.poll()? {
            let Some((index, tokens)) = written.get_mut(&event.ticket()) else {
                continue;
            };
            match event {
                Event::Token { id, .. } => tokens.push(id),
                Event::Found { .. } => {}
                Event::Done { reason, .. } => {
                    let text = encoder.decode(tokens)?;
                    println!("{}{text}\n({reason:?})\n", prompts[*index]);
                }
                Event::Failed { problem, .. } => println!("{}: {problem}\n", prompts[*index]),
            }
        }
    }
    println!("{} steps", generator.steps());
    Ok(())
}
