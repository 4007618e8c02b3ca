//! Tests of weights in PyTorch files, which `scripts/torch_files.py` writes, and of quantized weights.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use crate::common::{Folder, tiny_config};
use gemmule::{
    Batch, DeviceChoice, Engine,
    graph::WeightNames,
    runtime::weights::{Checkpoint, WeightSource},
};

fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

/// Returns a copy of a published folder with PyTorch files instead of safetensors files.
fn with_torch(name: &str, files: &[(&str, &str, &str)]) -> Folder {
    fn into(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).expect("room for a folder");
        for entry in std::fs::read_dir(from).expect("it is there").flatten() {
            let (from, to) = (entry.path(), to.join(entry.file_name()));
            match from.is_dir() {
                true => into(&from, &to),
                false => drop(std::fs::copy(from, to).expect("room for a file")),
            }
        }
    }
    let folder = Folder::new();
    into(&tests().join("checkpoints").join(name), folder.path());
    for (from, to, replaced) in files {
        std::fs::remove_file(folder.file(replaced)).expect("it is there");
        let from = tests().join("torch").join(from);
        std::fs::copy(from, folder.file(to)).expect("room for a file");
    }
    folder
}

/// Returns all values of an output for three sequences.
fn values(folder: &Path, output: &str) -> Vec<f32> {
    let engine = Engine::from_checkpoint(folder)
        .device(DeviceChoice::Cpu)
        .outputs([output])
        .build()
        .unwrap_or_else(|error| panic!("{error}"));
    let batch = Batch::from_sequences(&[vec![2, 5, 3], vec![2, 7, 9, 11, 3], vec![3]]);
    let mut session = engine.session().expect("a session");
    let outputs = session.run(&batch.expect("a batch")).expect("a run");
    outputs.get(output).expect("it is computed").values.clone()
}

#[test]
fn a_folder_with_pytorch_model_bin_computes_the_same_bits() {
    let torch = with_torch(
        "st-electra",
        &[("st-electra.bin", "pytorch_model.bin", "model.safetensors")],
    );
    let published = tests().join("checkpoints/st-electra");
    let output = "sentence_embedding";
    assert_eq!(values(torch.path(), output), values(&published, output));
}

#[test]
fn an_index_of_shards_and_files_of_heads_are_read() {
    let torch = with_torch(
        "st-electra",
        &[(
            "st-electra.bin",
            "pytorch_model-00001-of-00001.bin",
            "model.safetensors",
        )],
    );
    let published = tests().join("checkpoints/st-electra");
    let bytes = std::fs::read(published.join("model.safetensors")).expect("it is there");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("it is valid");
    let map: serde_json::Map<String, serde_json::Value> = tensors
        .names()
        .into_iter()
        .map(|name| (name.to_owned(), "pytorch_model-00001-of-00001.bin".into()))
        .collect();
    let index = serde_json::json!({"metadata": {}, "weight_map": map}).to_string();
    torch.write("pytorch_model.bin.index.json", index);
    let output = "sentence_embedding";
    assert_eq!(values(torch.path(), output), values(&published, output));

    let heads = ["sparse_linear", "colbert_linear"];
    let names = heads.map(|head| (format!("{head}.pt"), format!("{head}.safetensors")));
    let files = names
        .each_ref()
        .map(|(torch, plain)| (torch.as_str(), torch.as_str(), plain.as_str()));
    let torch = with_torch("st-m3", &files);
    let published = tests().join("checkpoints/st-m3");
    for output in ["sparse", "colbert"] {
        assert_eq!(values(torch.path(), output), values(&published, output));
    }
}

/// Opens a file of tests/torch as the weights of a folder.
fn opened(file: &str) -> Result<Checkpoint, String> {
    let folder = Folder::new();
    folder.write("config.json", tiny_config().to_string());
    let from = tests().join("torch").join(file);
    std::fs::copy(from, folder.file("pytorch_model.bin")).expect("room for a file");
    let opened = Checkpoint::open(folder.path(), folder.path(), WeightNames::default());
    opened.map_err(|error| folder.text(&gemmule::EngineError::from(error)))
}

