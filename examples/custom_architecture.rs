//! Runs a custom architecture with random weights. Its description is a string in this program. The rest of the program is the same as for
//! shipped descriptions.
//!
//! The model is an encoder whose layers normalize their input (pre-LN). The feed-forward network uses ReLU, positions come from a table,
//! and the outputs are two sentence vectors.
//!
//!     cargo run --release --example custom_architecture

use gemmule::{
    Batch, DType, DeviceChoice, Engine,
    engine::{CompileOptions, compile},
    machine::Machine,
    model::Description,
    runtime::weights::RandomWeights,
    tensor::Extents,
};

const DESCRIPTION: &str = r#"
Model(
    name: "pre_ln_encoder",
    dims: {
        "vocab": Key("n_words"),
        "positions": Key("n_positions"),
        "width": Key("width"),
        "heads": Key("n_heads"),
        "layers": Key("n_layers"),
        "head": "width / heads",
        "inner": "4 * width",
    },
    reals: {"eps": 1e-5},
    graph: [
        Let("words", embedding(ids: "token_ids", rows: "vocab", width: "width", table: "words.weight")),
        Let("places", embedding(ids: "positions", rows: "positions", width: "width", table: "places.weight")),
        Let("x", add(a: "words", b: "places")),
        Repeat(times: "layers", index: "i", name: "layer",
            // Expected launches of each layer after fusion: four GEMMs (one for Q, K and V together) and one attention kernel.
            expect: {"gemms": 4, "attention": 1},
            body: [
                Let("normed", layer_norm(x: "x", eps: "eps",
                    weight: "layers.{i}.norm1.weight", bias: "layers.{i}.norm1.bias")),
                Let("q", linear(x: "normed", out: "width",
                    weight: "layers.{i}.q.weight", bias: "layers.{i}.q.bias")),
                Let("k", linear(x: "normed", out: "width",
                    weight: "layers.{i}.k.weight", bias: "layers.{i}.k.bias")),
                Let("v", linear(x: "normed", out: "width",
                    weight: "layers.{i}.v.weight", bias: "layers.{i}.v.bias")),
                Let("q_heads", split_heads(x: "q", heads: "heads")),
                Let("k_heads", split_heads(x: "k", heads: "heads")),
                Let("v_heads", split_heads(x: "v", heads: "heads")),
                Let("scores", matmul(a: "q_heads", b: "k_heads", transpose_b: true)),
                Let("scaled", scale(x: "scores", by: "1 / sqrt(head)")),
                Let("probabilities", softmax(x: "scaled")),
                Let("context_heads", matmul(a: "probabilities", b: "v_heads")),
                Let("context", merge_heads(x: "context_heads")),
                Let("projected", linear(x: "context", out: "width",
                    weight: "layers.{i}.out.weight", bias: "layers.{i}.out.bias")),
                Let("attended", add(a: "x", b: "projected")),
                Let("normed_again", layer_norm(x: "attended", eps: "eps",
                    weight: "layers.{i}.norm2.weight", bias: "layers.{i}.norm2.bias")),
                Let("inner", linear(x: "normed_again", out: "inner",
                    weight: "layers.{i}.up.weight", bias: "layers.{i}.up.bias")),
                Let("activated", relu(x: "inner")),
                Let("outer", linear(x: "activated", out: "width",
                    weight: "layers.{i}.down.weight", bias: "layers.{i}.down.bias")),
                Let("x", add(a: "attended", b: "outer")),
            ],
        ),
        Let("encoded", layer_norm(x: "x", eps: "eps", weight: "norm.weight", bias: "norm.bias")),
        Let("cls", first_token(x: "encoded")),
        Let("mean", mean_pool(x: "encoded")),
        Let("embedding", l2_normalize(x: "mean", eps: 1e-12)),
    ],
    outputs: {"encoded": "encoded", "cls": "cls", "embedding": "embedding"},
    default: ["cls", "embedding"],
)
"#;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let config = serde_json::json!({
        "n_words": 1000, "n_positions": 64, "width": 64, "n_heads": 4, "n_layers": 2,
    });

    // Compile the description, and show which operators are fused.
    let description = Description::parse("pre_ln_encoder.ron", DESCRIPTION)?;
    let compiled = compile(
        &description,
        &config,
        &CompileOptions::new(DType::F32, Machine::usual()?),
    )?;
    compiled.model.check_expectations(&compiled.graph)?;
    println!(
        "{} launches as described, {} after fusion",
        compiled.model.graph.n_launches(),
        compiled.graph.n_launches()
    );
    let batch = Batch::from_sequences(&[vec![1, 17, 250, 999, 2], vec![1, 42, 2]])?;
    let extents = Extents::of(batch.lens())?;
    println!("{}", compiled.report.explain(extents, DType::F32));

    // Run the model.
    let engine = Engine::from_source("pre_ln_encoder.ron", DESCRIPTION)
        .config_value(config)
        .random_weights(RandomWeights::new(7))
        .device(DeviceChoice::Cpu)
        .build()?;
    for output in engine.session()?.run(&batch)?.iter() {
        let first = &output.values[..4];
        println!("{} {:?}: {first:.3?} …", output.name, output.shape);
    }
    Ok(())
}
