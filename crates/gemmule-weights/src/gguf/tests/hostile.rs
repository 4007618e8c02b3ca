//! Damaged and malicious files.

use super::{error_of, fixture, open_bytes};
use crate::gguf::folder::Folder;

/// Writes the parts of a GGUF header.
#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn start(n_tensors: u64, n_keys: u64) -> Self {
        let mut writer = Self(b"GGUF".to_vec());
        writer.u32(3).u64(n_tensors).u64(n_keys);
        writer
    }

    fn u32(&mut self, n: u32) -> &mut Self {
        self.0.extend(n.to_le_bytes());
        self
    }

    fn u64(&mut self, n: u64) -> &mut Self {
        self.0.extend(n.to_le_bytes());
        self
    }

    fn text(&mut self, text: &str) -> &mut Self {
        self.u64(text.len() as u64);
        self.0.extend(text.as_bytes());
        self
    }

    /// Writes an entry of the tensor list.
    fn tensor(&mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> &mut Self {
        self.text(name).u32(dims.len() as u32);
        for &dim in dims {
            self.u64(dim);
        }
        self.u32(kind).u64(offset)
    }

    /// Pads the header to the alignment, appends `tensors` bytes of tensor data, and returns the error of opening the file.
    fn error(&mut self, tensors: usize) -> String {
        let len = self.0.len().next_multiple_of(32) + tensors;
        self.0.resize(len, 0);
        error_of(&self.0)
    }
}

#[track_caller]
fn assert_says(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "expected {part:?} in: {error}");
    }
}

#[test]
fn no_damaged_file_panics() {
    for name in ["values.gguf", "split-00001-of-00003.gguf"] {
        let bytes = std::fs::read(fixture(name)).expect("a file");
        for len in 0..bytes.len() {
            // The last bytes are padding.
            if let Ok(gguf) = open_bytes(&bytes[..len]) {
                assert!(
                    bytes.len() - len <= 64,
                    "{name}: {len} of {} bytes",
                    bytes.len()
                );
                gguf.tensors()
                    .iter()
                    .for_each(|tensor| _ = gguf.read(tensor).expect("values"));
            }
        }
        for at in 0..bytes.len() {
            for flip in [0x01, 0x80] {
                let mut bytes = bytes.clone();
                bytes[at] ^= flip;
                if let Ok(gguf) = open_bytes(&bytes) {
                    gguf.tensors()
                        .iter()
                        .for_each(|tensor| _ = gguf.read(tensor).expect("values"));
                }
            }
        }
    }
}

#[test]
fn refuses_other_formats_by_name() {
    assert_says(&error_of(b""), &["does not begin with `GGUF`"]);
    assert_says(
        &error_of(b"PK\x03\x04...."),
        &["does not begin with `GGUF`"],
    );
    assert_says(
        &error_of(b"version https://git-lfs.github.com/spec/v1\n"),
        &["git lfs pull"],
    );
    assert_says(&error_of(b"tjgg\x03\0\0\0"), &["before GGUF"]);
    assert_says(
        &error_of(b"GGUF\x01\0\0\0"),
        &["version 1 of GGUF; expected version 2 or 3"],
    );
    assert_says(&error_of(b"GGUF\x04\0\0\0"), &["version 4 of GGUF"]);
    assert_says(
        &error_of(b"GGUF\0\0\0\x03"),
        &["big-endian", "gguf-convert-endian"],
    );
}

#[test]
fn checks_counts_before_allocating() {
    let error = Writer::start(0, u64::MAX).error(0);
    assert_says(
        &error,
        &["it ends within the keys", "left; download it again"],
    );
    let error = Writer::start(u64::MAX / 8, 0).error(0);
    assert_says(&error, &["it ends within the list of tensors"]);
    let error = Writer::start(0, 1).text("k").u32(8).u64(u64::MAX).error(0);
    assert_says(&error, &["it ends within k", "18446744073709551615 bytes"]);
    for kind in 0..13 {
        let error = Writer::start(0, 1)
            .text("list")
            .u32(9)
            .u32(kind)
            .u64(1 << 60)
            .error(0);
        assert_says(&error, &["it ends within list"]);
    }
    let error = Writer::start(0, 1).u64(5000).error(6000);
    assert_says(
        &error,
        &["the name of key 0", "5000 is above the limit of 1024"],
    );
}

