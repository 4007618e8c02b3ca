//! Tests of checkpoint folders in the form in which models are published. Results are compared with those of transformers,
//! `SentenceTransformer(DIR).encode` and `CrossEncoder(DIR).predict`. `scripts/folders.py` creates the folders with random weights and
//! stores the results in them, so these tests do not need Python.

mod late;

use std::path::{Path, PathBuf};

use gemmule::{
    Batch, DType, DeviceChoice, Engine, Output, Session, TextError,
    measure::{Bound, Comparison},
    text::{Folder, Prompt, TextEncoder},
};
use serde::Deserialize;

/// The contents of a folder's `expected.json`.
#[derive(Deserialize)]
struct Expected {
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Run {
    texts: Option<Vec<String>>,
    pairs: Option<Vec<(String, String)>>,
    prompt: Option<String>,
    prompt_name: Option<String>,
    /// Task that selects the route of a Router (a module that contains alternative modules).
    task: Option<String>,
    output: String,
    shape: Vec<u64>,
    values: Vec<f32>,
    ids: Vec<Vec<u32>>,
    types: Option<Vec<Vec<u32>>>,
    /// Logits of a cross-encoder before its activation.
    logits: Option<Vec<f32>>,
    /// Number of columns of each row that are stored in `values`. `None` if all columns are stored.
    columns: Option<usize>,
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/checkpoints")
        .join(name)
}

fn expected(name: &str) -> Vec<Run> {
    let text = std::fs::read_to_string(folder(name).join("expected.json")).expect("results");
    serde_json::from_str::<Expected>(&text)
        .expect("results of a known form")
        .runs
}

impl Run {
    fn prompt(&self) -> Prompt<'_> {
        match (&self.prompt, &self.prompt_name) {
            (Some(text), _) => Prompt::Text(text),
            (None, Some(name)) => Prompt::Named(name),
            (None, None) => Prompt::Default,
        }
    }

    fn encode(&self, encoder: &TextEncoder) -> Result<Batch, TextError> {
        match (&self.texts, &self.pairs) {
            (Some(texts), _) => encoder.encode_with(texts, self.prompt()),
            (None, Some(pairs)) => encoder.encode_pairs(pairs, self.prompt()),
            (None, None) => Ok(Batch::from_sequences(&self.ids)?),
        }
    }

    /// Converts the weights of tokens to rows with a weight for each entry of the vocabulary, `[texts, vocabulary]`. All occurrences of an
    /// entry in a text have the same weight.
    fn by_entry(&self, weights: &Output) -> Output {
        let width = self.shape[1] as usize;
        let mut all = weights.values.iter();
        let rows = self.ids.iter().flat_map(|ids| {
            let mut row = vec![0.0; width];
            for (&id, &weight) in ids.iter().zip(&mut all) {
                row[id as usize] = weight;
            }
            row
        });
        Output {
            name: weights.name.clone(),
            shape: self.shape.clone(),
            values: rows.collect(),
        }
    }

    /// Runs the model of the folder `name`, and compares token ids and output values with those in `self`. `sessions` caches engines by
    /// their output and task.
    #[track_caller]
    fn check(&self, name: &str, sessions: &mut Vec<(String, Engine, Session)>) {
        let what = format!(
            "{name}, {:?} {:?} {:?}",
            self.output, self.prompt_name, self.task
        );
        let opened = Folder::open_for(&folder(name), self.task.as_deref());
        let encoder = opened.and_then(TextEncoder::of).expect("a tokenizer");
        let batch = self
            .encode(&encoder)
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        let ids: Vec<i32> = self.ids.iter().flatten().map(|&id| id as i32).collect();
        assert_eq!(batch.token_ids(), ids, "{what}");
        if let Some(types) = &self.types {
            let types: Vec<i32> = types.iter().flatten().map(|&id| id as i32).collect();
            assert_eq!(batch.type_ids(), types, "{what}");
        }
        let is_scores = self.output == "scores";
        let asked = if is_scores {
            "sequence_logits"
        } else {
            &self.output
        };
        let key = format!("{asked} {:?}", self.task);
        if !sessions.iter().any(|(known, ..)| *known == key) {
            let mut builder = Engine::from_checkpoint(folder(name)).device(DeviceChoice::Cpu);
            if let Some(task) = &self.task {
                builder = builder.task(task);
            }
            let built = builder.outputs([asked]).build();
            let engine = built.unwrap_or_else(|e| panic!("{what}: {:?}", miette::Report::new(e)));
            let session = engine.session().expect("a session");
            sessions.push((key.clone(), engine, session));
        }
        let of_output = sessions.iter_mut().find(|(known, ..)| *known == key);
        let (_, engine, session) = of_output.expect("it was built");
        let outputs = session
            .run(&batch)
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        let got = match is_scores {
            true => engine.scores(&outputs).expect("scores"),
            false => outputs.get(&self.output).expect("it was asked for").clone(),
        };
        let got = match (asked, got.shape.as_slice()) {
            ("sparse", &[_, 1]) if self.shape[1] > 1 => self.by_entry(&got),
            _ => got,
        };
        compare(&what, &cut(&got, self.columns), &self.shape, &self.values);
        if let Some(logits) = &self.logits {
            let got = outputs.get("sequence_logits").expect("it was asked for");
            compare(&what, got, &got.shape, logits);
        }
    }
}

