//! Tests with the files of `scripts/gguf_files.py`, and with damaged copies of them.

mod folder;
mod hostile;
mod tokenizer;

use std::path::PathBuf;

use super::{Array, Format, Gguf, GgufError, Value, format};

/// Returns the path of a file that `scripts/gguf_files.py` wrote.
pub(super) fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/gguf")
        .join(name)
}

pub(super) fn opened(name: &str) -> Gguf {
    Gguf::open(fixture(name)).expect("a valid file")
}

#[test]
fn dequantizes_as_the_python_package() {
    let gguf = opened("quants.gguf");
    for format in format::all().filter(|&format| format != Format::F32) {
        let read = |name: &str| {
            let tensor = gguf.tensor(name).expect("a tensor");
            (tensor, gguf.read(tensor).expect("values"))
        };
        let (tensor, found) = read(&format.to_string());
        let (_, expected) = read(&format!("{format}.f32"));
        assert_eq!(tensor.format, format);
        assert_eq!(found.len(), expected.len());
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found.to_bits(), expected.to_bits(), "{format}, element {i}");
        }
    }
}

#[test]
fn reads_values_of_all_types() {
    let gguf = opened("values.gguf");
    let expected = [
        ("u8", Value::U8(200)),
        ("i8", Value::I8(-100)),
        ("u16", Value::U16(60_000)),
        ("i16", Value::I16(-30_000)),
        ("u32", Value::U32(4_000_000_000)),
        ("i32", Value::I32(-2_000_000_000)),
        ("u64", Value::U64(1 << 63)),
        ("i64", Value::I64(-(1 << 62))),
        ("f32", Value::F32(0.1)),
        ("f64", Value::F64(0.1)),
        ("yes", Value::Bool(true)),
        ("no", Value::Bool(false)),
        ("text", Value::String("naïve ▁".to_owned())),
        ("numbers", Value::Array(Array::I32(vec![1, -2, 3]))),
        ("reals", Value::Array(Array::F32(vec![0.5, -0.25]))),
        (
            "texts",
            Value::Array(Array::String(["a", "", "ß"].map(str::to_owned).to_vec())),
        ),
        (
            "nested",
            Value::Array(Array::Array(vec![
                Array::I32(vec![1, 2]),
                Array::I32(vec![3]),
            ])),
        ),
        ("general.alignment", Value::U32(64)),
        ("general.architecture", Value::String("test".to_owned())),
    ];
    for (key, value) in &expected {
        assert_eq!(gguf.metadata().get(*key), Some(value), "{key}");
    }
    assert_eq!(gguf.metadata().len(), expected.len());
}

#[test]
fn reads_tensors_in_row_major_order() {
    let gguf = opened("values.gguf");
    let dims: Vec<_> = gguf
        .tensors()
        .iter()
        .map(|tensor| tensor.dims.clone())
        .collect();
    assert_eq!(dims, [vec![2, 3], vec![2, 3, 4], vec![5]]);
    let cube = gguf.tensor("cube").expect("a tensor");
    let expected: Vec<f32> = (0..24u8).map(f32::from).collect();
    assert_eq!(gguf.read(cube).expect("values"), expected);
    let raw = gguf.read_raw(cube).expect("bytes");
    let halves = raw
        .as_chunks()
        .0
        .iter()
        .map(|&bytes| half::f16::from_le_bytes(bytes).to_f32());
    assert_eq!(halves.collect::<Vec<_>>(), expected);
    assert!(gguf.tensor("absent").is_none());
}

#[test]
fn opens_all_files_of_a_split_model() {
    for i in 1..=3 {
        let gguf = opened(&format!("split-0000{i}-of-00003.gguf"));
        assert!(gguf.metadata().contains_key("text"));
        for n in 0..3u8 {
            let tensor = gguf.tensor(&format!("t{n}")).expect("a tensor");
            assert_eq!(gguf.read(tensor).expect("values"), [f32::from(n); 4]);
        }
    }
}

#[test]
fn refuses_incomplete_split_models() {
    let folder = tempfile::tempdir().expect("a folder");
    let copy = |from: &str, to: &str| {
        std::fs::copy(fixture(from), folder.path().join(to)).expect("a copy");
        Gguf::open(folder.path().join(to))
            .map(drop)
            .map_err(|error| error.to_string())
    };
    let first = "split-00001-of-00003.gguf";
    let error = copy(first, "model.gguf").expect_err("no name of a part");
    assert!(
        error.contains("file 1 of the 3 files") && error.contains("-00001-of-00003.gguf"),
        "{error}"
    );
    let error = copy(first, first).expect_err("no second file");
    assert!(error.contains("split-00002-of-00003.gguf"), "{error}");
    for i in 2..=3 {
        let to = format!("split-0000{i}-of-00003.gguf");
        let error = copy(first, &to).expect_err("a wrong file");
        assert!(error.contains("expected a name that ends"), "{error}");
    }
    let error = Gguf::open(folder.path().join(first)).expect_err("the first file three times");
    assert!(
        error
            .to_string()
            .contains("it is file 1 of 3; expected file 2 of 3"),
        "{error}"
    );
}

/// Returns the error of opening a file with these contents.
pub(super) fn error_of(bytes: &[u8]) -> String {
    open_bytes(bytes)
        .map(drop)
        .expect_err("a damaged file")
        .to_string()
}

pub(super) fn open_bytes(bytes: &[u8]) -> Result<Gguf, GgufError> {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), bytes).expect("room");
    Gguf::open(file.path())
}
