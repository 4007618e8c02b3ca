//! Any text as a file of picks: sound picks that read back as they are written, of which a problem
//! takes none but its own candidates; or an error.

#![no_main]

use std::sync::LazyLock;

use gemmule::{
    DType,
    engine::{CompileOptions, compile},
    model::Description,
    tune::{Picks, Problem},
};
use libfuzzer_sys::fuzz_target;
use serde_json::json;

static PROBLEMS: LazyLock<Vec<Problem>> = LazyLock::new(|| {
    // The sizes that the seeds are for.
    let config = json!({
        "vocab_size": 11, "max_position_embeddings": 8, "type_vocab_size": 2, "hidden_size": 768,
        "num_hidden_layers": 1, "num_attention_heads": 12, "intermediate_size": 3072,
        "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    });
    let description = Description::shipped("bert").and_then(Result::ok);
    let description = description.expect("shipped descriptions are right");
    let compiled = compile(&description, &config, &CompileOptions::new(DType::F16));
    let compiled = compiled.expect("it compiles");
    compiled.problems().expect("it was lowered")
});

fuzz_target!(|bytes: &[u8]| {
    let picks = match Picks::parse(bytes) {
        Ok(picks) => picks,
        Err(error) => {
            assert!(error.to_string().len() < 4096);
            return;
        }
    };
    let text = picks.to_ron().expect("sound picks can be written");
    assert!(Picks::parse(text.as_bytes()) == Ok(picks.clone()));
    for problem in PROBLEMS.iter() {
        let Ok(Some(ranges)) = picks.ranges(problem) else {
            continue;
        };
        assert!(ranges.last().is_some_and(|last| last.up_to.is_none()));
        for range in ranges {
            assert!(problem.candidates().contains(&range.choice));
            assert!(!problem.kernels(range.choice).is_empty());
        }
    }
});