#[test]
fn the_one_call_helpers_give_what_sentence_transformers_gives() {
    let built = |name: &str| {
        let builder = Engine::from_checkpoint(folder(name)).device(DeviceChoice::Cpu);
        builder.build().expect("it loads")
    };
    let mut n_checked = 0;
    for run in expected("st-mean") {
        let is_plain = run.output == "sentence_embedding" && run.prompt_name.is_none();
        let (Some(texts), None, true) = (&run.texts, &run.prompt, is_plain) else {
            continue;
        };
        let rows = built("st-mean").embed(texts).expect("vectors");
        let got = Output {
            name: run.output.clone(),
            shape: run.shape.clone(),
            values: rows.concat(),
        };
        compare("embed", &got, &run.shape, &run.values);
        n_checked += 1;
    }
    for run in expected("ce-one")
        .iter()
        .filter(|run| run.output == "scores")
    {
        let engine = built("ce-one");
        let pairs = run.pairs.as_ref().expect("a cross-encoder reads pairs");
        for ((query, document), want) in pairs.iter().zip(&run.values) {
            let others = ["", document.as_str()];
            let got = engine.rerank(query, &others).expect("scores");
            assert_eq!(got.len(), others.len());
            assert!((got[1] - want).abs() < 1e-5, "{query}: {got:?}, not {want}");
            n_checked += 1;
        }
    }
    assert!(n_checked >= 4, "{n_checked}");
    let error = built("st-mean")
        .rerank("a", &["b"])
        .expect_err("it has no score");
    assert!(error.to_string().contains("sequence_logits"), "{error}");
}

#[test]
fn the_files_of_the_example_are_those_of_the_folder_that_was_run() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/mxbai_rerank");
    let names = [
        "chat_template.jinja",
        "modules.json",
        "sentence_bert_config.json",
        "1_LogitScore/config.json",
    ];
    for name in names {
        let read = |folder: &Path| std::fs::read_to_string(folder.join(name)).expect(name);
        assert_eq!(read(&example), read(&folder("ce-mxbai")), "{name}");
    }
    // This file is the same in both folders, except that the example has no prompts.
    let name = "config_sentence_transformers.json";
    let read = |folder: &Path| -> serde_json::Value {
        let text = std::fs::read_to_string(folder.join(name)).expect(name);
        serde_json::from_str(&text).expect("JSON")
    };
    let (mut example, run) = (read(&example), read(&folder("ce-mxbai")));
    example["prompts"] = run["prompts"].clone();
    assert_eq!(example, run);
}

/// The contents of `chunks.json`, the expected results of late chunking.
#[derive(Deserialize)]
struct ExpectedChunks {
    texts: Vec<String>,
    ids: Vec<u32>,
    ends: Vec<usize>,
    rows: Vec<Vec<f32>>,
}

