//! Compares models in GGUF files (llama.cpp's format) with the checkpoint folders from which the files were made.

use std::{collections::HashMap, path::Path};

use crate::common::gguf::{Stored, bert, checkpoint, gemma, writer};
use crate::common::{Folder, options};
use gemmule::{
    Batch, DType, DeviceChoice, Engine, EngineError, Outputs,
    engine::{Builder, compile},
    graph::{WeightExpr, WeightNames},
    model::Description,
    program::{Program, Storage},
    runtime::weights::{Checkpoint, ModelFiles, WeightSource, evaluate, evaluate_quantized},
    tensor::{Element, Format, Group, Scaled, Values},
    text::TextEncoder,
};
use gemmule_weights::gguf::{Gguf, folder};
use safetensors::{Dtype, tensor::TensorView};

const TEXTS: [&str; 4] = [
    "The train to the coast leaves.",
    "Who found the letter?",
    "Café by the SEA: 1824?",
    "",
];

fn builder(path: &Path) -> Builder {
    Engine::from_checkpoint(path).device(DeviceChoice::Cpu)
}

#[track_caller]
fn engine(path: &Path) -> Engine {
    builder(path).build().unwrap_or_else(|e| panic!("{e}"))
}

#[track_caller]
fn run(engine: &Engine, sequences: &[Vec<u32>]) -> Outputs {
    let batch = Batch::from_sequences(sequences).expect("a batch");
    let mut session = engine.session().expect("a session");
    session.run(&batch).expect("a run")
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn an_embedder_has_the_tokens_and_vectors_of_its_folder() {
    let published = checkpoint("st-mean");
    let expected = engine(&published).embed(&TEXTS).expect("vectors");
    let tokens = |path: &Path| {
        let encoder = TextEncoder::open(path).expect("a tokenizer");
        let texts = TEXTS
            .iter()
            .map(|text| encoder.prompts(&[*text]).expect("tokens"));
        texts.collect::<Vec<_>>()
    };
    let folder = Folder::new();
    for stored in [Stored::F32, Stored::F16, Stored::Q8] {
        let file = folder.write("bert.gguf", bert().bytes(stored));
        assert_eq!(tokens(&file), tokens(&published));
        let found = engine(&file).embed(&TEXTS).expect("vectors");
        match stored {
            Stored::F32 | Stored::F16 => assert_eq!(found, expected, "{stored:?}"),
            Stored::Q8 | Stored::Q4 => {
                assert_ne!(found, expected);
                for (found, expected) in found.iter().zip(&expected) {
                    assert!(cosine(found, expected) > 0.9995);
                }
            }
        }
    }
    // The path of a folder also works if the GGUF file is its only file.
    let found = engine(folder.path()).embed(&TEXTS).expect("vectors");
    assert_eq!(
        found,
        engine(&folder.file("bert.gguf"))
            .embed(&TEXTS)
            .expect("vectors")
    );
}

#[test]
fn a_writer_writes_what_its_folder_does() {
    let published = checkpoint("writer");
    let written = |path: &Path| {
        let engine = builder(path).generating().build().expect("an engine");
        engine
            .generate_text("One cold morning Ben")
            .expect("a text")
    };
    let folder = Folder::new();
    for stored in [Stored::F32, Stored::F16] {
        let file = folder.write("writer.gguf", writer().bytes(stored));
        // The folder limits the length of texts, but the GGUF file does not, so its text may be longer.
        let (found, expected) = (written(&file), written(&published));
        assert!(expected.len() > 40, "{expected}");
        assert!(found.starts_with(&expected), "{found}\n{expected}");
    }
    let file = folder.write("writer.gguf", writer().bytes(Stored::Q8));
    let ids = vec![vec![15, 39, 30, 2, 28, 40, 37, 29, 2]];
    let logits = |path: &Path| {
        let outputs = run(&engine(path), &ids);
        outputs
            .get("next_token_logits")
            .expect("logits")
            .values
            .clone()
    };
    let (found, expected) = (logits(&file), logits(&published));
    assert_ne!(found, expected);
    let largest = |values: &mut dyn Iterator<Item = f32>| values.fold(0f32, |a, b| a.max(b.abs()));
    let difference = largest(&mut found.iter().zip(&expected).map(|(a, b)| a - b));
    let scale = largest(&mut expected.iter().copied());
    assert!(difference < 0.02 * scale, "{difference} of {scale}");
}

const INT4_32: Format = Format::Scaled(Scaled {
    values: Values::Int4,
    group: Group::Columns(32),
});

/// Storage formats whose values kernels can read without rounding, each with the corresponding format of kernels.
const KEPT: [(Stored, Format); 2] = [(Stored::Q4, INT4_32), (Stored::Q8, Format::INT8_32)];

/// Returns the storage format of a matrix. The matrices of a model have several formats. Even the query, key and value projections of layer
/// 0 have two formats.
fn mixed(name: &str) -> Stored {
    match name {
        "token_embd.weight" | "blk.0.attn_q.weight" => Stored::Q8,
        "blk.1.attn_output.weight" => Stored::F16,
        name if name.starts_with("blk.0") => Stored::Q4,
        _ => Stored::Q8,
    }
}

#[test]
fn matrices_keep_their_values_in_the_formats_of_kernels() {
    for (stored, expected) in KEPT {
        let folder = Folder::new();
        let file = folder.write("bert.gguf", bert().bytes(stored));
        let opened = Gguf::open(&file).and_then(folder::Folder::new);
        let opened = opened.expect("it is valid");
        let (mut n, mut negative) = (0, 0);
        let files = ModelFiles::open(&file).expect("a file");
        let source = Checkpoint::of(&files, &files, WeightNames::default()).expect("weights");
        for name in opened.names() {
            let weight = opened.weight(name).expect("a name of the file");
            let dims = weight.dims.clone();
            let format = source.published(name, &dims);
            let is_packed = ["Q4_0", "Q8_0"].contains(&weight.format.to_string().as_str());
            assert_eq!(
                format.map(Format::Scaled),
                is_packed.then_some(expected),
                "{name}"
            );
            let Some(format) = format else {
                continue;
            };
            let codes = source.read_codes(name, &dims, format).expect("codes");
            let groups = codes.iter().flat_map(|codes| &codes.groups);
            negative += groups.filter(|(scale, _)| *scale < 0.0).count();
            let expr = WeightExpr::Stored {
                name: name.to_owned(),
                dims,
            };
            let want = evaluate(&expr, &source).expect("it is read");
            let got = evaluate_quantized(&expr, &source, format).expect("it is read");
            assert_eq!(got.values(), want, "{name}");
            n += 1;
        }
        assert!(n > 10, "{n} matrices");
        assert_eq!(negative > 100, stored == Stored::Q4, "{negative} scales");
    }
}

#[test]
fn layers_of_a_file_in_several_formats_keep_their_values() {
    let folder = Folder::new();
    let file = folder.write("bert.gguf", bert().mixed(mixed));
    let files = ModelFiles::open(&file).expect("a file");
    let config = Gguf::open(&file).and_then(folder::Folder::new);
    let config = config.expect("it is valid").config().clone();
    let description = Description::for_config(&config).expect("it is shipped");
    let mut options = options(DType::F16);
    let plain = compile(&description, &config, &options).expect("it compiles");
    let names = plain.model.weight_names;
    let source = Checkpoint::of(&files, &files, names).expect("weights");
    let weights = |program: &Program| {
        let tensors = program.tensors.clone().into_iter();
        let weights = tensors.filter_map(|tensor| match tensor.place {
            Storage::Weight(expr) => Some((tensor.element, expr)),
            _ => None,
        });
        weights.collect::<Vec<_>>()
    };
    for (_, expr) in weights(&plain.program) {
        for (name, dims) in expr.stored() {
            if let Some(format) = source.published(name, dims) {
                let format = Format::Scaled(format);
                options.published.insert(name.to_owned(), format);
            }
        }
    }
    let compiled = compile(&description, &config, &options).expect("it compiles");
    compiled.program.validate().expect("it is sound");
    let mut kept = Vec::new();
    for (element, expr) in weights(&compiled.program) {
        if let Element::Scaled(format) = element {
            let want = evaluate(&expr, &source).expect("it is read");
            let got = evaluate_quantized(&expr, &source, format).expect("it is read");
            assert_eq!(got.values(), want, "{expr:?}");
            let (name, _) = expr.stored()[0];
            kept.push(format!("{name}: {}", Format::Scaled(format)));
        }
    }
    // Other matrices are dequantized: one GEMM multiplies the query, key and value of the first layer, which have different formats, and
    // `ffn_down` has rows of 48 elements, which no format supports.
    assert_eq!(
        kept,
        [
            "encoder.layer.0.attention.output.dense.weight: int4_g32",
            "encoder.layer.0.intermediate.dense.weight: int4_g32",
            "encoder.layer.1.attention.self.query.weight: int8_g32",
            "encoder.layer.1.intermediate.dense.weight: int8_g32",
        ]
    );
    let report = format!("{:?}", compiled.report.entries);
    assert!(report.contains("in another format than"), "{report}");
}

/// In the file, a matrix whose row length is not a multiple of 32 is stored as F32. Only the engine with weights in `int8_g32` rounds
/// such a matrix, so its vectors differ slightly.
#[test]
fn a_file_in_q8_0_has_nearly_the_same_vectors_in_the_format_of_kernels() {
    let folder = Folder::new();
    let file = folder.write("bert.gguf", bert().bytes(Stored::Q8));
    let expected = engine(&file).embed(&TEXTS).expect("vectors");
    let kept = builder(&file).quantize(Format::INT8_32).build();
    let kept = kept.expect("an engine").embed(&TEXTS).expect("vectors");
    assert_ne!(kept, expected);
    for (kept, expected) in kept.iter().zip(&expected) {
        assert!(cosine(kept, expected) > 0.999_95);
    }
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn a_device_keeps_matrices_of_integers() {
    let folder = Folder::new();
    let files = KEPT.map(|(stored, format)| (bert().bytes(stored), format));
    let mixed = (bert().mixed(mixed), INT4_32);
    for (bytes, format) in files.into_iter().chain([mixed]) {
        let file = folder.write("bert.gguf", bytes);
        let expected = engine(&file).embed(&TEXTS).expect("vectors");
        for (dtype, bound) in [(DType::F16, 0.999), (DType::BF16, 0.99)] {
            let cuda = |dequantize| {
                let builder = Engine::from_checkpoint(&file).device(DeviceChoice::Cuda(0));
                let built = builder.dtype(dtype).dequantize(dequantize).build();
                built.expect("an engine")
            };
            let (kept, plain) = (cuda(false), cuda(true));
            assert_eq!(kept.program().weight_format(), Some(format));
            assert_eq!(plain.program().weight_format(), None);
            for engine in [kept, plain] {
                let vectors = engine.embed(&TEXTS).expect("vectors");
                for (found, expected) in vectors.iter().zip(&expected) {
                    assert!(cosine(found, expected) > bound, "{format} {dtype}");
                }
            }
        }
    }
}

#[test]
fn linear_layers_after_the_pooling_are_those_of_the_file() {
    let ids = vec![vec![2, 5, 9, 300, 7, 1], vec![2, 8, 1]];
    let vectors = |path: &Path| {
        let outputs = run(&engine(path), &ids);
        let vectors = outputs.get("sentence_embedding").expect("vectors");
        (vectors.shape.clone(), vectors.values.clone())
    };
    let folder = Folder::new();
    let file = folder.write("gemma.gguf", gemma().bytes(Stored::F32));
    let ((found_shape, found), (shape, expected)) =
        (vectors(&file), vectors(&checkpoint("st-gemma")));
    assert_eq!(found_shape, shape);
    for (found, expected) in found.iter().zip(&expected) {
        // GGUF files of Gemma contain the weights of norms plus 1. Subtracting 1 again rounds the weights, so the vectors differ slightly.
        assert!((found - expected).abs() < 1e-4, "{found}, {expected}");
    }
}

/// Writes the model of `{name}.gguf` as a folder in transformers' layout. The settings are converted from `{name}.gguf`. The tensors are
/// those of `{name}-published.gguf`, which have transformers' names and order of rows.
fn published(name: &str, fixture: &Path) -> Folder {
    let file = |name: String| Gguf::open(fixture.join(name)).expect("a file");
    let tensors = file(format!("{name}-published.gguf"));
    let translated = folder::Folder::new(file(format!("{name}.gguf"))).expect("it is translated");
    let folder = Folder::new();
    folder.write("config.json", translated.config().to_string());
    if let Some(pooling) = translated.pooling_config().expect("a known kind") {
        std::fs::create_dir(folder.file("1_Pooling")).expect("room for a folder");
        folder.write("1_Pooling/config.json", pooling.to_string());
    }
    let tensors: Vec<_> = tensors
        .tensors()
        .iter()
        .map(|tensor| {
            let values = tensors.read(tensor).expect("values");
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            let dims: Vec<usize> = tensor.dims.iter().map(|&d| d as usize).collect();
            (tensor.name.clone(), dims, bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, dims, bytes)| {
        let view = TensorView::new(Dtype::F32, dims.clone(), bytes);
        (name.as_str(), view.expect("the sizes agree"))
    });
    let views: HashMap<&str, TensorView<'_>> = views.collect();
    let file = folder.file("model.safetensors");
    safetensors::serialize_to_file(&views, None, &file).expect("room for a file");
    folder
}

#[test]
fn each_architecture_computes_what_the_folder_of_transformers_does() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/gemmule-weights/tests/gguf");
    for name in [
        "llama",
        "llama-bias",
        "qwen2",
        "qwen3",
        "gpt2",
        "bert",
        "nomic-bert",
        "gemma",
        "gemma3",
        "gemma-embedding",
        "olmo2",
        "phi3",
    ] {
        let folder = published(name, &fixture);
        let ids = vec![vec![3, 1, 4, 1, 5], vec![9, 2]];
        let build = |path: &Path| {
            let built = builder(path).build();
            run(&built.unwrap_or_else(|e| panic!("{name}: {e}")), &ids)
        };
        let found = build(&fixture.join(format!("{name}.gguf")));
        let expected = build(folder.path());
        let output = match name {
            "bert" | "nomic-bert" | "gemma-embedding" => "sentence_embedding",
            _ => "next_token_logits",
        };
        let found = &found.get(output).expect("an output").values;
        assert_eq!(
            found,
            &expected.get(output).expect("an output").values,
            "{name}"
        );
        assert!(found.iter().any(|&x| x != 0.0), "{name}");
    }
}

#[track_caller]
fn error(folder: &Folder, path: &Path) -> String {
    let error: EngineError = builder(path).build().map(drop).expect_err("an error");
    let below = std::iter::successors(Some(&error as &dyn std::error::Error), |e| e.source());
    let texts: Vec<String> = below.map(ToString::to_string).collect();
    let path = folder.path().display().to_string();
    texts.join(": ").replace(&path, "[dir]")
}

#[test]
fn damaged_files_are_errors() {
    let folder = Folder::new();
    let whole = bert().bytes(Stored::F16);
    for n in (0..whole.len()).step_by(3989) {
        let error = error(&folder, &folder.write("cut.gguf", &whole[..n]));
        assert!(error.starts_with("[dir]/cut.gguf: "), "{n}: {error}");
    }
    for at in (0..whole.len()).step_by(3989) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x55;
        // A change that only affects an element of a tensor is not an error. No change may cause a panic.
        drop(builder(&folder.write("changed.gguf", bytes)).build());
    }
}

#[test]
fn what_cannot_be_loaded_is_named() {
    let folder = Folder::new();
    let mut other = crate::common::gguf::Gguf::default();
    other.text("general.architecture", "rwkv7");
    let file = folder.write("other.gguf", other.bytes(Stored::F32));
    insta::assert_snapshot!(error(&folder, &file), @"[dir]/other.gguf: its architecture `rwkv7` is not read; expected one of llama, qwen2, qwen3, gpt2, bert, nomic-bert, gemma, gemma3, gemma-embedding, phi3, olmo2");
    folder.write("second-Q8_0.gguf", "");
    insta::assert_snapshot!(error(&folder, folder.path()), @"`[dir]` has 2 GGUF files: `other.gguf`, `second-Q8_0.gguf`; give the path of one of them");
    insta::assert_snapshot!(error(&folder, &folder.file("missing.gguf")), @"[dir]/missing.gguf: No such file or directory (os error 2)");
}
