//! Which kernel serves which batches: one table for each described card and shipped model, so that a change of the
//! selection is a diff that can be read.

use std::{collections::BTreeMap, fmt::Write as _};

use gemmule::{
    DType,
    engine::{CompileOptions, compile, description, shipped_configs},
    kernels::Instructions,
    program::{Limit, Program},
};

/// Steps of one value in all layers, with what each range of batches launches.
fn table(program: &Program) -> String {
    let mut text = String::new();
    // In the order of the first launch; equal layers are one line each.
    let mut order: Vec<(String, String)> = Vec::new();
    let mut counts: BTreeMap<(String, String), usize> = BTreeMap::new();
    for step in &program.steps {
        let name: String = step.name.split(|c: char| c.is_ascii_digit()).filter(|p| !p.is_empty()).collect::<Vec<_>>().join("*");
        let mut line = String::new();
        if let Some(range) = step.when {
            let _ = write!(line, "  [{range}]");
        }
        for variant in &step.variants {
            let symbol = program.kernels[variant.kernel].as_kernel().symbol();
            let _ = match variant.limit {
                Some(Limit::Rows(most)) => write!(line, "\n    rows {most:>8}  {symbol}"),
                Some(Limit::Longest(most)) => write!(line, "\n    longest {most:>5}  {symbol}"),
                None => write!(line, "\n    the rest       {symbol}"),
            };
        }
        let key = (name, line);
        let count = counts.entry(key.clone()).or_default();
        if *count == 0 {
            order.push(key);
        }
        *count += 1;
    }
    for key in order {
        let _ = writeln!(text, "{} x{}{}", key.0, counts[&key], key.1);
    }
    text
}

#[test]
fn tables() {
    let Ok(folder) = std::env::var("DISPATCH_OUT") else { return };
    for (model, name, config) in shipped_configs().unwrap() {
        let description = description(name).unwrap();
        for dtype in [DType::F16, DType::F32, DType::BF16] {
            for instructions in [Instructions::Hopper, Instructions::Ampere] {
                let options = CompileOptions { instructions, ..CompileOptions::new(dtype) };
                let compiled = compile(&description, &config, &options).unwrap();
                std::fs::write(format!("{folder}/{model}.{dtype}.{instructions:?}.txt"), table(&compiled.program)).unwrap();
            }
        }
    }
}