#[test]
fn chunks_of_a_text_are_pooled_from_the_states_that_transformers_gives() {
    let text = std::fs::read_to_string(folder("st-mean").join("chunks.json")).expect("results");
    let expected: ExpectedChunks = serde_json::from_str(&text).expect("a known form");
    let encoder = TextEncoder::open(&folder("st-mean")).expect("a tokenizer");
    let chunks = encoder.encode_chunks(&expected.texts, Prompt::Default);
    let chunks = chunks.expect("they fit");
    assert_eq!(chunks.encoded.ids, expected.ids);
    let ends: Vec<usize> = chunks.ranges.iter().map(|range| range.end).collect();
    assert_eq!(ends, expected.ends[1..]);
    let built = Engine::from_checkpoint(folder("st-mean"))
        .device(DeviceChoice::Cpu)
        .outputs(["sentence_embedding", "last_hidden_state"])
        .build();
    let engine = built.expect("it loads");
    let rows = engine.embed_chunks(&expected.texts).expect("vectors");
    let shape = vec![rows.len() as u64, rows[0].len() as u64];
    let got = Output {
        name: "chunks".to_owned(),
        shape: shape.clone(),
        values: rows.concat(),
    };
    compare("chunks", &got, &shape, &expected.rows.concat());
    // The vector of a single chunk is that of the whole text.
    let alone = engine.embed_chunks(&expected.texts[..1]).expect("a vector");
    let usual = engine.embed(&expected.texts[..1]).expect("a vector");
    let far = alone[0].iter().zip(&usual[0]).map(|(a, b)| (a - b).abs());
    assert!(far.fold(0.0, f32::max) < 1e-5);
    let none: [&str; 0] = [];
    assert!(engine.embed_chunks(&none).expect("no vectors").is_empty());
    let prompted = encoder.encode_chunks(&["a", "b"], Prompt::Text("find: "));
    let whole = encoder.encode_with(&["find: a"], Prompt::Text(""));
    let (prompted, whole) = (prompted.expect("it fits"), whole.expect("it fits"));
    // The first chunk includes the prompt, but not the special token at the end of the whole text.
    assert_eq!(prompted.ranges[0].len(), whole.token_ids().len() - 1);
}

/// Returns the first `columns` columns of each row.
fn cut(output: &Output, columns: Option<usize>) -> Output {
    let (Some(columns), Some(&width)) = (columns, output.shape.last()) else {
        return output.clone();
    };
    let rows = output.values.chunks(width as usize);
    Output {
        name: output.name.clone(),
        shape: vec![output.shape[0], columns as u64],
        values: rows.flat_map(|row| &row[..columns]).copied().collect(),
    }
}

#[track_caller]
fn compare(what: &str, got: &Output, shape: &[u64], values: &[f32]) {
    assert_eq!(got.shape, shape, "{what}");
    let want = Output {
        name: got.name.clone(),
        shape: shape.to_vec(),
        values: values.to_vec(),
    };
    let comparison = Comparison::between(got, &want);
    assert!(
        Bound::of(DType::F32).holds(&comparison),
        "{what}: {comparison:?}"
    );
}

#[track_caller]
fn matches(name: &str, n_runs: usize) {
    let mut sessions = Vec::new();
    let runs = expected(name);
    assert_eq!(runs.len(), n_runs, "{name}");
    for run in &runs {
        run.check(name, &mut sessions);
    }
}

macro_rules! as_published {
    ($($test:ident: $folder:literal, $n:literal runs;)*) => {
        $(#[test]
        fn $test() {
            matches($folder, $n);
        })*

        #[test]
        fn every_folder_has_a_test() {
            // Other files test these folders: `tests/command/writer.rs` and `tests/command/translator.rs` test generation, and `late` tests
            // late interaction.
            let refused = [
                "translator", "writer", "hf-marian", "hf-m2m", "hf-t5",
                "late-bert", "late-multi", "late-min", "late-modernbert", "late-attend", "late-plain", "late-stanford",
            ];
            let tested = [$($folder),*];
            let folders = std::fs::read_dir(folder("")).expect("the folders are there");
            for entry in folders.filter_map(Result::ok).filter(|e| e.path().is_dir()) {
                let name = entry.file_name().into_string().expect("a plain name");
                let is_known = |names: &[&str]| names.contains(&name.as_str());
                assert!(is_known(&tested) || is_known(&refused), "{name} has no test");
            }
        }
    };
}

