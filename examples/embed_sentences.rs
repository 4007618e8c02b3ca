//! Embeds sentences with a published checkpoint, and prints the cosine similarity of each sentence to the first sentence.
//!
//!     cargo run --release --example embed_sentences -- CHECKPOINT_DIR "a sentence" "another one"

use gemmule::Engine;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let checkpoint = args
        .next()
        .ok_or("usage: embed_sentences CHECKPOINT_DIR SENTENCE…")?;
    let sentences: Vec<String> = args.collect();

    let engine = Engine::from_checkpoint(checkpoint)
        .outputs(["sentence_embedding"])
        .build()?;
    let vectors = engine.embed(&sentences)?;
    for (sentence, vector) in sentences.iter().zip(&vectors) {
        // The checkpoint normalizes its vectors to length 1, so their dot product is the cosine similarity.
        let cosine: f32 = vector.iter().zip(&vectors[0]).map(|(a, b)| a * b).sum();
        println!("{cosine:6.3}  {sentence}");
    }
    Ok(())
}
