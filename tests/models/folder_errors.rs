//! Tests of checkpoint folders that cannot be loaded: folders with missing or unsupported parts, damaged and hostile folders, and folders
//! that do not fit a description. The tests check the full texts of the errors.

mod late;

use std::path::{Path, PathBuf};

use crate::common::Folder;
use gemmule::{
    DeviceChoice, Engine,
    model::Description,
    text::{Prompt, TextEncoder},
};
use insta::assert_snapshot;
use serde_json::{Value, json};

fn published(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/checkpoints")
        .join(name)
}

/// Returns a copy of a folder of `tests/checkpoints`, which a test can modify.
fn copy(name: &str) -> Folder {
    fn into(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).expect("room for a folder");
        for entry in std::fs::read_dir(from)
            .expect("it is there")
            .filter_map(Result::ok)
        {
            let (from, to) = (entry.path(), to.join(entry.file_name()));
            match from.is_dir() {
                true => into(&from, &to),
                false => drop(std::fs::copy(from, to).expect("room for a file")),
            }
        }
    }
    let folder = Folder::new();
    into(&published(name), folder.path());
    folder
}

/// Changes keys in a JSON file of a folder. Null removes a key.
fn change(folder: &Folder, file: &str, changes: Value) {
    let text = std::fs::read_to_string(folder.file(file)).expect("it is there");
    let mut json: Value = serde_json::from_str(&text).expect("it is JSON");
    for (key, value) in changes.as_object().expect("changes are an object") {
        match value {
            Value::Null => drop(json.as_object_mut().expect("an object").remove(key)),
            value => json[key] = value.clone(),
        }
    }
    folder.write(file, json.to_string());
}

/// Returns the error of loading a folder.
#[track_caller]
fn refused(folder: &Folder) -> String {
    let built = Engine::from_checkpoint(folder.path())
        .device(DeviceChoice::Cpu)
        .build();
    folder.text(&built.err().expect("it is refused"))
}

#[test]
fn a_description_that_is_not_for_the_folder_names_the_one_that_is() {
    let folder = copy("st-xlmr");
    let built = Engine::builder("bert")
        .checkpoint(folder.path())
        .device(DeviceChoice::Cpu)
        .build();
    assert_snapshot!(folder.text(&built.err().expect("it is refused")), @"config.json: `model_type` is `xlm-roberta`, but the description `bert` is for `bert`");
    change(&folder, "config.json", json!({"model_type": "mamba"}));
    assert_snapshot!(refused(&folder), @"no shipped description supports the `model_type` `mamba` of config.json");
    change(&folder, "config.json", json!({"model_type": null}));
    assert_snapshot!(refused(&folder), @"config.json has no `model_type`, and no description is for its `architectures`");
}

#[test]
fn layers_that_would_be_left_out_are_an_error() {
    let folder = copy("hf-gamma");
    change(&folder, "config.json", json!({"num_hidden_layers": 1}));
    assert_snapshot!(refused(&folder), @"the model does not use `bert.encoder.layer.1.attention.output.LayerNorm.beta` and 15 more tensors of the checkpoint, although it uses the same tensor of other layers; check the number of layers in config.json and the layer index in the description, or allow unused layers");
    let cut = Engine::from_checkpoint(folder.path()).allow_unused_layers(true);
    assert!(cut.device(DeviceChoice::Cpu).build().is_ok());
    // A wrong description that reads one weight of layer 0 in all layers.
    let folder = copy("hf-gamma");
    let bert = Description::shipped_source("bert").expect("it is shipped");
    let named = "encoder.layer.{i}.output.dense.bias";
    assert_eq!(bert.matches(named).count(), 1);
    let forgot = bert.replace(named, "encoder.layer.0.output.dense.bias");
    let built = Engine::from_source("mine.ron", forgot).checkpoint(folder.path());
    let built = built.device(DeviceChoice::Cpu).build();
    assert_snapshot!(folder.text(&built.err().expect("it is refused")), @"the model does not use `bert.encoder.layer.1.output.dense.bias` of the checkpoint, although it uses the same tensor of other layers; check the number of layers in config.json and the layer index in the description, or allow unused layers");
}

#[test]
fn layers_of_outputs_that_are_not_asked_for_are_not_left_out() {
    // The output `early` reads only the first of two layers. The second layer is not reported as unused, because other outputs of the
    // description read it.
    let bert = Description::shipped_source("bert").expect("it is shipped");
    let early = bert
        .replacen("        Repeat(times: \"layers\",", "        Repeat(times: 1, index: \"i\", name: \"first\", body: [Let(\"hidden\", linear(x: \"hidden\", out: \"hidden\", weight: \"encoder.layer.{i}.attention.self.query.weight\"))]),\n        Let(\"early\", relu(x: \"hidden\")),\n        Repeat(times: \"layers\",", 1)
        .replacen("    outputs: {", "    outputs: {\n        \"early\": \"early\",", 1);
    let engine = Engine::from_source("mine.ron", early).checkpoint(published("hf-gamma"));
    let engine = engine.outputs(["early"]).device(DeviceChoice::Cpu).build();
    assert!(
        engine.is_ok(),
        "{:?}",
        engine.err().map(miette::Report::new)
    );
}

