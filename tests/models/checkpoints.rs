//! Tests of loading checkpoints. Each error is compared with its full text.

use std::{
    io::Write,
    sync::{Arc, Mutex},
};

use crate::common::{
    Folder, Tensors, WEIGHTS, difference, run, tiny_config, tiny_tensors, write_tensors,
};
use gemmule::{DType, DeviceChoice, Engine};
use insta::assert_snapshot;
use serde_json::json;
use tracing::Level;

const QUERY: &str = "encoder.layer.0.attention.self.query.weight";

fn whole() -> Folder {
    Folder::whole(&tiny_tensors(DType::F32))
}

fn changed(change: impl FnOnce(&mut Tensors)) -> Folder {
    let mut tensors = tiny_tensors(DType::F32);
    change(&mut tensors);
    Folder::whole(&tensors)
}

const SHARDS: [&str; 2] = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
];

/// Returns the tensors of the tiny model, divided into two shards.
fn halves() -> [Tensors; 2] {
    let (mut first, mut second) = (tiny_tensors(DType::F32), Tensors::new());
    let names: Vec<String> = first.keys().skip(5).cloned().collect();
    for name in names {
        let tensor = first.remove(&name).expect("it is there");
        second.insert(name, tensor);
    }
    [first, second]
}

/// Returns the text of a model.safetensors.index.json. It assigns each tensor to its shard, and also contains the entries of `more`: a
/// tensor and its shard.
fn index_of(more: &[(&str, &str)]) -> String {
    let mut map = serde_json::Map::new();
    for (tensors, shard) in halves().iter().zip(SHARDS) {
        map.extend(tensors.keys().map(|name| (name.clone(), json!(shard))));
    }
    map.extend(
        more.iter()
            .map(|&(name, shard)| (name.to_owned(), json!(shard))),
    );
    json!({"metadata": {}, "weight_map": map}).to_string()
}

/// Creates a folder with two shards, modified by `change`, and with the index file `index`.
fn sharded_as(index: impl AsRef<[u8]>, change: impl FnOnce(&mut [Tensors; 2])) -> Folder {
    let folder = Folder::new();
    folder.write("config.json", tiny_config().to_string());
    let mut halves = halves();
    change(&mut halves);
    for (tensors, shard) in halves.iter().zip(SHARDS) {
        write_tensors(&folder.file(shard), tensors);
    }
    folder.write("model.safetensors.index.json", index);
    folder
}

fn sharded(index: impl AsRef<[u8]>) -> Folder {
    sharded_as(index, |_| ())
}

fn direct() -> gemmule::Outputs {
    let engine = Engine::builder("bert")
        .config_value(tiny_config())
        .random_weights(WEIGHTS)
        .device(DeviceChoice::Cpu)
        .build();
    run(&engine.expect("it loads"))
}

#[test]
fn a_whole_checkpoint_gives_what_its_weights_give() {
    let outputs = run(&whole().load().expect("it loads"));
    assert_eq!(difference(&outputs, &direct()), 0.0);
}

#[test]
fn half_precision_checkpoints_load() {
    for (dtype, bound) in [(DType::F16, 1e-3), (DType::BF16, 1e-2)] {
        let folder = Folder::whole(&tiny_tensors(dtype));
        let off = difference(&run(&folder.load().expect("it loads")), &direct());
        // The weights are the same except for rounding, so the outputs are similar, but not equal.
        assert!(off > 0.0 && off < bound, "{dtype}: {off}");
    }
}

#[test]
fn names_with_the_prefix_of_the_trunk_load() {
    let prefixed = tiny_tensors(DType::F32)
        .into_iter()
        .map(|(name, tensor)| (format!("bert.{name}"), tensor))
        .collect();
    let outputs = run(&Folder::whole(&prefixed).load().expect("it loads"));
    assert_eq!(difference(&outputs, &direct()), 0.0);
}

#[test]
fn a_checkpoint_of_two_shards_loads() {
    let outputs = run(&sharded(index_of(&[])).load().expect("it loads"));
    assert_eq!(difference(&outputs, &direct()), 0.0);
}

#[test]
fn the_index_says_which_shard_a_tensor_is_read_from() {
    // Both shards contain the query's weight. Its values are right in the shard that the index names, and wrong in the other shard.
    for (own, other) in [(0, 1), (1, 0)] {
        let folder = sharded_as(index_of(&[(QUERY, SHARDS[own])]), |halves| {
            let tensor = halves[1].remove(QUERY).expect("it is there");
            let mut wrong = tensor.clone();
            wrong.bytes.reverse();
            halves[own].insert(QUERY.to_owned(), tensor);
            halves[other].insert(QUERY.to_owned(), wrong);
        });
        let outputs = run(&folder.load().expect("it loads"));
        assert_eq!(difference(&outputs, &direct()), 0.0, "from shard {own}");
    }
}