#[test]
fn refuses_wrong_values() {
    let error = Writer::start(0, 1).text("k").u32(13).error(8);
    assert_says(
        &error,
        &["its key `k`", "number 13; expected a number from 0 to 12"],
    );
    let mut nested = Writer::start(0, 1);
    nested.text("k").u32(9);
    for _ in 0..9 {
        nested.u32(9).u64(1);
    }
    assert_says(&nested.error(64), &["its key `k`", "nested deeper than 4"]);
    let mut twice = Writer::start(0, 2);
    twice.text("k").u32(4).u32(1).text("k").u32(4).u32(1);
    assert_says(&twice.error(0), &["its key `k`", "twice"]);
    let mut bool = Writer::start(0, 1);
    bool.text("k").u32(7).0.push(2);
    assert_says(
        &bool.error(0),
        &["its key `k`", "truth value is 2; expected 0 or 1"],
    );
    let mut text = Writer::start(0, 1);
    text.text("k").u32(8).u64(1).0.push(0xff);
    assert_says(&text.error(0), &["a text of `k` is not UTF-8"]);
    for alignment in [0, 3, 1 << 30] {
        let mut writer = Writer::start(0, 1);
        let error = writer
            .text("general.alignment")
            .u32(4)
            .u32(alignment)
            .error(0);
        assert_says(&error, &["`general.alignment`", "expected a power of two"]);
    }
}

#[test]
fn refuses_wrong_tensors() {
    let error_of = |tensors: &[(&str, &[u64], u32, u64)]| {
        let mut writer = Writer::start(tensors.len() as u64, 0);
        for &(name, dims, kind, offset) in tensors {
            writer.tensor(name, dims, kind, offset);
        }
        writer.error(64)
    };
    let error = error_of(&[("t", &[8], 0, 0), ("t", &[8], 0, 32)]);
    assert_says(&error, &["tensor `t`", "twice"]);
    let error = error_of(&[("t", &[8], 0, 0), ("u", &[16], 0, 0)]);
    assert_says(&error, &["overlaps with the tensor `"]);
    let error = error_of(&[("t", &[8], 0, 4)]);
    assert_says(&error, &["its offset is 4; expected a multiple of 32"]);
    let error = error_of(&[("t", &[17], 0, 0)]);
    assert_says(&error, &["68 bytes at offset 0", "64 bytes of tensors"]);
    let error = error_of(&[("t", &[1], 0, u64::MAX - 31)]);
    assert_says(&error, &["tensor `t`", "64 bytes of tensors"]);
    let error = error_of(&[("t", &[1 << 40, 1 << 40], 0, 0)]);
    assert_says(&error, &["exceed 64 bits"]);
    let error = error_of(&[("t", &[1 << 62], 12, 0)]);
    assert_says(&error, &["exceed 64 bits"]);
    let error = error_of(&[("t", &[33], 2, 0)]);
    assert_says(
        &error,
        &["rows have 33 elements; expected a multiple of 32, the block of Q4_0"],
    );
    let error = error_of(&[("t", &[1; 5], 0, 0)]);
    assert_says(&error, &["5 dimensions; expected at most 4"]);
    let error = error_of(&[("t", &[256], 16, 0)]);
    assert_says(
        &error,
        &["type `IQ2_XXS`, which is not read", "Q4_K", "Q8_0"],
    );
    let error = error_of(&[("t", &[256], 99, 0)]);
    assert_says(&error, &["number 99, which is unknown"]);
}

#[test]
fn bounds_the_ways_to_make_up_tokens() {
    let mut writer = Writer::start(1, 12);
    for (key, value) in [
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "llama"),
    ] {
        writer.text(key).u32(8).text(value);
    }
    for key in [
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
    ] {
        writer.text(&format!("llama.{key}")).u32(4).u32(1);
    }
    writer.text("llama.attention.head_count").u32(4).u32(1);
    let eps = "llama.attention.layer_norm_rms_epsilon";
    writer.text(eps).u32(6).u32(1e-5f32.to_bits());
    for key in ["unknown_token_id", "bos_token_id"] {
        writer.text(&format!("tokenizer.ggml.{key}")).u32(4).u32(0);
    }
    // Each token can be formed from two others at any split position.
    writer.text("tokenizer.ggml.tokens").u32(9).u32(8).u64(1024);
    for len in 1..=1024 {
        writer.text(&"a".repeat(len));
    }
    writer.text("tokenizer.ggml.scores").u32(9).u32(6).u64(1024);
    for _ in 0..1024 {
        writer.u32(0);
    }
    writer.tensor("token_embd.weight", &[1, 1024], 1, 0);
    let len = writer.0.len().next_multiple_of(32) + 2048;
    writer.0.resize(len, 0);
    let folder = open_bytes(&writer.0)
        .and_then(Folder::new)
        .expect("a known architecture");
    let error = folder.tokenizer().expect_err("too many ways").to_string();
    assert_says(
        &error,
        &[
            "its tokenizer: its tokens up to number",
            "above the limit of",
        ],
    );
}
