//! Reads a line, answers it, and prints tokens as they are generated. If the checkpoint has a chat template, the conversation is formatted
//! with the template. Otherwise, the model continues the plain text of the conversation.
//!
//!     cargo run --release --example chat -- CHECKPOINT_DIR

use std::{
    io::{self, BufRead, Write},
    ops::ControlFlow,
};

use gemmule::{
    Engine,
    generate::{Event, Stop, generation_config},
    text::{ChatTemplate, Folder, Message, TextEncoder},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args()
        .nth(1)
        .ok_or("usage: chat CHECKPOINT_DIR")?;
    let engine = Engine::from_checkpoint(&folder).generating().build()?;
    let encoder = TextEncoder::for_prompts(Folder::open(folder.as_ref())?)?;
    let options = generation_config(folder.as_ref())?;
    let template = ChatTemplate::open(folder.as_ref());
    let mut said: Vec<Message> = Vec::new();
    for line in io::stdin().lock().lines() {
        said.push(Message::new("user", line?));
        let prompt = match &template {
            Ok(template) => encoder.prompt_as_written(&template.render(&said)?)?,
            Err(_) => {
                let lines = said.iter().map(|message| message.content.clone() + "\n");
                encoder.prompts(&[lines.collect::<String>()])?.remove(0)
            }
        };
        let (mut tokens, mut shown) = (Vec::new(), 0);
        let written = engine.generate(&[prompt], &options, |_, event| {
            if let Event::Token { id, .. } = event {
                tokens.push(*id);
                // The bytes of an incomplete character decode to U+FFFD, and are printed after a later token completes it.
                let text = encoder.decode(&tokens).unwrap_or_default();
                let whole = text.trim_end_matches('\u{fffd}').len().max(shown);
                print!("{}", text.get(shown..whole).unwrap_or_default());
                shown = whole;
                if io::stdout().flush().is_err() {
                    return ControlFlow::Break(Stop::All);
                }
            }
            ControlFlow::Continue(())
        })?;
        if let Some(problem) = written.into_iter().find_map(|written| written.problem) {
            return Err(problem.into());
        }
        println!();
        said.push(Message::new("assistant", encoder.decode(&tokens)?));
    }
    Ok(())
}