as_published! {
    mean_pooling_with_prompts_and_a_limit: "st-mean", 6 runs;
    means_without_the_tokens_of_a_prompt: "st-default-prompt", 6 runs;
    poolings_without_the_tokens_of_a_prompt: "st-instructor", 3 runs;
    the_oldest_form_of_a_folder: "st-cls", 4 runs;
    max_pooling: "st-max", 4 runs;
    the_last_token: "st-last", 3 runs;
    several_poolings_joined_by_flags: "st-joined", 3 runs;
    several_poolings_joined_by_a_list: "st-joined-list", 3 runs;
    dense_modules_with_weights_of_their_own: "st-dense", 3 runs;
    residuals_of_dense_modules_and_a_norm: "st-residual", 3 runs;
    a_mean_of_the_states_of_layers: "st-layers", 3 runs;
    sums_by_the_root_of_the_length: "st-sqrt", 3 runs;
    means_by_position: "st-weighted", 3 runs;
    a_trunk_without_prefix_whose_positions_start_late: "st-xlmr", 3 runs;
    sentences_by_distilbert: "st-distil", 3 runs;
    sentences_by_groups_of_shared_layers: "st-albert", 3 runs;
    sentences_by_narrow_embeddings: "st-electra", 3 runs;
    biases_by_distance_that_all_layers_share: "st-mpnet", 3 runs;
    rotary_positions_by_the_keys_of_transformers: "st-nomic", 4 runs;
    windows_in_all_but_some_layers: "st-modernbert", 3 runs;
    an_encoder_whose_mean_is_projected: "st-t5", 3 runs;
    a_decoder_that_embeds_by_its_last_token: "st-qwen", 4 runs;
    windows_in_both_directions_and_two_projections: "st-gemma", 4 runs;
    dense_sparse_and_vectors_of_tokens: "st-m3", 3 runs;
    a_table_with_a_vector_for_each_token: "st-static", 4 runs;
    a_table_with_a_row_and_a_factor_for_each_token: "st-potion", 3 runs;
    weights_of_the_vocabulary: "st-splade", 2 runs;
    routes_of_an_inference_free_model: "st-router", 3 runs;
    a_table_for_queries_and_a_transformer_for_documents: "st-asym", 4 runs;
    routes_after_a_transformer: "st-routes", 3 runs;
    an_adapter_for_each_task: "st-adapters", 3 runs;
    a_ranker_by_the_logits_of_two_tokens: "ce-qwen", 4 runs;
    a_ranker_with_the_files_of_an_example: "ce-mxbai", 2 runs;
    a_cross_encoder_of_one_label: "ce-one", 2 runs;
    a_cross_encoder_of_jina_without_a_model_type: "ce-jina", 2 runs;
    a_cross_encoder_whose_config_has_the_old_key: "ce-identity", 2 runs;
    a_cross_encoder_of_three_labels: "ce-nli", 2 runs;
    a_cross_encoder_whose_config_has_the_new_key: "ce-new", 2 runs;
    a_cross_encoder_with_modules: "ce-modules", 3 runs;
    a_cross_encoder_by_electra: "ce-electra", 2 runs;
    layer_norms_with_the_words_of_tensorflow: "hf-gamma", 4 runs;
    an_untied_decoder: "hf-untied", 2 runs;
    camembert: "hf-camembert", 3 runs;
    token_classes_by_xlm_roberta: "hf-xlmr-token", 3 runs;
    masked_words_by_roberta: "hf-roberta-mlm", 3 runs;
    a_discriminator: "hf-electra-disc", 3 runs;
    a_trunk_with_narrow_embeddings: "hf-electra-small", 2 runs;
    token_classes_by_electra: "hf-electra-token", 2 runs;
    a_generator: "hf-electra-mlm", 2 runs;
    three_groups_of_two_layers: "hf-albert-groups", 3 runs;
    biases_by_distance_where_config_says_bert: "hf-jina", 1 runs;
    biases_by_distance_and_normalized_queries: "hf-jina-later", 1 runs;
    one_projection_of_queries_keys_and_values: "hf-gte", 3 runs;
    disentangled_attention: "hf-deberta", 3 runs;
    disentangled_attention_of_the_first_version: "hf-deberta-first", 3 runs;
    the_text_tower_of_a_whole: "hf-clip", 3 runs;
    a_classifier_by_distilbert: "hf-distil-seq", 3 runs;
}