#[test]
fn poolings_that_are_not_known_are_named() {
    let folder = copy("st-max");
    change(&folder, "1_Pooling/config.json", json!({"pooling_mode": 3}));
    assert_snapshot!(refused(&folder), @"`[dir]/1_Pooling/config.json`: `pooling_mode` is 3; expected a name or a list of names");
    change(
        &folder,
        "1_Pooling/config.json",
        json!({"pooling_mode": ["max", "median"]}),
    );
    assert_snapshot!(refused(&folder), @"`[dir]/1_Pooling/config.json`: pooling by `median` is not known; gemmule pools by cls, max, mean, mean_sqrt_len_tokens, weightedmean and lasttoken");
    std::fs::remove_file(folder.file("1_Pooling/config.json")).expect("it was there");
    assert_snapshot!(refused(&folder), @r"
    `[dir]/1_Pooling/config.json` cannot be read
    caused by: No such file or directory (os error 2)
    ");
}

#[test]
fn modules_that_are_not_known_are_named() {
    let folder = copy("st-dense");
    let with = |entry: Value| {
        folder.write(
            "modules.json",
            json!([{"path": "", "type": "sentence_transformers.models.Transformer"}, entry])
                .to_string(),
        );
        refused(&folder)
    };
    assert_snapshot!(with(json!({"path": "1_Pooling", "type": "sentence_transformers.models.WordWeights"})), @"`[dir]/modules.json`: the module `WordWeights` is not known; gemmule computes Transformer, StaticEmbedding, SparseStaticEmbedding, Pooling, WeightedLayerPooling, Dense, Dropout, LayerNorm, Normalize, SpladePooling and LogitScore");
    assert_snapshot!(with(json!({"path": "../1_Pooling", "type": "sentence_transformers.models.Pooling"})), @"`[dir]/modules.json`: `../1_Pooling` is not a folder next to it");
    assert_snapshot!(with(json!({"path": "/etc", "type": "sentence_transformers.models.Pooling"})), @"`[dir]/modules.json`: `/etc` is not a folder next to it");
    assert_snapshot!(with(json!({"path": "", "type": "sentence_transformers.models.Pooling"})), @"`[dir]/modules.json`: `` is not a folder next to it");
    assert_snapshot!(with(json!({"type": "sentence_transformers.models.Pooling"})), @"`[dir]/modules.json`: expected a `path` and a `type` of every module");
    assert_snapshot!(with(json!({"path": "1_Pooling", "type": "mine.Pooling"})), @"`[dir]/modules.json`: the module `mine.Pooling` is not known; gemmule computes Transformer, StaticEmbedding, SparseStaticEmbedding, Pooling, WeightedLayerPooling, Dense, Dropout, LayerNorm, Normalize, SpladePooling and LogitScore");
    folder.write("modules.json", "[]");
    assert_snapshot!(refused(&folder), @"`[dir]/modules.json`: it lists no module");
    folder.write(
        "modules.json",
        r#"[{"path": "", "type": "sentence_transformers.models.CLIPModel"}]"#,
    );
    assert_snapshot!(refused(&folder), @"`[dir]/modules.json`: the first module is `CLIPModel`; expected a Transformer, a StaticEmbedding or a SparseStaticEmbedding");
    folder.write("modules.json", "{");
    assert_snapshot!(refused(&folder), @"`[dir]/modules.json`: it is not JSON: EOF while parsing an object at line 1 column 1");
}

#[test]
fn dense_modules_are_held_to_their_weights() {
    let with = |changes: Value| {
        let folder = copy("st-dense");
        change(&folder, "2_Dense/config.json", changes);
        refused(&folder)
    };
    assert_snapshot!(with(json!({"in_features": 30})), @"shapes do not match: `2_Dense.product` (linear): the input is 32 wide, but the weight takes 30; operands are `1_Pooling.mean` [batch, 32], `2_Dense/linear.weight` [24, 30]");
    assert_snapshot!(with(json!({"out_features": null})), @"`[dir]/2_Dense/config.json`: there is no `out_features`");
    assert_snapshot!(with(json!({"activation_function": "torch.nn.modules.activation.SiLU"})), @r#"`[dir]/2_Dense/config.json`: `activation_function` is "torch.nn.modules.activation.SiLU"; expected Identity, Tanh, ReLU or GELU of torch.nn"#);
    assert_snapshot!(with(json!({"activation_function": "mine.Tanh"})), @r#"`[dir]/2_Dense/config.json`: `activation_function` is "mine.Tanh"; expected a class of torch"#);
    assert_snapshot!(with(json!({"use_residual": 1})), @"`[dir]/2_Dense/config.json`: `use_residual` is 1; expected true or false");
    assert_snapshot!(with(json!({"bias": "yes"})), @r#"`[dir]/2_Dense/config.json`: `bias` is "yes"; expected true or false"#);
    let folder = copy("st-dense");
    std::fs::remove_file(folder.file("2_Dense/model.safetensors")).expect("it was there");
    assert_snapshot!(refused(&folder), @"`[dir]/2_Dense` contains none of `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin` and `pytorch_model.bin.index.json`; expected a checkpoint folder as published on the Hugging Face hub. It has no weights at all");
}

#[test]
fn what_vocabularies_and_tokens_weigh_is_read_as_it_is_computed() {
    let with = |changes: Value| {
        let folder = copy("st-splade");
        change(&folder, "1_SpladePooling/config.json", changes);
        refused(&folder)
    };
    assert_snapshot!(with(json!({"pooling_strategy": "sum"})), @r#"`[dir]/1_SpladePooling/config.json`: `pooling_strategy` is "sum"; expected max"#);
    assert_snapshot!(with(json!({"activation_function": "softplus"})), @r#"`[dir]/1_SpladePooling/config.json`: `activation_function` is "softplus"; expected relu or log1p_relu"#);
    let folder = copy("st-splade");
    let dense = Engine::from_checkpoint(folder.path())
        .device(DeviceChoice::Cpu)
        .outputs(["sentence_embedding"])
        .build();
    assert_snapshot!(folder.text(&dense.err().expect("it is refused")), @"`[dir]` specifies the output `sparse`, not `sentence_embedding`; request the output `sparse`");
    // If a file cannot be read, only the outputs that need it are refused.
    let folder = copy("st-m3");
    let file = folder.file("sparse_linear.safetensors");
    std::fs::rename(&file, file.with_extension("pt")).expect("it is there");
    let built = |output: &str| {
        let built = Engine::from_checkpoint(folder.path())
            .device(DeviceChoice::Cpu)
            .outputs([output])
            .build();
        built.map_err(|e| folder.text(&e))
    };
    assert_snapshot!(built("sparse").err().expect("it is refused"), @"`[dir]/sparse_linear.pt` cannot be read as weights of PyTorch: it is no file of torch.save: it does not begin as a zip archive; if it was cut short, download it again");
    built("colbert").expect("its file is there");
    built("sentence_embedding").expect("it reads neither");
    std::fs::remove_file(file.with_extension("pt")).expect("it is there");
    assert_snapshot!(built("sparse").err().expect("it is refused"), @"`[dir]/model.safetensors` lacks 2 of the 39 tensors that the model needs: `sparse_linear.weight`, `sparse_linear.bias`; is it a checkpoint of this model, with its own config.json?");
}

#[test]
fn what_a_ranker_that_reads_conversations_lacks_is_named() {
    let with = |changes: Value| {
        let folder = copy("ce-qwen");
        change(&folder, "1_LogitScore/config.json", changes);
        refused(&folder)
    };
    assert_snapshot!(with(json!({"true_token_id": null})), @"`[dir]/1_LogitScore/config.json`: there is no `true_token_id`");
    assert_snapshot!(with(json!({"false_token_id": -1})), @"`[dir]/1_LogitScore/config.json`: `false_token_id` is -1; expected the id of a token");
    assert_snapshot!(with(json!({"true_token_id": 100_000})), @"shapes do not match: `1_LogitScore.yes` (slice_columns): columns 100000..100001 exceed the width of 341; operands are `next_token_logits` [batch, 341]");
    const PAIR: [(&str, &str); 1] = [("a query", "a document")];
    let pair = |folder: &Folder| {
        let encoder = TextEncoder::open(folder.path())?;
        encoder.encode_pairs(&PAIR, Prompt::Default)
    };
    let error = |folder: &Folder| folder.text(&pair(folder).expect_err("it is refused"));
    let folder = copy("ce-qwen");
    let template = "{% for m in messages %}{{ m.content if m.role != 'document' }}{% endfor %}";
    folder.write("chat_template.jinja", template);
    assert_snapshot!(error(&folder), @"`[dir]/chat_template.jinja` has no usable chat template: it leaves out the document of a pair, given as messages with the roles `query` and `document`; use the template that the ranker was published with");
    std::fs::remove_file(folder.file("chat_template.jinja")).expect("it is there");
    assert_snapshot!(error(&folder), @"`[dir]/` has no usable chat template: it has neither chat_template.jinja nor `chat_template` in tokenizer_config.json; the model is not a chat model: give it a plain prompt");
    std::fs::remove_file(folder.file("modules.json")).expect("it is there");
    assert_snapshot!(error(&folder), @"`[dir]/config.json`: the model generates text, and no modules.json specifies how it scores pairs; expected a LogitScore module and a chat template for a query and a document, which `CrossEncoder(DIR).save(DIR)` of sentence-transformers writes");
    let own = "sentence_bert_config.json";
    let folder = copy("ce-qwen");
    change(
        &folder,
        own,
        json!({"processing_kwargs": {"text": {"max_length": 5}}}),
    );
    assert_snapshot!(error(&folder), @r#"`[dir]/sentence_bert_config.json`: `processing_kwargs` is {"text":{"max_length":5}}; expected values of `chat_template` alone"#);
    change(
        &folder,
        own,
        json!({"processing_kwargs": {"chat_template": {"max_length": 5}}}),
    );
    assert_snapshot!(error(&folder), @r#"`[dir]/sentence_bert_config.json`: `processing_kwargs` is {"chat_template":{"max_length":5}}; expected only variables of the template, not `max_length`"#);
    change(
        &folder,
        own,
        json!({"modality_config": {"message": {"method": "forward"}}}),
    );
    assert_snapshot!(error(&folder), @r#"`[dir]/sentence_bert_config.json`: `modality_config` is {"message":{"method":"forward"}}; expected a `format` of `message` that is flat or structured"#);
    // With the format `structured`, a message's content is a list of parts. Adapt the template to this list. The text is then that of the
    // original template with the original format.
    let written = copy("ce-qwen");
    let folder = copy("ce-qwen");
    let config = json!({"modality_config": {"message": {"format": "structured"}}});
    change(&folder, own, config);
    let source = std::fs::read_to_string(folder.file("chat_template.jinja")).expect("a template");
    let source = source.replace(
        "map(attribute=\"content\") | first }}",
        "map(attribute=\"content\") | first | map(attribute=\"text\") | first }}",
    );
    folder.write("chat_template.jinja", source);
    let ids = |folder: &Folder| {
        pair(folder)
            .expect("both are written down")
            .token_ids()
            .to_vec()
    };
    assert_eq!(ids(&folder), ids(&written));
}

#[test]
fn settings_of_modules_that_are_not_known_are_named() {
    let with = |name: &str, file: &str, changes: Value| {
        let folder = copy(name);
        change(&folder, file, changes);
        refused(&folder)
    };
    let pooling = "1_Pooling/config.json";
    assert_snapshot!(with(
        "st-mean",
        pooling,
        json!({"pooling_mode_median_tokens": true})
    ), @"`[dir]/1_Pooling/config.json`: `pooling_mode_median_tokens` is not known (did you mean `pooling_mode_mean_tokens`?); remove it if it has no effect on the results");
    assert_snapshot!(with("st-mean", pooling, json!({"include_promt": false})), @"`[dir]/1_Pooling/config.json`: `include_promt` is not known (did you mean `include_prompt`?); remove it if it has no effect on the results");
    assert_snapshot!(with(
        "st-dense",
        "2_Dense/config.json",
        json!({"dropout": 0.5})
    ), @"`[dir]/2_Dense/config.json`: `dropout` is not known; remove it if it has no effect on the results");
    assert_snapshot!(with(
        "st-splade",
        "1_SpladePooling/config.json",
        json!({"top_k": 5})
    ), @"`[dir]/1_SpladePooling/config.json`: `top_k` is not known; remove it if it has no effect on the results");
    assert_snapshot!(with(
        "ce-qwen",
        "1_LogitScore/config.json",
        json!({"scale": 2})
    ), @"`[dir]/1_LogitScore/config.json`: `scale` is not known; remove it if it has no effect on the results");
    assert_snapshot!(with(
        "st-max",
        "2_Normalize/config.json",
        json!({"module_output_name": "other"})
    ), @r#"`[dir]/2_Normalize/config.json`: `module_output_name` is "other"; expected `sentence_embedding`"#);
    assert_snapshot!(with("st-max", "2_Normalize/config.json", json!({"p": 1})), @"`[dir]/2_Normalize/config.json`: `p` is not known; remove it if it has no effect on the results");
    let own = "config_sentence_transformers.json";
    assert_snapshot!(with("st-mean", own, json!({"normalize_embeddings": true})), @"`[dir]/config_sentence_transformers.json`: `normalize_embeddings` is not known; remove it if it has no effect on the results");
    assert_snapshot!(with("st-mean", own, json!({"max_active_dims": 8})), @"`[dir]/config_sentence_transformers.json`: `max_active_dims` is 8; expected null, as gemmule keeps all weights");
    let transformer = "sentence_bert_config.json";
    assert_snapshot!(with(
        "st-mean",
        transformer,
        json!({"model_args": {"variant": "fp16"}})
    ), @"`[dir]/sentence_bert_config.json`: `model_args`: `variant` is not known; remove it if it has no effect on the results");
    assert_snapshot!(with("st-mean", transformer, json!({"query_length": 8})), @"`[dir]/sentence_bert_config.json`: `query_length` is 8; expected null, as gemmule does not apply it");
    assert_snapshot!(with(
        "st-mean",
        transformer,
        json!({"modality_config": {"text": {"method": "get_text_features"}}})
    ), @r#"`[dir]/sentence_bert_config.json`: `modality_config` is {"text":{"method":"get_text_features"}}; expected the method `forward` of `text`, and its output `last_hidden_state` or `logits`"#);
    let folder = copy("st-mean");
    let module = |more: Value| {
        let mut module =
            json!({"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"});
        for (key, value) in more.as_object().expect("an object") {
            module[key] = value.clone();
        }
        let first = json!({"path": "", "type": "sentence_transformers.models.Transformer"});
        folder.write("modules.json", json!([first, module]).to_string());
        refused(&folder)
    };
    assert_snapshot!(module(json!({"kwargs": ["task"]})), @r#"`[dir]/modules.json`: `kwargs` of the module `sentence_transformers.models.Pooling` is ["task"]; gemmule gives modules no arguments, so expected none"#);
    assert_snapshot!(module(json!({"revision": "main"})), @"`[dir]/modules.json`: `revision` is not known; remove it if it has no effect on the results");
}

#[test]
fn sizes_of_folders_have_a_range() {
    let with = |name: &str, file: &str, changes: Value| {
        let folder = copy(name);
        change(&folder, file, changes);
        refused(&folder)
    };
    let dense = "2_Dense/config.json";
    assert_snapshot!(with("st-dense", dense, json!({"in_features": 4_000_000_000u32})), @"`[dir]/2_Dense/config.json`: `in_features` is 4000000000; expected a whole number from 1 to 1048576");
    assert_snapshot!(with("st-dense", dense, json!({"out_features": -1})), @"`[dir]/2_Dense/config.json`: `out_features` is -1; expected a whole number from 1 to 1048576");
    let own = "config_sentence_transformers.json";
    assert_snapshot!(with("st-mean", own, json!({"truncate_dim": 1e9})), @"`[dir]/config_sentence_transformers.json`: `truncate_dim` is 1000000000.0; expected a whole number from 1 to 1048576");
    let transformer = "sentence_bert_config.json";
    assert_snapshot!(with("st-mean", transformer, json!({"max_seq_length": 16_777_217})), @"`[dir]/sentence_bert_config.json`: `max_seq_length` is 16777217; expected a whole number from 1 to 16777216");
    assert_snapshot!(with("st-mean", transformer, json!({"processing_kwargs": {"text": {"max_length": 0}}})), @"`[dir]/sentence_bert_config.json`: `max_length` is 0; expected a whole number from 1 to 16777216");
}

/// Returns the sentence embeddings that the model of a folder computes for two fixed texts.
fn embeddings(folder: &Folder) -> Vec<f32> {
    let built = Engine::from_checkpoint(folder.path())
        .device(DeviceChoice::Cpu)
        .outputs(["sentence_embedding"])
        .build();
    let engine = built.unwrap_or_else(|e| panic!("{}", folder.text(&e)));
    let encoder = TextEncoder::open(folder.path()).expect("a tokenizer");
    let batch = encoder.encode(&["the train to the coast", "rain"]);
    let mut session = engine.session().expect("a session");
    let outputs = session.run(&batch.expect("texts")).expect("they run");
    let output = outputs.get("sentence_embedding").expect("it is computed");
    output.values.clone()
}

#[test]
fn a_dropout_computes_nothing() {
    let folder = copy("st-cls");
    let right = embeddings(&folder);
    let text = std::fs::read_to_string(folder.file("modules.json")).expect("it is there");
    let mut modules: Value = serde_json::from_str(&text).expect("it is JSON");
    let entry = json!({"idx": 2, "name": "2", "path": "2_Dropout", "type": "sentence_transformers.models.Dropout"});
    modules.as_array_mut().expect("a list").push(entry);
    folder.write("modules.json", modules.to_string());
    std::fs::create_dir(folder.file("2_Dropout")).expect("room for a folder");
    folder.write("2_Dropout/config.json", r#"{"dropout": 0.3}"#);
    assert_eq!(embeddings(&folder), right);
    folder.write("2_Dropout/config.json", r#"{"dropout": 0.3, "p": 1}"#);
    assert_snapshot!(refused(&folder), @"`[dir]/2_Dropout/config.json`: `p` is not known; remove it if it has no effect on the results");
}

#[test]
fn the_pooling_of_a_folder_counts_without_a_list_of_modules() {
    let folder = copy("st-cls");
    let right = embeddings(&folder);
    std::fs::remove_file(folder.file("modules.json")).expect("it is there");
    let got = embeddings(&folder);
    for (right, got) in right.chunks(32).zip(got.chunks(32)) {
        let length = right.iter().map(|x| x * x).sum::<f32>().sqrt();
        for (right, got) in right.iter().zip(got) {
            assert!((right / length - got).abs() < 1e-5, "{right} {got}");
        }
    }
    // The folder also limits the length of texts, to 32 tokens.
    let encoder = TextEncoder::open(folder.path()).expect("a tokenizer");
    let batch = encoder.encode(&["rain ".repeat(60)]).expect("a text");
    assert_eq!(batch.lens(), [32]);
    change(
        &folder,
        "1_Pooling/config.json",
        json!({"pooling_mode": "median"}),
    );
    assert_snapshot!(refused(&folder), @"`[dir]/1_Pooling/config.json`: pooling by `median` is not known; gemmule pools by cls, max, mean, mean_sqrt_len_tokens, weightedmean and lasttoken");
}

#[test]
fn what_a_folder_has_in_place_of_weights_is_named_with_the_way_out() {
    let with = |files: &[(&str, &str)]| {
        let folder = copy("st-cls");
        std::fs::remove_file(folder.file("model.safetensors")).expect("it is there");
        for (file, text) in files {
            let parent = folder.file(file);
            std::fs::create_dir_all(parent.parent().expect("a folder")).expect("room");
            folder.write(file, text);
        }
        refused(&folder)
    };
    assert_snapshot!(with(&[("pytorch_model.bin", "")]), @"`[dir]/pytorch_model.bin` cannot be read as weights of PyTorch: it is no file of torch.save: it does not begin as a zip archive; if it was cut short, download it again");
    assert_snapshot!(with(&[("pytorch_model.bin.index.json", "{}")]), @"`[dir]/pytorch_model.bin.index.json` is not an index of shards: there is no `weight_map`; expected an object with a `weight_map`");
    assert_snapshot!(with(&[("model-q4.gguf", "")]), @"`[dir]/` contains none of `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin` and `pytorch_model.bin.index.json`; expected a checkpoint folder as published on the Hugging Face hub. It has `model-q4.gguf`, a whole model of llama.cpp; give the path of this file instead of the folder");
    assert_snapshot!(with(&[("onnx/model.onnx", "")]), @"`[dir]/` contains none of `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin` and `pytorch_model.bin.index.json`; expected a checkpoint folder as published on the Hugging Face hub. It has `[dir]/onnx/model.onnx`, an exported graph, which gemmule does not read; use the folder that it was exported from");
    assert_snapshot!(with(&[("tf_model.h5", "")]), @"`[dir]/` contains none of `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin` and `pytorch_model.bin.index.json`; expected a checkpoint folder as published on the Hugging Face hub. It has `tf_model.h5`, weights of another framework; convert them with transformers 4: CLASS.from_pretrained(FOLDER, from_tf=True) or from_flax=True, and save_pretrained(FOLDER)");
    assert_snapshot!(with(&[(
        "adapter_config.json",
        r#"{"base_model_name_or_path": "org/base"}"#
    )]), @"`[dir]/` contains none of `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin` and `pytorch_model.bin.index.json`; expected a checkpoint folder as published on the Hugging Face hub. It has an adapter of `org/base`; merge it into its model first: peft.AutoPeftModel.from_pretrained(FOLDER).merge_and_unload().save_pretrained(NEW) in Python");
    assert_snapshot!(with(&[("consolidated.safetensors", "")]), @"`[dir]/` contains none of `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin` and `pytorch_model.bin.index.json`; expected a checkpoint folder as published on the Hugging Face hub. It has `consolidated.safetensors`, a file name that is not recognized; if its tensors have transformers' names, rename it to `model.safetensors`, else use the file of that name from the same model");
    assert_snapshot!(with(&[("model-00001-of-00002.safetensors", "")]), @"`[dir]/` contains none of `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin` and `pytorch_model.bin.index.json`; expected a checkpoint folder as published on the Hugging Face hub. It has `model-00001-of-00002.safetensors` without `model.safetensors.index.json`, which lists the tensors of each shard; download it too");
    assert_snapshot!(with(&[("0_Transformer/model.safetensors", "")]), @"`[dir]/` contains none of `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin` and `pytorch_model.bin.index.json`; expected a checkpoint folder as published on the Hugging Face hub. It has weights in `[dir]/0_Transformer`; give that folder: `[dir]/0_Transformer`");
    // These folders have neither a config.json nor a tokenizer.json. Opening the tokenizer gives the same error as loading the model.
    let alone = |file: &str| {
        let folder = Folder::new();
        folder.write(file, r#"{"base_model_name_or_path": "org/base"}"#);
        let opened = TextEncoder::open(folder.path()).err().expect("refused");
        assert_eq!(folder.text(&opened), refused(&folder));
        refused(&folder)
    };
    assert_snapshot!(alone("adapter_config.json"), @"`[dir]`: there is no config.json; expected a checkpoint folder as published on the Hugging Face hub. It has an adapter of `org/base`; merge it into its model first: peft.AutoPeftModel.from_pretrained(FOLDER).merge_and_unload().save_pretrained(NEW) in Python");
    assert_snapshot!(alone("model.gguf"), @"[dir]/model.gguf: it is no GGUF file: it does not begin with `GGUF`; if it was cut short, download it again");
}

#[test]
fn what_the_server_has_no_route_for_is_named_by_its_task() {
    let folder = copy("hf-clip");
    let text = std::fs::read_to_string(folder.file("config.json")).expect("it is there");
    let mut config: Value = serde_json::from_str(&text).expect("it is JSON");
    config["architectures"] = json!(["CLIPTextModel"]);
    folder.write("config.json", config.to_string());
    let opened = gemmule::text::Folder::open(folder.path()).expect("it is whole");
    let outputs = gemmule::serve::Model::outputs(&opened, []);
    let error = outputs.expect_err("there is no route");
    assert_snapshot!(folder.text(&error), @"`[dir]` is a model for other tasks than embeddings, scores, text generation, entities and answers, and the server has no route for that; `gemmule run` and the library's `Session::run` compute its `last_hidden_state` and `pooler_output`");
}

#[test]
fn tokens_behind_the_end_of_a_sequence_have_no_rows() {
    let folder = copy("hf-clip");
    let text = std::fs::read_to_string(folder.file("config.json")).expect("it is there");
    let mut config: Value = serde_json::from_str(&text).expect("it is JSON");
    config["text_config"]["eos_token_id"] = json!(7);
    folder.write("config.json", config.to_string());
    let run = |outputs: &[&str], ids: &[&[u32]]| {
        let built = Engine::from_checkpoint(folder.path()).device(DeviceChoice::Cpu);
        let engine = built
            .outputs(outputs.iter().copied())
            .build()
            .expect("it is whole");
        let batch = gemmule::Batch::from_sequences(ids).expect("a batch");
        engine.session().expect("a session").run(&batch)
    };
    let pooled = |ids: &[&[u32]]| {
        let outputs = run(&["text_embeds"], ids).expect("it runs");
        outputs
            .get("text_embeds")
            .expect("it is there")
            .values
            .clone()
    };
    let padded: [&[u32]; 2] = [&[0, 40, 30, 7, 7, 7], &[0, 9, 7, 12, 7]];
    assert_eq!(pooled(&padded), pooled(&[&[0, 40, 30, 7], &[0, 9, 7]]));
    let error = run(&["last_hidden_state", "text_embeds"], &padded).expect_err("refused");
    assert_snapshot!(error.to_string(), @"sequence 0 ends with its token 3, and 2 more tokens follow, for which the requested outputs would have rows; remove them, or request only outputs with one row per sequence");
    // Without the pooled output, tokens after the end token are accepted, and have rows in the output like all other tokens.
    let all = run(&["last_hidden_state"], &padded).expect("it runs");
    assert_eq!(
        all.get("last_hidden_state").expect("it is there").shape,
        [11, 32]
    );
}

#[test]
fn prompts_go_by_their_names() {
    let encoder = TextEncoder::open(&published("st-mean")).expect("a tokenizer");
    let error = |prompt| {
        encoder
            .encode_with(&["a text"], prompt)
            .expect_err("refused")
            .to_string()
    };
    assert_snapshot!(error(Prompt::Named("querry")), @"there is no prompt `querry` (did you mean `query`?); the folder has document, query");
    assert_snapshot!(error(Prompt::Named("passage")), @"there is no prompt `passage`; the folder has document, query");
    let folder = copy("st-mean");
    let own = "config_sentence_transformers.json";
    change(&folder, own, json!({"default_prompt_name": "passage"}));
    assert_snapshot!(refused(&folder), @"`[dir]/config_sentence_transformers.json`: `default_prompt_name` is `passage`, and there is no such prompt");
    change(
        &folder,
        own,
        json!({"default_prompt_name": null, "prompts": {"query": 3}}),
    );
    assert_snapshot!(refused(&folder), @"`[dir]/config_sentence_transformers.json`: the prompt `query` is not a string");
}

#[test]
fn a_prompt_that_pooling_leaves_out_needs_tokens_after_it_and_a_pooling_without_weights() {
    let encoder = TextEncoder::open(&published("st-default-prompt")).expect("a tokenizer");
    let folder = copy("st-instructor");
    let own = "1_Pooling/config.json";
    change(&folder, own, json!({"pooling_mode": "weightedmean"}));
    assert_snapshot!(refused(&folder), @"`[dir]/1_Pooling/config.json`: `include_prompt` is false; expected true with pooling by `weightedmean`");
    let plain = Engine::from_checkpoint(published("st-mean"))
        .device(DeviceChoice::Cpu)
        .build();
    let mut session = plain.expect("it loads").session().expect("a session");
    let batch = encoder.encode(&["a text"]).expect("it has tokens");
    assert_eq!(batch.left_out(), Some(&[3][..]));
    let none_left = batch.clone().with_left_out(batch.lens().to_vec());
    assert_snapshot!(none_left.expect_err("no token remains"), @"pooling leaves out 6 of the 6 tokens of sequence 0; expected fewer, so that a token remains");
    assert_snapshot!(session.run(&batch).expect_err("it pools all"), @"tokens of a prompt are to be left out of pooling, but the model pools all tokens; expected a checkpoint folder with `include_prompt: false`, or a batch without `with_left_out`");
    let alone = encoder
        .encode_with(&["a text"], Prompt::Text(""))
        .expect("nothing to leave out");
    let mean = TextEncoder::open(&published("st-mean")).expect("a tokenizer");
    assert_eq!(
        alone.lens(),
        mean.encode(&["a text"]).expect("a text").lens()
    );
}

#[test]
fn routes_of_a_router_that_are_not_loaded_are_refused() {
    let encoder = TextEncoder::open(&published("st-router")).expect("a tokenizer");
    let told = encoder.encode_with(&["a text"], Prompt::Named("query"));
    let root = published("").display().to_string();
    let told = told.expect_err("it is for documents").to_string();
    assert_snapshot!(told.replace(&root, "[checkpoints]/"), @"texts for `query` have the route `query` in the Router of `[checkpoints]/st-router`, and the route `document` is loaded; load the model for the task `query` (in Rust `Builder::task`, on the command line --role or --task)");
    let open = |name: &str, task: &str| {
        let built = Engine::from_checkpoint(published(name)).task(task).build();
        let told = built.err().expect("there is no such route").to_string();
        told.replace(&root, "[checkpoints]/")
    };
    assert_snapshot!(open("st-router", "querry"), @"the Router of `[checkpoints]/st-router` has no route for the task `querry` (did you mean `query`?); its routes are document, query");
    assert_snapshot!(open("st-mean", "query"), @"the task `query` was given, and `[checkpoints]/st-mean` computes all tasks in the same way; leave the task out");
    let folder = copy("st-router");
    let with = |change_of: Value| {
        change(
            &folder,
            "router_config.json",
            json!({"parameters": change_of}),
        );
        refused(&folder)
    };
    assert_snapshot!(with(json!({"default_route": "documents"})), @r#"`[dir]/router_config.json`: `default_route` is "documents"; expected the name of a route"#);
    assert_snapshot!(with(json!({"allow_empty_key": true})), @"`[dir]/router_config.json`: `default_route` is null; expected the name of a route");
    assert_snapshot!(with(json!({"default_route": "document", "route_mappings": {"None, 'text'": "query"}})), @r#"`[dir]/router_config.json`: `route_mappings` is {"None, 'text'":"query"}; expected routes by the task and the kind of input, such as {"('query', 'text')": "query"}"#);
    assert_snapshot!(with(json!({"default_route": "document", "route_mappings": {"(None, 'text')": "other"}})), @"`[dir]/router_config.json`: `route_mappings` names the route `other`, which is not in `structure`");
    let folder = copy("st-router");
    change(
        &folder,
        "query_0_SparseStaticEmbedding/config.json",
        json!({"path": "idf.json"}),
    );
    assert!(Engine::from_checkpoint(folder.path()).build().is_ok());
    let built = Engine::from_checkpoint(folder.path()).task("query").build();
    let told = built.err().expect("its weights are elsewhere");
    assert_snapshot!(folder.text(&told), @r#"`[dir]/query_0_SparseStaticEmbedding/config.json`: `path` is "idf.json"; expected null, with the weights in model.safetensors, as `SparseEncoder.save_pretrained` of sentence-transformers writes them"#);
}

#[test]
fn adapters_have_names_and_shapes() {
    let folder = copy("st-adapters");
    let told = |task: &str| {
        let builder = Engine::from_checkpoint(folder.path()).device(DeviceChoice::Cpu);
        folder.text(&builder.task(task).build().err().expect("it is refused"))
    };
    assert_snapshot!(told("retrieval.querry"), @"the checkpoint `[dir]` has no adapter for the task `retrieval.querry` (did you mean `retrieval.query`?); its adapters are retrieval.query, retrieval.passage, separation, text-matching");
    change(&folder, "config.json", json!({"lora_rank": 0}));
    assert_snapshot!(told("separation"), @"`lora_rank` in config.json is 0; expected a positive number");
    change(
        &folder,
        "config.json",
        json!({"lora_rank": 4, "lora_adaptations": ["separation"]}),
    );
    assert_snapshot!(told("separation"), @"`[dir]/model.safetensors`: the adapters of `roberta.embeddings.token_type_embeddings.weight` cannot be read: it has 4 adapters, and config.json names 1");
    change(
        &folder,
        "config.json",
        json!({"lora_adaptations": null, "auto_map": null}),
    );
    assert_snapshot!(refused(&folder), @"`[dir]/modules.json`: the first module is `custom_st.Transformer`; expected a Transformer, a StaticEmbedding or a SparseStaticEmbedding");
}

#[test]
fn late_chunking_needs_a_mean_and_room() {
    let root = published("").display().to_string();
    let told = |name: &str, chunks: &[&str]| {
        let encoder = TextEncoder::open(&published(name)).expect("a tokenizer");
        let chunks = encoder.encode_chunks(chunks, Prompt::Default);
        let told = chunks.expect_err("it is refused").to_string();
        told.replace(&root, "[checkpoints]/")
    };
    let refused = |name: &str| told(name, &["a"]);
    assert_snapshot!(refused("st-cls"), @"late chunking pools the tokens of each chunk by their mean, and the model of `[checkpoints]/st-cls` pools tokens in another way, in `1_Pooling`; embed the texts separately");
    assert_snapshot!(refused("st-default-prompt"), @"late chunking pools the tokens of each chunk by their mean, and the model of `[checkpoints]/st-default-prompt` leaves prompts out of pooling; embed the texts separately");
    assert_snapshot!(refused("st-t5"), @"late chunking pools the tokens of each chunk by their mean, and the model of `[checkpoints]/st-t5` has the module `2_Dense` after the pooling; embed the texts separately");
    assert_snapshot!(refused("late-bert"), @"late chunking pools the tokens of each chunk by their mean, and the model of `[checkpoints]/late-bert` has a vector for each token already; embed the texts separately");
    assert_snapshot!(refused("hf-gamma"), @"late chunking pools the tokens of each chunk by their mean, and the model of `[checkpoints]/hf-gamma` has no modules.json, which would specify the mean of tokens; embed the texts separately");
    assert_snapshot!(told("st-mean", &["a b c d e f", "g h i j k l m n", "o p q r s t u v w x y z"]), @"late chunking processes all chunks as one text, but together they have more than 16 tokens, the model's maximum; give fewer or shorter chunks");
    assert_snapshot!(told("st-mean", &["a", ""]), @"text 1 cannot be tokenized: it has no tokens");
}

#[test]
fn scores_need_logits_and_a_known_activation() {
    let folder = copy("ce-one");
    change(
        &folder,
        "config.json",
        json!({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Softplus"}),
    );
    assert_snapshot!(refused(&folder), @r#"`[dir]/config.json`: `sbert_ce_default_activation_function` is "torch.nn.modules.activation.Softplus"; expected Identity, Sigmoid or Tanh of torch.nn"#);
    let engine = Engine::from_checkpoint(published("st-mean"))
        .device(DeviceChoice::Cpu)
        .build();
    let engine = engine.expect("it is whole");
    let batch = gemmule::Batch::from_sequences(&[[2u32, 5, 3]]).expect("a batch");
    let outputs = engine
        .session()
        .expect("a session")
        .run(&batch)
        .expect("it runs");
    assert_snapshot!(engine.scores(&outputs).expect_err("there are none").to_string(), @"there are no scores: the run has no output `sequence_logits`, the default output of a cross-encoder");
}

#[test]
fn the_length_of_texts_is_said_once() {
    let folder = copy("st-mean");
    folder.write("sentence_other_config.json", "{}");
    assert_snapshot!(refused(&folder), @"`[dir]/sentence_bert_config.json`: 2 files match `sentence_…_config.json`, so the maximum text length is ambiguous; keep one of them");
    let folder = copy("st-mean");
    folder.write("sentence_bert_config.json", r#"{"max_seq_length": 0}"#);
    assert_snapshot!(refused(&folder), @"`[dir]/sentence_bert_config.json`: `max_seq_length` is 0; expected a whole number from 1 to 16777216");
    let folder = copy("ce-new");
    change(
        &folder,
        "tokenizer_config.json",
        json!({"truncation_side": "middle"}),
    );
    let error = TextEncoder::open(folder.path())
        .err()
        .expect("it is refused");
    assert_snapshot!(folder.text(&error), @r#"`[dir]/tokenizer_config.json`: `truncation_side` is "middle"; expected left or right"#);
}

#[test]
fn a_padding_token_in_a_text_is_refused_where_positions_leave_it_out() {
    // transformers counts positions only at tokens that are not padding. All padding tokens have the same position, just before that of the
    // first other token.
    let folder = published("st-xlmr");
    let engine = Engine::from_checkpoint(&folder)
        .device(DeviceChoice::Cpu)
        .build();
    let engine = engine.expect("it is whole");
    let encoder = TextEncoder::open(&folder).expect("a tokenizer");
    let batch = encoder
        .encode(&["a text", "rain <pad> snow"])
        .expect("texts");
    let error = engine
        .session()
        .expect("a session")
        .run(&batch)
        .expect_err("refused");
    assert_snapshot!(error.to_string(), @"sequence 1, token 2: the id 1 is the model's padding token, which has no position; remove it from the sequence");
}