#[test]
fn every_way_in_which_torch_stores_a_tensor_is_read() {
    let checkpoint = opened("kinds.bin").expect("it is valid");
    let all: Vec<f32> = (0..12u8).map(|n| f32::from(n) / 8.0).collect();
    let read = |name: &str, dims: &[u64]| checkpoint.read(name, dims).map_err(|e| e.to_string());
    let cases: [(&str, &[u64], &[f32]); 8] = [
        ("table", &[3, 4], &all),
        ("tied", &[3, 4], &all),
        ("rows", &[2, 4], &all[4..]),
        ("parameter", &[6], &all[..6]),
        ("half", &[12], &all),
        ("brain", &[12], &all),
        ("scalar", &[], &[2.5]),
        ("empty", &[0, 4], &[]),
    ];
    for (name, dims, values) in cases {
        assert_eq!(read(name, dims).as_deref(), Ok(values), "{name}");
    }
    let transposed = opened("transposed.bin").expect("it is valid");
    let columns: Vec<f32> = (0..4)
        .flat_map(|row| (0..3).map(move |column| (row, column)))
        .map(|(row, column)| all[column * 4 + row])
        .collect();
    assert_eq!(
        transposed.read("w", &[4, 3]).map_err(|e| e.to_string()),
        Ok(columns)
    );
    for (name, dims, stored) in [
        ("double", [12], "F64"),
        ("ids", [3], "I64"),
        ("flags", [2], "BOOL"),
    ] {
        let error = read(name, &dims).expect_err("it is refused");
        let expected =
            format!("the tensor `{name}` is stored as {stored}, expected F32, F16 or BF16");
        assert!(error.contains(&expected), "{error}");
    }
}

#[test]
fn a_file_that_is_no_state_dict_is_refused_and_nothing_is_executed() {
    let refused = |file: &str| opened(file).err().expect("it is refused");
    insta::assert_snapshot!(refused("command.bin"), @"`[dir]/pytorch_model.bin` cannot be read as weights of PyTorch: the pickle names `posix.system`, which a dictionary of tensors does not need; it is not loaded");
    insta::assert_snapshot!(refused("legacy.bin"), @"`[dir]/pytorch_model.bin` cannot be read as weights of PyTorch: it is a pickle without a zip archive, the format of PyTorch before 1.6, which is not read; save it again with torch 1.6 or later: torch.save(torch.load(FILE, weights_only=True), FILE), or convert it to safetensors");
    insta::assert_snapshot!(refused("with-step.bin"), @"`[dir]/pytorch_model.bin` cannot be read as weights of PyTorch: `step` is no tensor; expected the state dict of a model: torch.save(model.state_dict(), FILE)");
}

/// Checks that each file, truncated at every length and with each byte changed, is read or refused without a panic.
#[test]
fn damaged_files_are_read_or_refused() {
    let folder = Folder::new();
    let mut n_refused = 0;
    let mut count =
        |file: &File| n_refused += usize::from(gemmule_weights::torch::open(file).is_err());
    for name in ["kinds.bin", "sparse_linear.pt"] {
        let bytes = std::fs::read(tests().join("torch").join(name)).expect("it is there");
        // Change one file in place, because creating a new file for each change is slow.
        let mut file = File::create_new(folder.file(name)).expect("room for a file");
        file.write_all(&bytes).expect("room for a file");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(folder.file(name))
            .expect("it is there");
        for (at, byte) in (0..).zip(&bytes) {
            file.write_all_at(&[byte ^ 1 << (at % 8)], at)
                .expect("room for a byte");
            count(&file);
            file.write_all_at(&[*byte], at).expect("room for a byte");
        }
        for n_bytes in (0..bytes.len() as u64).rev() {
            file.set_len(n_bytes).expect("a shorter file");
            count(&file);
        }
    }
    assert!(n_refused > 6_000, "{n_refused}");
}
