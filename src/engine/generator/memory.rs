//! LightSeq's claim about memory (Wang et al. 2021, section 2.3), by the engine's own numbers: eight Transformer-big for
//! translation, each with a batch of 8, 256 tokens, 4 beams and a vocabulary of 30,000, in the 16 GB of one card.

use std::collections::HashSet;

use serde_json::json;

use super::{Parts, blocks_needed};
use crate::{
    DType,
    engine::{CompileOptions, compile, description},
    graph::WeightExpr,
    machine::testing,
    program::{NEXT_LOGITS, Place, Program},
    runtime::{
        AllocatorChoice, GraphChoice,
        batch::{Batch, Past, Sources},
    },
    search::Beams,
};

const REQUESTS: usize = 8;
const TOKENS: usize = 256;
const BEAMS: usize = 4;
const CARD: u64 = 16_000_000_000;

/// Vaswani et al. 2017, table 3: the big model.
fn transformer_big() -> Program {
    let config = json!({
        "model_type": "marian", "vocab_size": 30_000, "max_position_embeddings": 512, "d_model": 1024,
        "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 16, "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "activation_function": "relu", "scale_embedding": true,
    });
    let options = CompileOptions {
        outputs: Some(vec![NEXT_LOGITS.to_owned()]),
        cached: true,
        ..CompileOptions::new(DType::F16, testing::usual())
    };
    let model = description("marian").expect("it is shipped");
    compile(&model, &config, &options)
        .expect("it compiles")
        .program
}

fn weight_bytes(program: &Program) -> u64 {
    let mut seen: HashSet<&WeightExpr> = HashSet::new();
    let elements = program.tensors.iter().filter_map(|t| match &t.place {
        Place::Weight(expr) if seen.insert(expr) => Some(expr.dims().iter().product::<u64>()),
        _ => None,
    });
    elements.sum::<u64>() * program.dtype.bytes()
}

/// The whole sources, and a step of all beams when all but the last token was written.
fn largest_batches(parts: Parts, blocks: u64) -> [Batch; 2] {
    let (tokens, rows) = (TOKENS as u32, REQUESTS * BEAMS);
    let source = Past {
        cached: vec![0; REQUESTS],
        slots: vec![0; REQUESTS * TOKENS],
        blocks,
        sources: None,
    };
    let step = Past {
        cached: vec![tokens; rows],
        slots: vec![0; rows * (TOKENS + 1)],
        blocks,
        sources: Some(Sources {
            lens: vec![tokens; rows],
            slots: vec![0; rows * TOKENS],
        }),
    };
    let of = |lens: &[u32], past: Past, part| {
        let ids = vec![5; lens.iter().sum::<u32>() as usize];
        let batch = Batch::from_packed(ids, lens).expect("a batch");
        batch.with_past(past).expect("a past").for_part(part)
    };
    [
        of(&[tokens; REQUESTS], source, parts.encode),
        of(&vec![1; rows], step, parts.decode),
    ]
}

/// Bytes of what describes a batch, such as the tables of slots.
fn batch_bytes(program: &Program, batch: &Batch) -> u64 {
    let data = program
        .tensors
        .iter()
        .filter(|t| matches!(t.place, Place::Batch(_)));
    let bytes = data.map(|t| {
        let elements = t.shape.elements().eval(&batch.extents()).expect("it fits");
        elements * t.dtype.bytes()
    });
    bytes.sum()
}

#[test]
fn eight_transformers_translate_in_the_memory_of_one_card() {
    let program = transformer_big();
    let parts = Parts::of(&program).expect("it has a source");
    let beams = Beams::of(BEAMS);
    let blocks =
        REQUESTS as u64 * u64::from(blocks_needed(Some(parts), TOKENS, TOKENS, Some(beams)));
    let cache = blocks * program.block_bytes();
    // One session runs both batches, and keeps chunks of the one for the other.
    let choice = AllocatorChoice::default();
    let mut allocator = choice.allocator(&program).expect("an allocator");
    let batches = largest_batches(parts, blocks);
    let mut planned = 0;
    for batch in batches.iter().chain(&batches) {
        let bucket = GraphChoice::default().planned_for(&program, &choice, batch);
        let usage = program.usage(&bucket).expect("the sizes fit");
        allocator.plan(&usage).expect("a plan");
        planned = planned.max(allocator.held().iter().sum::<u64>());
    }
    // What a loop of steps keeps: the data of its batches.
    let state: u64 = batches.iter().map(|b| batch_bytes(&program, b)).sum();
    let weights = weight_bytes(&program);
    let one = weights + cache + planned + state;
    let said = format!(
        "weights {weights}, cache {cache} in {blocks} blocks, intermediates {planned}, batch data {state}, eight {}",
        8 * one
    );
    insta::assert_snapshot!(said);
    assert!(8 * one < CARD, "{said}");
}
