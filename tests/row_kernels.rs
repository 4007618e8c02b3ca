//! What holds for the source of every kernel over rows, without a compiler.

use std::collections::BTreeSet;

use gemmule::{
    codegen::Codegen,
    kernels::{Kernel, elementwise, embedding, layernorm, pack, pooling},
};

fn representative() -> Vec<Box<dyn Kernel>> {
    [
        elementwise::representative(),
        layernorm::representative(),
        embedding::representative(),
        pooling::representative(),
        pack::representative(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[test]
fn every_kernel_renders_to_cuda_without_headers_or_directives() {
    let codegen = Codegen::new().expect("the shipped templates parse");
    for kernel in representative() {
        let source = codegen
            .source(&*kernel)
            .unwrap_or_else(|e| panic!("{}: {e:?}", kernel.symbol()));
        let text = &source.text;
        for left_over in ["{{", "{%", "#include"] {
            assert!(!text.contains(left_over), "{}: {left_over}", source.symbol);
        }
        assert!(text.contains(&format!("{}(", source.symbol)), "{text}");
        for param in kernel.params() {
            let name = param.name;
            let uses = text
                .split(|c: char| !c.is_alphanumeric() && c != '_')
                .filter(|&word| word == name)
                .count();
            assert!(uses >= 2, "{}: `{name}` is not used", source.symbol);
        }
    }
}

#[test]
fn kernels_that_differ_have_different_symbols() {
    let kernels = representative();
    let symbols: BTreeSet<String> = kernels.iter().map(|k| k.symbol()).collect();
    assert_eq!(symbols.len(), kernels.len());
    let words = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    assert!(symbols.iter().all(|s| s.chars().all(words)), "{symbols:?}");
}
