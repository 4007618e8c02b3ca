//! Reads arbitrary bytes as a file of kernel timings. The result must be an error, or valid timings that are unchanged after writing and
//! reading them again.
//!
//! Nearly all inputs have a wrong checksum. The target therefore also converts the bytes to timings directly, and checks that a model
//! compiled with these timings has a kernel for every batch.

use std::sync::LazyLock;

use gemmule::{
    DType,
    engine::{CompileOptions, Compiled, compile, parse_timings, timings_to_ron},
    machine::Machine,
    model::Description,
    select::Timings,
};
use serde_json::json;

static COMPILED: LazyLock<Compiled> = LazyLock::new(|| {
    let config = json!({
        "vocab_size": 11, "max_position_embeddings": 8, "type_vocab_size": 2, "hidden_size": 768,
        "num_hidden_layers": 1, "num_attention_heads": 12, "intermediate_size": 3072,
        "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    });
    let description = Description::shipped("bert").and_then(Result::ok);
    let description = description.expect("shipped descriptions are right");
    let machine = Machine::of_capability((9, 0)).expect("cards are described");
    let options = CompileOptions::new(DType::F16, machine.expect("one of them is such a card"));
    compile(&description, &config, &options).expect("it compiles")
});

pub fn run(bytes: &[u8]) {
    match parse_timings(bytes) {
        Ok((timings, on)) => {
            let text = timings_to_ron(&timings, &on).expect("sound timings can be written");
            assert!(parse_timings(text.as_bytes()).is_ok_and(|read| read == (timings, on)));
        }
        Err(error) => assert!(error.to_string().len() < 4096),
    }
    // Every three bytes define one timing: a number of rows and a time in microseconds. The timings are assigned to the model's kernels in
    // turn.
    let mut timings = Timings::default();
    let kernels = &COMPILED.program.kernels;
    for (at, piece) in bytes.chunks_exact(3).take(64).enumerate() {
        let rows = 1 + u64::from(u16::from_le_bytes([piece[0], piece[1]]));
        let us = 1e-3 * 1.2f64.powi(i32::from(piece[2]) / 2);
        timings.add(&kernels[at % kernels.len()].as_kernel().symbol(), rows, us);
    }
    let program = COMPILED.program_with(&timings).expect("it lowers");
    program.validate().expect("every batch has a kernel");
}
