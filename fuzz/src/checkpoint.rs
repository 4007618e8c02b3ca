//! Reads any bytes as a checkpoint. Either it opens and its tensors can be read, or an error states the reason.
//!
//! The first byte selects the form of the other bytes: a whole safetensors file; the header of such a file, to which a valid length and
//! data are added; a whole file of PyTorch; a `quantization_config` and, after a line break, the header of a safetensors file; or an index
//! next to a valid shard.
//! The files are written to the folder for temporary files. Set `TMPDIR` to a file system in memory.

use std::{fs, path::PathBuf, sync::LazyLock};

use gemmule::{
    graph::WeightNames,
    measure::Reference,
    runtime::weights::{Checkpoint, CheckpointError, WeightSource},
};

/// Size in bytes of the data after a header that the fuzzer wrote.
const DATA: usize = 64;
/// Size in bytes of the data after a header of quantized tensors.
const QUANTIZED_DATA: usize = 256;

/// `single/model.safetensors`, and `sharded/` with an index and `a.safetensors`.
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

/// Writes a config.json that contains only the given `quantization_config`, and returns the header after it.
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
        // The error contains the actual shape. With this shape the tensor can be read, unless its type is not supported for weights.
        let Err(CheckpointError::Shape { found, .. }) = checkpoint.read(&name, &[u64::MAX]) else {
            continue;
        };
        if let Ok(values) = checkpoint.read(&name, &found) {
            assert_eq!(values.len() as u64, found.iter().product::<u64>());
        }
    }
}
