//! Reads arbitrary bytes as the body of an artifact (a compiled model), with a valid checksum. The result must be an error, or an artifact
//! whose memory plans and launch geometries can be computed for any batch.

use std::sync::LazyLock;

use gemmule::{
    DType,
    engine::{Artifact, CompileOptions, compile},
    machine::Machine,
    model::Description,
    program::Buckets,
    runtime::{AllocatorChoice, Planner},
    tensor::Extents,
};
use serde_json::json;
use sha2::{Digest, Sha256};

const MAGIC: &[u8] = b"GEMMULEJ";
const DIGEST: usize = 32;

static MACHINE: LazyLock<Machine> =
    LazyLock::new(|| Machine::usual().expect("cards are described"));

/// Returns artifact bodies of small models: one for each shipped description that a common config fits, in f32 and in f16.
pub fn seeds() -> Vec<Vec<u8>> {
    let config = json!({
        "vocab_size": 11, "max_position_embeddings": 8, "type_vocab_size": 2, "hidden_size": 8,
        "embedding_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    });
    let mut seeds = Vec::new();
    let folder = tempfile::tempdir().expect("a folder can be made");
    let file = folder.path().join("seed");
    for name in Description::shipped_names() {
        let description = Description::shipped(name).and_then(Result::ok);
        let description = description.expect("shipped descriptions are right");
        for dtype in [DType::F32, DType::F16] {
            let options = CompileOptions::new(dtype, MACHINE.clone());
            let Ok(compiled) = compile(&description, &config, &options) else {
                continue;
            };
            Artifact::of(compiled, Vec::new())
                .write(&file)
                .expect("room for a seed");
            // A seed is the body of an artifact. `run` adds the magic number and the checksum before it.
            let bytes = std::fs::read(&file).expect("it was written");
            Artifact::from_bytes(&bytes).expect("a compiled program is sound");
            seeds.push(bytes[MAGIC.len() + DIGEST..].to_vec());
        }
    }
    seeds
}

pub fn run(body: &[u8]) {
    let bytes = [MAGIC, Sha256::digest(body).as_slice(), body].concat();
    let Ok(artifact) = Artifact::from_bytes(&bytes) else {
        return;
    };
    let program = &artifact.program;
    let _ = artifact.targets();
    let _ = program.to_string();
    let _ = program.weight_bytes();
    for lens in [&[1][..], &[3, 1, 2], &[512; 4]] {
        let extents = Extents::of(lens).expect("a batch");
        let bucket = Buckets::of(program).of_batch(&extents);
        let _ = Planner::footprint(program, &AllocatorChoice::default(), &extents, &bucket);
        for step in &program.steps {
            let Ok(Some((kernel, extents))) = step.launch(&extents) else {
                continue;
            };
            let kernel = program.kernels[kernel].as_kernel();
            let _ = (
                kernel.constants(),
                kernel.launch(&extents, &MACHINE),
                kernel.threads(),
            );
        }
    }
}
