//! Embeds sentences with a published checkpoint and compares them.
//!
//!     cargo run --release --example embed_sentences -- CHECKPOINT_DIR "a sentence" "another one"

use gemmule::{Engine, engine::TextEncoder};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let checkpoint = args
        .next()
        .ok_or("usage: embed_sentences CHECKPOINT_DIR SENTENCE…")?;
    let sentences: Vec<String> = args.collect();

    let engine = Engine::builder("bert")
        .checkpoint(&checkpoint)
        .outputs(["sentence_embedding"])
        .build()?;
    let batch = TextEncoder::open(checkpoint.as_ref())?.encode(&sentences)?;
    println!(
        "{}: {} bytes of intermediates",
        engine.device(),
        engine.bytes_needed(&batch)?
    );

    let outputs = engine.session()?.run(&batch)?;
    let embeddings = outputs.get("sentence_embedding")?;
    let width = embeddings.shape[1] as usize;
    let vectors: Vec<&[f32]> = embeddings.values.chunks(width).collect();
    for (sentence, vector) in sentences.iter().zip(&vectors) {
        let similarity: f32 = vector.iter().zip(vectors[0]).map(|(a, b)| a * b).sum();
        println!("{similarity:6.3}  {sentence}");
    }
    Ok(())
}