/// An artifact cannot be loaded with the weights of a folder whose model has other sizes or modules. Other weights of the same model are
/// accepted.
#[test]
fn an_artifact_belongs_to_the_sizes_and_modules_of_its_folder() {
    let compiled = |name: &str, outputs: Option<&str>| {
        let opened = Folder::open(&folder(name)).expect("a folder");
        let config = opened.config().expect("a config");
        let description = gemmule::model::Description::for_config(config).expect("it is shipped");
        let machine = gemmule::machine::Machine::usual().expect("it is described");
        let options = gemmule::engine::CompileOptions {
            modules: opened.modules().unwrap_or_default().to_vec(),
            outputs: outputs.map(|output| vec![output.to_owned()]),
            ..gemmule::engine::CompileOptions::new(DType::F32, machine)
        };
        let compiled = gemmule::engine::compile(&description, config, &options);
        let artifact = gemmule::engine::Artifact::of(compiled.expect("it compiles"), Vec::new());
        let file = tempfile::NamedTempFile::new().expect("a file");
        artifact.write(file.path()).expect("it is written");
        file
    };
    let with = |file: &tempfile::NamedTempFile, folder: &Path| {
        let built = Engine::from_artifact(file.path()).checkpoint(folder);
        let built = built.device(DeviceChoice::Cpu).allow_unused_layers(true);
        built.build().map(drop).map_err(|error| {
            let error = error.to_string();
            let paths = [(file.path(), "ARTIFACT"), (folder, "FOLDER")];
            paths.iter().fold(error, |text, (path, name)| {
                text.replace(&path.display().to_string(), name)
            })
        })
    };
    let mean = compiled("st-mean", None);
    with(&mean, &folder("st-mean")).expect("its own folder");
    let refused = |name: &str| with(&mean, &folder(name)).expect_err("another model");
    insta::assert_snapshot!(refused("st-cls"), @"the artifact `ARTIFACT` was compiled for another model than that of `FOLDER`: the modules after the transformer were pooling by the mean, normalization; in the folder they are pooling by the first token; compile the model of this folder (`gemmule compile`), or give the folder that the artifact was compiled for");
    insta::assert_snapshot!(refused("st-dense"), @"the artifact `ARTIFACT` was compiled for another model than that of `FOLDER`: the modules after the transformer were pooling by the mean, normalization; in the folder they are pooling by the mean, a Dense layer from 32 to 24 and Tanh, a Dense layer from 24 to 16 without bias, normalization; compile the model of this folder (`gemmule compile`), or give the folder that the artifact was compiled for");
    insta::assert_snapshot!(refused("st-xlmr"), @"the artifact `ARTIFACT` was compiled for another model than that of `FOLDER`: config.json: `model_type` is `xlm-roberta`, but the description `bert` is for `bert`; compile the model of this folder (`gemmule compile`), or give the folder that the artifact was compiled for");
    // The output `last_hidden_state` does not depend on the modules, so a folder with other modules is accepted.
    let states = compiled("st-mean", Some("last_hidden_state"));
    with(&states, &folder("st-cls")).expect("the same states");
    // A folder may differ in settings that do not change results.
    let copied = tempfile::tempdir().expect("room for a folder");
    let copy = |name: &str, change: &dyn Fn(&mut serde_json::Value)| {
        let from = folder("st-mean");
        for file in ["modules.json", "model.safetensors", "tokenizer.json"] {
            std::fs::copy(from.join(file), copied.path().join(file)).expect("copied");
        }
        std::fs::create_dir_all(copied.path().join("1_Pooling")).expect("created");
        let pooling = "1_Pooling/config.json";
        std::fs::copy(from.join(pooling), copied.path().join(pooling)).expect("copied");
        let text = std::fs::read_to_string(from.join(name)).expect("read");
        let mut config = serde_json::from_str(&text).expect("JSON");
        change(&mut config);
        std::fs::write(copied.path().join(name), config.to_string()).expect("written");
    };
    copy("config.json", &|config| {
        config["transformers_version"] = "6".into();
        config["_name_or_path"] = "other".into();
    });
    with(&mean, copied.path()).expect("the same sizes");
    copy("config.json", &|config| {
        config["num_hidden_layers"] = 1.into()
    });
    let error = with(&mean, copied.path()).expect_err("another model");
    insta::assert_snapshot!(error, @"the artifact `ARTIFACT` was compiled for another model than that of `FOLDER`: `layers` was 2 and is 1 in the folder; compile the model of this folder (`gemmule compile`), or give the folder that the artifact was compiled for");
    copy("config.json", &|config| {
        config["hidden_act"] = "relu".into()
    });
    let error = with(&mean, copied.path()).expect_err("another model");
    insta::assert_snapshot!(error, @"the artifact `ARTIFACT` was compiled for another model than that of `FOLDER`: other settings of config.json differ; compile the model of this folder (`gemmule compile`), or give the folder that the artifact was compiled for");
}
