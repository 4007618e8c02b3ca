//! Reads arbitrary bytes as a checkpoint. Either the checkpoint opens and its tensors can be read, or an error states the reason.
//!
//! The first byte selects the meaning of the other bytes:
//! - `0`: a whole safetensors file.
//! - `1`: the header of a safetensors file. The target adds a valid length and data.
//! - `2`: a whole PyTorch file.
//! - `3`: a `quantization_config` and, after a line break, the header of a safetensors file.
//! - Any other byte: an index of shards, next to a valid shard.
//!
//! The target writes files to the system's folder for temporary files. Set `TMPDIR` to a file system in memory.

use std::{fs, path::PathBuf, sync::LazyLock};

use gemmule::{
    graph::WeightNames,
    measure::Reference,
    runtime::weights::{Checkpoint, CheckpointError, WeightSource},
};

/// Size in bytes of the tensor data that the target adds after a header of kind `1`.
const DATA: usize = 64;
/// Size in bytes of the tensor data that the target adds after a header of kind `3`.
const QUANTIZED_DATA: usize = 256;

/// A temporary folder with a subfolder for each form of checkpoint. `sharded/` contains a valid shard, `a.safetensors`.
static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("gemmule-fuzz-{}", std::process::id()));
    fs::create_dir_all(folder.join("single")).expect("the folder can be made");
    fs::create_dir_all(folder.join("sharded")).expect("the folder can be made");
    fs::create_dir_all(folder.join("torch")).expect("the folder can be made");
    fs::create_dir_all(folder.join("quantized")).expect("the folder can be made");
    let header = br#"{"w":{"dtype":"F32","shape":[2,4],"data_offsets":[0,32]},"b":{"dtype":"BF16","shape":[16],"data_offsets":[32,64]}}"#;
    let shard = with_header(header, DATA);
    fs::write(folder.join("sharded/a.safetensors"), shard).expect("room for a shard");
    folder
});

fn with_header(header: &[u8], n_data: usize) -> Vec<u8> {
    let length = (header.len() as u64).to_le_bytes();
    [&length, header, &vec![0x3f; n_data]].concat()
}

/// Writes the first line of `bytes` to config.json as its `quantization_config`, and returns the bytes after this line: the header of a
/// safetensors file.
fn configured(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().position(|&byte| byte == b'\n');
    let (config, header) = bytes.split_at(end.unwrap_or(bytes.len()));
    let config = [br#"{"quantization_config":"#, config, b"}"].concat();
    fs::write(FOLDER.join("quantized/config.json"), config).expect("room for a configuration");
    header.get(1..).unwrap_or_default()
}

pub fn run(bytes: &[u8]) {
    let Some((&kind, rest)) = bytes.split_first() else {
        return;
    };
    let single = FOLDER.join("single/model.safetensors");
    let (file, content) = match kind {
        b'0' => (single, rest.to_vec()),
        b'1' => (single, with_header(rest, DATA)),
        b'2' => (FOLDER.join("torch/pytorch_model.bin"), rest.to_vec()),
        b'3' => (
            FOLDER.join("quantized/model.safetensors"),
            with_header(configured(rest), QUANTIZED_DATA),
        ),
        _ => (
            FOLDER.join("sharded/model.safetensors.index.json"),
            rest.to_vec(),
        ),
    };
    fs::write(&file, content).expect("room for a checkpoint");
    if kind == b'0' || kind == b'1' {
        let _ = Reference::read(&file);
    }
    let folder = file.parent().expect("a file lies in a folder");
    let names = WeightNames {
        prefixes: vec![String::new(), "bert.".to_owned()],
        ..WeightNames::default()
    };
    let checkpoint = match Checkpoint::open(folder, folder, names) {
        Ok(checkpoint) => checkpoint,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    assert!(checkpoint.check(&[("no such tensor", &[1])]).is_err());
    for name in checkpoint.surplus(&[]) {
        // Get the actual shape from the error of a wrong shape. A tensor whose type is supported can be read with this shape.
        let Err(CheckpointError::Shape { found, .. }) = checkpoint.read(&name, &[u64::MAX]) else {
            continue;
        };
        if let Ok(values) = checkpoint.read(&name, &found) {
            assert_eq!(values.len() as u64, found.iter().product::<u64>());
        }
    }
}
