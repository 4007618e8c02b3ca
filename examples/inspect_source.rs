//! Compiles a shipped description and shows each stage: the report of the passes, the launches, and the CUDA source of one kernel. Needs
//! neither a GPU nor a checkpoint.

use gemmule::{
    DType,
    engine::{CompileOptions, compile, description, emit},
    machine::Machine,
    measure::shipped_configs,
    tensor::Extents,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (name, model, config) = shipped_configs()?.remove(0);
    let compiled = compile(
        &description(model)?,
        &config,
        &CompileOptions::new(DType::F16, Machine::usual()?),
    )?;
    println!(
        "{name}: {} launches as described, {} after fusion, {} kernels",
        compiled.model.graph.n_launches(),
        compiled.graph.n_launches(),
        compiled.program.kernels.len()
    );
    println!(
        "{}",
        compiled
            .report
            .explain(Extents::of(&[128, 40])?, DType::F16)
    );

    let sources = emit(&compiled.program.kernels)?;
    let shown = sources
        .iter()
        .find(|s| s.symbol.contains("layernorm"))
        .ok_or("no LayerNorm")?;
    println!("{}", shown.text);
    Ok(())
}