#[test]
fn a_tensor_that_its_shard_lacks_is_named_with_the_shard() {
    let index = index_of(&[(QUERY, SHARDS[0])]);
    assert_snapshot!(sharded(index).load_error(), @"`[dir]/model.safetensors.index.json` says that the tensor `encoder.layer.0.attention.self.query.weight` is in `model-00001-of-00002.safetensors`, which lacks it; download both again");
    let index = index_of(&[("cls.weight", SHARDS[1])]);
    assert_snapshot!(sharded(index).load_error(), @"`[dir]/model.safetensors.index.json` says that the tensor `cls.weight` is in `model-00002-of-00002.safetensors`, which lacks it; download both again");
}

#[test]
fn a_tensor_that_the_index_does_not_name_is_surplus() {
    let folder = sharded_as(index_of(&[]), |halves| {
        let tensor = halves[1][QUERY].clone();
        halves[0].insert("cls.weight".to_owned(), tensor);
    });
    let (outputs, log) = logged(Level::INFO, || run(&folder.load().expect("it loads")));
    assert_eq!(difference(&outputs, &direct()), 0.0);
    assert_snapshot!(folder.redact(&log), @r"
    WARN `[dir]` has neither modules.json nor 1_Pooling/config.json, which define the pooling; the embedding of a text is the mean of its tokens, normalized
    WARN no output of the description `bert` reads the checkpoint's `cls.weight`; if the model was trained with them, results differ
    INFO the checkpoint's tensor `cls.weight` is not used
    ");
}

#[test]
fn a_file_that_becomes_shorter_is_an_error() {
    use gemmule::{
        graph::WeightNames,
        runtime::weights::{Checkpoint, WeightSource},
    };
    let folder = whole();
    let checkpoint = Checkpoint::open(folder.path(), folder.path(), WeightNames::default());
    let checkpoint = checkpoint.expect("it opens");
    let file = folder.file("model.safetensors");
    let handle = std::fs::OpenOptions::new().write(true).open(file);
    let handle = handle.expect("it is there");
    // Truncate the open file by one byte, which makes the last tensor incomplete, and then to zero bytes.
    let size = handle.metadata().expect("it is open").len();
    let last = tiny_tensors(DType::F32);
    let mut errors = Vec::new();
    for size in [size - 1, 0] {
        handle.set_len(size).expect("it is cut");
        for (name, tensor) in &last {
            let dims: Vec<u64> = tensor.shape.iter().map(|&d| d as u64).collect();
            if let Err(error) = checkpoint.read(name, &dims) {
                errors.push(folder.text(&error));
            }
        }
    }
    assert_eq!(errors.len(), 1 + last.len());
    assert_snapshot!(errors[0], @"`[dir]/model.safetensors`: the tensor `encoder.layer.0.output.dense.weight` ended early; was it changed while being read? Load it again");
}

/// Checks that control characters in names from a file are escaped in warnings.
#[test]
fn a_warning_shows_no_control_characters_of_a_name() {
    let folder = changed(|t| {
        let tensor = t[QUERY].clone();
        t.insert("evil\u{1b}[2J\u{9b}31m".to_owned(), tensor);
    });
    let (loaded, log) = logged(Level::INFO, || folder.load());
    loaded.expect("it loads all the same");
    assert_snapshot!(folder.redact(&log), @r"
    WARN `[dir]` has neither modules.json nor 1_Pooling/config.json, which define the pooling; the embedding of a text is the mean of its tokens, normalized
    WARN no output of the description `bert` reads the checkpoint's `evil\x1b[2J\u{9b}31m`; if the model was trained with them, results differ
    INFO the checkpoint's tensor `evil\x1b[2J\u{9b}31m` is not used
    ");
}

#[test]
fn surplus_tensors_do_no_harm() {
    let folder = changed(|t| {
        let tensor = t[QUERY].clone();
        t.insert("cls.seq_relationship.weight".to_owned(), tensor);
    });
    let (outputs, log) = logged(Level::INFO, || run(&folder.load().expect("it loads")));
    assert_eq!(difference(&outputs, &direct()), 0.0);
    assert_snapshot!(folder.redact(&log), @r"
    WARN `[dir]` has neither modules.json nor 1_Pooling/config.json, which define the pooling; the embedding of a text is the mean of its tokens, normalized
    INFO the checkpoint's tensor `cls.seq_relationship.weight` is not used
    ");
}

/// Loading warns about tensors in the checkpoint that no output reads, because they may belong to a part of the model that the description
/// lacks.
#[test]
fn tensors_that_no_output_reads_are_warned_about() {
    let folder = changed(|t| {
        let tensor = t[QUERY].clone();
        for name in [
            // No warnings: tensors that other outputs read, that transformers computes itself, or that only training uses.
            "pooler.dense.weight",
            "bert.embeddings.position_ids",
            "cls.seq_relationship.weight",
            "cls.predictions.decoder.weight",
            // Warnings: tensors that nothing reads.
            "encoder.layer.0.attention.self.query_norm.weight",
            "encoder.layer.0.attention.self.key_norm.weight",
        ] {
            t.insert(name.to_owned(), tensor.clone());
        }
    });
    let (loaded, log) = logged(Level::WARN, || folder.load());
    loaded.expect("it loads all the same");
    assert_snapshot!(folder.redact(&log), @r"
    WARN `[dir]` has neither modules.json nor 1_Pooling/config.json, which define the pooling; the embedding of a text is the mean of its tokens, normalized
    WARN no output of the description `bert` reads the checkpoint's `encoder.layer.0.attention.self.key_norm.weight` and 1 more of its tensors; if the model was trained with them, results differ
    ");
}

#[test]
fn values_that_are_not_numbers_are_warned_about_by_the_name_of_their_tensor() {
    let folder = changed(|t| {
        let bytes = &mut t.get_mut(QUERY).expect("it is there").bytes;
        bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        bytes[8..12].copy_from_slice(&f32::INFINITY.to_le_bytes());
    });
    let (loaded, log) = logged(Level::WARN, || folder.load());
    loaded.expect("it loads all the same");
    assert_snapshot!(folder.redact(&log), @r"
    WARN `[dir]` has neither modules.json nor 1_Pooling/config.json, which define the pooling; the embedding of a text is the mean of its tokens, normalized
    WARN the tensor `encoder.layer.0.attention.self.query.weight` holds 2 values that are NaN or infinite; results that depend on it will be too
    ");
}

#[test]
fn a_pooling_without_a_list_of_modules_is_warned_about() {
    let folder = whole();
    std::fs::create_dir(folder.file("1_Pooling")).expect("room for a folder");
    folder.write(
        "1_Pooling/config.json",
        r#"{"pooling_mode_cls_token": true}"#,
    );
    // With `model_type`, config.json selects the description.
    let mut config = tiny_config();
    config["model_type"] = "bert".into();
    folder.write("config.json", config.to_string());
    let (loaded, log) = logged(Level::WARN, || folder.load());
    loaded.expect("it loads");
    assert_snapshot!(folder.redact(&log), @" WARN `[dir]` has no modules.json; sentence embeddings are pooled as 1_Pooling/config.json says, and normalized");
}

#[test]
fn a_missing_folder_is_named() {
    let folder = Folder::new();
    let error = Engine::builder("bert")
        .checkpoint(folder.file("absent"))
        .device(DeviceChoice::Cpu)
        .build()
        .err()
        .expect("it is absent");
    assert_snapshot!(folder.text(&error), @r"
    `[dir]/absent/config.json` cannot be read
    caused by: No such file or directory (os error 2)
    ");
}

#[test]
fn a_folder_without_weights_is_named() {
    let folder = Folder::new();
    folder.write("config.json", tiny_config().to_string());
    assert_snapshot!(folder.load_error(), @"`[dir]` contains none of `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin` and `pytorch_model.bin.index.json`; expected a checkpoint folder as published on the Hugging Face hub. It has no weights at all");
}

#[test]
fn neither_sizes_nor_weights_are_guessed() {
    let folder = Folder::new();
    let bert = || Engine::builder("bert").device(DeviceChoice::Cpu);
    let text = |builder: gemmule::Builder| folder.text(&builder.build().err().expect("an error"));
    assert_snapshot!(text(bert()), @"the sizes of the model are unknown; give a checkpoint folder or a config.json");
    assert_snapshot!(text(bert().config_value(tiny_config())), @"there are no weights to run with; give a checkpoint folder, or a seed for random weights");
}

#[test]
fn a_bad_config_is_named() {
    let folder = whole();
    std::fs::remove_file(folder.file("config.json")).expect("it was there");
    assert_snapshot!(folder.load_error(), @r"
    `[dir]/config.json` cannot be read
    caused by: No such file or directory (os error 2)
    ");
    folder.write("config.json", "{\"hidden_size\": 16,\n");
    assert_snapshot!(folder.load_error(), @"`[dir]/config.json` is not JSON: EOF while parsing a value at line 2 column 0; expected the config.json of a checkpoint");
    folder.write("config.json", "[1, 2]");
    assert_snapshot!(folder.load_error(), @"config.json holds a list; expected an object");
    folder.write("config.json", b"\xff\xfe{");
    assert_snapshot!(folder.load_error(), @r"
    `[dir]/config.json` cannot be read
    caused by: stream did not contain valid UTF-8
    ");
}

#[test]
fn a_missing_tensor_is_named_with_the_nearest_there_is() {
    let folder = changed(|t| {
        let tensor = t.remove(QUERY).expect("it is there");
        t.insert(QUERY.replace("query", "qery"), tensor);
    });
    assert_snapshot!(folder.load_error(), @"`[dir]/model.safetensors` lacks 1 of the 21 tensors that the model needs: `encoder.layer.0.attention.self.query.weight` (the nearest name there is `encoder.layer.0.attention.self.qery.weight`); is it a checkpoint of this model, with its own config.json?");
}

#[test]
fn of_many_missing_tensors_the_first_are_named() {
    let folder = changed(|t| t.retain(|name, _| name.starts_with("embeddings")));
    assert_snapshot!(folder.load_error(), @"`[dir]/model.safetensors` lacks 16 of the 21 tensors that the model needs: `encoder.layer.0.attention.self.query.weight`, `encoder.layer.0.attention.self.key.weight`, `encoder.layer.0.attention.self.value.weight`, `encoder.layer.0.attention.self.query.bias`, `encoder.layer.0.attention.self.key.bias`, and 11 more; is it a checkpoint of this model, with its own config.json?");
}

#[test]
fn a_tensor_of_another_shape_is_refused() {
    let folder = changed(|t| t.get_mut(QUERY).expect("it is there").shape = vec![8, 32]);
    assert_snapshot!(folder.load_error(), @"`[dir]/model.safetensors`: the tensor `encoder.layer.0.attention.self.query.weight` is [8, 32], but the model needs [16, 16]; does the config.json belong to this checkpoint?");
}

#[test]
fn a_tensor_of_whole_numbers_is_refused() {
    let folder = changed(|t| {
        let tensor = t.get_mut(QUERY).expect("it is there");
        tensor.dtype = safetensors::Dtype::I64;
        tensor.bytes = vec![0; 16 * 16 * 8];
    });
    assert_snapshot!(folder.load_error(), @"`[dir]/model.safetensors`: the tensor `encoder.layer.0.attention.self.query.weight` is stored as I64, expected F32, F16 or BF16; convert the checkpoint");
}

#[test]
fn a_file_that_is_not_whole_is_refused() {
    let folder = whole();
    let bytes = std::fs::read(folder.file("model.safetensors")).expect("it was written");
    // Truncate the file within the length of the header, within the header, within the data, and to zero bytes.
    folder.write("model.safetensors", &bytes[..5]);
    assert_snapshot!(folder.load_error(), @"`[dir]/model.safetensors` is not a complete safetensors file: header too small; download it again");
    folder.write("model.safetensors", &bytes[..100]);
    assert_snapshot!(folder.load_error(), @"`[dir]/model.safetensors` is not a complete safetensors file: invalid header length; download it again");
    folder.write("model.safetensors", &bytes[..bytes.len() - 1]);
    assert_snapshot!(folder.load_error(), @"`[dir]/model.safetensors` is not a complete safetensors file: incomplete metadata, file not fully covered; download it again");
    folder.write("model.safetensors", "");
    assert_snapshot!(folder.load_error(), @"`[dir]/model.safetensors` is not a complete safetensors file: header too small; download it again");
}

#[test]
fn a_file_of_another_kind_is_refused() {
    let folder = whole();
    folder.write(
        "model.safetensors",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
    );
    assert_snapshot!(folder.load_error(), @"`[dir]/model.safetensors` is not a complete safetensors file: header too large; download it again");
    let noise: Vec<u8> = (0..4096u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    folder.write("model.safetensors", noise);
    assert_snapshot!(folder.load_error(), @"`[dir]/model.safetensors` is not a complete safetensors file: header too large; download it again");
    let mut header = 9u64.to_le_bytes().to_vec();
    header.extend_from_slice(b"{\"a\": 12}");
    folder.write("model.safetensors", header);
    assert_snapshot!(folder.load_error(), @"`[dir]/model.safetensors` is not a complete safetensors file: invalid JSON in header: invalid type: integer `12`, expected struct TensorInfo at line 1 column 9; download it again");
}

#[test]
fn every_cut_of_a_file_is_an_error() {
    let folder = whole();
    let bytes = std::fs::read(folder.file("model.safetensors")).expect("it was written");
    for end in (0..bytes.len()).step_by(97) {
        folder.write("model.safetensors", &bytes[..end]);
        assert!(folder.load().is_err(), "cut at {end}");
    }
}

#[test]
fn a_missing_shard_is_named() {
    let index = index_of(&[("a", "model-00003-of-00002.safetensors")]);
    assert_snapshot!(sharded(index).load_error(), @"`[dir]/model.safetensors.index.json` names the shard `model-00003-of-00002.safetensors`, which is not in the same folder; download the shard too");
}

#[test]
fn a_shard_that_the_index_does_not_name_is_not_read() {
    let [first, _] = halves();
    let names = first.keys().map(|name| (name.clone(), json!(SHARDS[0])));
    let map: serde_json::Map<_, _> = names.collect();
    let index = json!({ "weight_map": map });
    assert_snapshot!(sharded(index.to_string()).load_error(), @"`[dir]/model.safetensors.index.json` lacks 16 of the 21 tensors that the model needs: `encoder.layer.0.attention.self.query.weight`, `encoder.layer.0.attention.self.key.weight`, `encoder.layer.0.attention.self.value.weight`, `encoder.layer.0.attention.self.query.bias`, `encoder.layer.0.attention.self.key.bias`, and 11 more; is it a checkpoint of this model, with its own config.json?");
}

#[test]
fn a_bad_index_is_named() {
    assert_snapshot!(sharded("{").load_error(), @"`[dir]/model.safetensors.index.json` is not an index of shards: EOF while parsing an object at line 1 column 1; expected an object with a `weight_map`");
    assert_snapshot!(sharded("{\"map\": {}}").load_error(), @"`[dir]/model.safetensors.index.json` is not an index of shards: there is no `weight_map`; expected an object with a `weight_map`");
    assert_snapshot!(sharded("{\"weight_map\": []}").load_error(), @"`[dir]/model.safetensors.index.json` is not an index of shards: there is no `weight_map`; expected an object with a `weight_map`");
    assert_snapshot!(sharded("{\"weight_map\": {\"a\": 1}}").load_error(), @"`[dir]/model.safetensors.index.json` is not an index of shards: `a` names no file; expected an object with a `weight_map`");
}

#[test]
fn an_index_names_files_beside_it_only() {
    for name in ["../evil", "..", "/etc/passwd", "a/b", ".", "", ".hidden"] {
        let index = json!({"weight_map": {"a": name}}).to_string();
        let expected = format!(
            "`[dir]/model.safetensors.index.json` is not an index of shards: `{name}` is not a plain file name; expected an object with a `weight_map`"
        );
        assert_eq!(sharded(index).load_error(), expected);
    }
}

#[test]
fn a_quantized_checkpoint_is_announced_with_its_layout() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/quantized/models/llama-int8-head");
    let builder = Engine::from_checkpoint(folder).device(DeviceChoice::Cpu);
    let (loaded, log) = logged(Level::INFO, || builder.build());
    loaded.expect("it loads");
    assert_snapshot!(log, @r"
    INFO the checkpoint's `lm_head.weight` differs from the embedding table, so the two are not tied
    INFO the checkpoint is quantized: compressed-tensors (int8, a scale per output); its 15 quantized weights are dequantized when they are read, unless they keep their published values
    ");
}

/// Returns the result of `f`, and the log messages of `level` and above that it writes on this thread.
fn logged<T>(level: Level, f: impl FnOnce() -> T) -> (T, String) {
    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);
    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("no writer panics").write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    // The `tracing` crate remembers which events have no subscriber. Without a global subscriber, a test on another thread could make
    // `tracing` disable an event that this test reads.
    static READ: std::sync::Once = std::sync::Once::new();
    READ.call_once(|| {
        let all = tracing_subscriber::fmt().with_max_level(Level::INFO);
        let all = all.with_writer(std::io::sink).finish();
        tracing::subscriber::set_global_default(all).expect("no test sets another one");
    });
    let sink = Sink::default();
    let writer = sink.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(move || writer.clone())
        .without_time()
        .with_target(false)
        .with_ansi(false)
        .finish();
    let value = tracing::subscriber::with_default(subscriber, f);
    let bytes = sink.0.lock().expect("no writer panics").clone();
    (value, String::from_utf8(bytes).expect("text"))
}
