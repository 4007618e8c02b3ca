//! Tests of the shipped descriptions.

use serde_json::{Value, json};

use crate::{
    graph::Op,
    model::{Description, Model},
};

/// Small sizes under the keys of all model families.
fn config() -> Value {
    let sizes = r#"{
        "vocab_size": 1003, "max_position_embeddings": 40, "type_vocab_size": 2,
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
        "intermediate_size": 50, "embedding_size": 16, "pad_token_id": 1, "num_key_value_heads": 3,
        "n_layers": 2, "n_heads": 3, "max_seq_len": 40, "attention_heads": 3, "input_embedding_size": 16, "output_embedding_size": 20,
        "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
        "decoder_attention_heads": 3, "encoder_ffn_dim": 50, "decoder_ffn_dim": 60,
        "latent_size": 5, "num_layers": 2, "num_heads": 3, "d_kv": 8, "d_ff": 50, "rope_theta": 10000,
        "activation_function": "gelu_new", "rotary_dim": 4, "n_positions": 40, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 50,
        "ffn_dim": 50, "relative_attention": true, "share_att_key": true, "norm_rel_ebd": "layer_norm", "pos_att_type": ["c2p", "p2c"]
    }"#;
    serde_json::from_str(sizes).expect("JSON")
}

/// Descriptions of decoder-only models: name, prefix of weight names, and launches per layer.
const WRITERS: [(&str, &str, usize); 38] = [
    ("arcee", "model.", 10),
    ("biogpt", "biogpt.", 7),
    ("cohere2", "model.", 9),
    ("ernie4_5", "model.", 10),
    ("exaone", "transformer.", 10),
    ("exaone4", "model.", 14),
    ("glm", "model.", 10),
    ("gpt_bigcode", "transformer.", 7),
    ("gpt_neo", "transformer.", 7),
    ("helium", "model.", 10),
    ("hunyuan_v1_dense", "model.", 12),
    ("mpt", "transformer.", 7),
    ("nemotron", "model.", 10),
    ("olmo", "model.", 10),
    ("openai_gpt", "transformer.", 7),
    ("seed_oss", "model.", 10),
    ("xglm", "model.", 7),
    ("bloom", "transformer.", 7),
    ("gemma", "model.", 10),
    ("gemma2", "model.", 14),
    ("gpt2", "transformer.", 7),
    ("gpt_neox", "gpt_neox.", 9),
    ("gptj", "transformer.", 8),
    ("falcon", "transformer.", 8),
    ("cohere", "model.", 9),
    ("granite", "model.", 14),
    ("internlm3", "model.", 10),
    ("llama", "model.", 10),
    ("olmo2", "model.", 14),
    ("olmo3", "model.", 14),
    ("opt", "model.", 7),
    ("phi", "model.", 8),
    ("phi3", "model.", 10),
    ("qwen2", "model.", 10),
    ("qwen3", "model.", 12),
    ("smollm3", "model.", 10),
    ("stablelm", "model.", 10),
    ("starcoder2", "model.", 9),
];

/// Descriptions of encoder-decoder models.
const TRANSLATORS: [&str; 9] = [
    "marian",
    "bart",
    "mbart",
    "m2m_100",
    "pegasus",
    "t5",
    "vae",
    "blenderbot",
    "blenderbot_small",
];

/// Descriptions whose weight name prefixes do not follow from their names.
const PREFIXES: [(&str, &[&str]); 19] = [
    ("roberta", &["", "roberta.", "data2vec_text.", "luke."]),
    ("megatron_bert", &["", "bert."]),
    ("modernbert_decoder", &["", "model."]),
    ("vae", &[""]),
    ("bart_classifier", &["", "model."]),
    ("static_embedding", &[""]),
    ("sparse_static_embedding", &[""]),
    ("xlm_roberta_flash", &["", "roberta."]),
    ("t5", &[""]),
    ("nomic_bert", &["", "bert.", "nomic_bert."]),
    ("modernbert", &["", "model."]),
    ("eurobert", &["", "model."]),
    ("neobert", &["", "model."]),
    ("jina_bert", &["", "bert."]),
    ("xlm_roberta_xl", &["", "roberta."]),
    ("gte", &["", "new.", "gte."]),
    ("deberta_v2", &["", "deberta."]),
    ("gemma3_text", &["", "model."]),
    ("clip_text", &["", "text_model."]),
];

/// Descriptions in which the number of launches per layer is unusual, with the numbers of the first two layers.
const OTHER_LAYERS: [(&str, [usize; 2]); 10] = [
    ("modernbert_decoder", [9, 10]),
    ("roformer", [9, 9]),
    ("nomic_bert", [10, 10]),
    ("modernbert", [9, 10]),
    ("eurobert", [10, 10]),
    ("jina_bert", [8, 8]),
    ("gte", [10, 10]),
    ("deberta_v2", [17, 17]),
    ("gemma3_text", [16, 16]),
    ("t5", [7, 7]),
];

/// Descriptions that state no expected launches per layer.
const WITHOUT_COUNTS: [&str; 5] = [
    "bart_classifier",
    "static_embedding",
    "sparse_static_embedding",
    "deberta",
    "neobert",
];

/// Descriptions of models without a maximum sequence length.
const WITHOUT_POSITIONS: [&str; 2] = ["static_embedding", "sparse_static_embedding"];

/// Name of a description, a key for which it requires an unusual value, and this value.
const OWN_VALUES: [(&str, &str, &str); 6] = [
    ("gpt_neo", "attention_layers", r#"["global", "local"]"#),
    ("seed_oss", "head_dim", "8"),
    ("ernie4_5", "head_dim", "8"),
    ("internlm3", "head_dim", "8"),
    ("nomic_bert", "activation_function", "swiglu"),
    (
        "bart_classifier",
        "architectures",
        "BartForSequenceClassification",
    ),
];

fn build(name: &str, config: &Value, outputs: Option<&[&str]>) -> Model {
    let mut config = config.clone();
    for (_, key, value) in OWN_VALUES.iter().filter(|(own, ..)| *own == name) {
        config[*key] = match *key {
            "architectures" => json!([value]),
            _ => serde_json::from_str(value).unwrap_or_else(|_| json!(value)),
        };
    }
    let config = &config;
    let description = Description::shipped(name).expect("it is shipped");
    let description = description
        .map_err(miette::Report::new)
        .expect("it is right");
    let model = description.build(config, outputs);
    model
        .map_err(miette::Report::new)
        .expect("the sizes are right")
}

#[test]
fn shipped_models_match_their_snapshots() {
    for name in Description::shipped_names() {
        let all = Description::shipped(name)
            .expect("it is shipped")
            .expect("it is right");
        let model = build(name, &config(), Some(&all.output_names()));
        insta::assert_snapshot!(*name, model.graph.text());
        assert_eq!(model.name, *name);
        let written = WRITERS.iter().find(|(writer, ..)| writer == name);
        let prefix = match TRANSLATORS.contains(name) {
            true => "model.".to_owned(),
            false => written.map_or(format!("{name}."), |&(_, prefix, _)| prefix.to_owned()),
        };
        let prefixes = &model.weight_names.prefixes;
        match PREFIXES.iter().find(|(other, _)| other == name) {
            Some((_, own)) => assert_eq!(prefixes, own),
            None => assert_eq!(*prefixes, ["".to_owned(), prefix]),
        }
    }
}

#[test]
fn parts_share_only_weights_and_caches() {
    for name in TRANSLATORS {
        let model = build(name, &config(), Some(&["next_token_logits"]));
        let graph = &model.graph;
        let parts: Vec<&str> = graph.parts().iter().map(|p| p.name.as_str()).collect();
        assert_eq!(parts, ["encode", "decode"]);
        let order = graph.topological();
        let is_weight = |id| matches!(graph.op(id), Op::Weight(_));
        let computed = order.iter().filter(|&&id| !is_weight(id));
        // The parts are computed in order, and no value of a part is an operand in another part.
        let of: Vec<u32> = computed.clone().map(|&id| graph.node(id).part).collect();
        assert!(of.is_sorted());
        for &id in computed {
            let operands = graph.operands(id).into_iter();
            let mut operands = operands.filter(|&o| !is_weight(o));
            assert!(operands.all(|o| graph.node(o).part == graph.node(id).part));
        }
        let shared = order
            .iter()
            .find(|&&id| graph.node(id).name == "shared.weight");
        let readers = graph.consumers(*shared.expect("it is there"));
        assert_eq!(readers.len(), 3, "{name}");
        // Two layers, each with cached keys and values of the source and of the target.
        let is_cache = |&&id: &&crate::graph::NodeId| matches!(graph.op(id), Op::Cache { .. });
        assert_eq!(order.iter().filter(is_cache).count(), 8);
    }
}

#[test]
fn the_first_part_alone_is_a_plain_graph() {
    let model = build("bart", &config(), None);
    assert!(model.graph.parts().is_empty());
    assert!(!model.graph.text().contains("decoder"));
    assert_eq!(model.max_positions, Some(40));
}

#[test]
fn every_layer_has_the_expected_launches() {
    for name in Description::shipped_names() {
        let written = WRITERS.iter().find(|(writer, ..)| writer == name);
        let other = OTHER_LAYERS.iter().find(|(other, _)| other == name);
        let launches = match (other, written) {
            (Some(&(_, own)), _) => own,
            (None, Some(&(_, _, launches))) => [launches; 2],
            (None, None) if TRANSLATORS.contains(name) || WITHOUT_COUNTS.contains(name) => continue,
            (None, None) => [7; 2],
        };
        let model = build(name, &config(), None);
        let expected = model.expectations.iter();
        let layers = expected.filter(|e| e.scope.is_some() && e.what == "launches");
        assert!(layers.map(|e| e.n).eq(launches), "{name}");
    }
}

#[test]
fn outputs_that_are_not_requested_are_not_in_the_graph() {
    let default = build("bert", &config(), None);
    let names: Vec<&str> = default
        .graph
        .outputs()
        .iter()
        .map(|(n, _)| n.as_str())
        .collect();
    assert_eq!(names, ["last_hidden_state", "sentence_embedding"]);
    assert!(!default.graph.text().contains("cls.predictions"));
    assert!(!default.graph.text().contains("pooler"));
    let pooled = build("bert", &config(), Some(&["pooler_output"]));
    assert!(!pooled.graph.text().contains("mean_pool"));
}

#[test]
fn positions_of_some_families_start_after_the_padding_token() {
    let model = build("roberta", &config(), None);
    assert_eq!(model.max_positions, Some(38));
    assert!(model.graph.text().contains("embedding(offset=2) positions"));
    assert_eq!(build("bert", &config(), None).max_positions, Some(40));
}

#[test]
fn limits_of_the_inputs_are_known() {
    let model = build("bert", &config(), None);
    assert_eq!((model.vocab, model.type_rows), (1003, Some(2)));
    assert_eq!(build("distilbert", &config(), None).type_rows, None);
    assert_eq!(model.dims["head"], 8);
}

#[test]
fn a_length_dependent_base_limits_the_positions() {
    let longest = |factor: Value, trained: Value| {
        let mut config = config();
        config["rotary_scaling_factor"] = factor;
        config["max_trained_positions"] = trained;
        config["n_positions"] = json!(8192);
        config["max_position_embeddings"] = Value::Null;
        build("nomic_bert", &config, None).max_positions
    };
    assert_eq!(longest(Value::Null, json!(2048)), Some(8192));
    assert_eq!(longest(json!(2), json!(1024)), Some(1024));
    assert_eq!(longest(json!(4.0), Value::Null), Some(2048));
}

#[test]
fn every_family_is_limited_to_the_positions_of_config_json() {
    let names = Description::shipped_names().iter();
    for name in names.filter(|name| !WITHOUT_POSITIONS.contains(*name)) {
        let positions = build(name, &config(), None).max_positions;
        assert!(positions.is_some_and(|n| n <= 40), "{name}: {positions:?}");
    }
}

#[test]
fn family_specific_keys_precede_common_ones() {
    let own = json!({
        "vocab_size": 10, "max_position_embeddings": 8, "dim": 8, "n_layers": 1, "n_heads": 2,
        "hidden_dim": 16, "hidden_size": 8, "activation": "relu",
    });
    let model = build("distilbert", &own, None);
    // Two keys for the same number have different values.
    let mut other = own.clone();
    other["hidden_size"] = json!(99);
    let distilbert = Description::shipped("distilbert").expect("it is shipped");
    let error = distilbert.expect("it is right").build(&other, None);
    let expected = "config.json: `hidden_size` is `99`; expected `8`, the value of `dim`, because both keys have the same meaning";
    assert_eq!(error.expect_err("they differ").to_string(), expected);
    assert_eq!((model.dims["hidden"], model.dims["inner"]), (8, 16));
    assert!(model.graph.text().contains("layer.0.activated = relu"));
}

#[test]
fn shared_layers_read_one_set_of_weights() {
    let n_weights = |config: &Value| {
        let graph = build("albert", config, None).graph;
        let weights = graph
            .topological()
            .into_iter()
            .filter(|&id| !graph.op(id).is_compute());
        weights.count()
    };
    let mut deeper = config();
    deeper["num_hidden_layers"] = json!(6);
    assert_eq!(n_weights(&config()), n_weights(&deeper));
}

#[test]
fn groups_of_shared_layers_have_their_own_weights() {
    let mut grouped = config();
    for (key, n) in [
        ("num_hidden_layers", 6),
        ("num_hidden_groups", 3),
        ("inner_group_num", 2),
    ] {
        grouped[key] = json!(n);
    }
    let model = build("albert", &grouped, Some(&["last_hidden_state"]));
    let text = model.graph.text();
    for (value, weight) in [
        ("layer.1.part.0", "albert_layer_groups.0.albert_layers.0"),
        ("layer.5.part.1", "albert_layer_groups.2.albert_layers.1"),
    ] {
        let read = format!("{value}.query.product = linear");
        let line = text
            .lines()
            .find(|l| l.contains(&read))
            .expect("the layer is there");
        assert!(line.contains(weight), "{line}");
    }
    // Groups may differ in their number of layers.
    grouped["num_hidden_groups"] = json!(4);
    let model = build("albert", &grouped, Some(&["last_hidden_state"]));
    let text = model.graph.text();
    let group_of = |layer: usize| {
        let read = format!("layer.{layer}.part.0.query.product = linear");
        let line = text.lines().find(|line| line.contains(&read))?;
        let (_, rest) = line.split_once("albert_layer_groups.")?;
        rest.chars().next()
    };
    let groups: Option<String> = (0..6).map(group_of).collect();
    assert_eq!(groups.as_deref(), Some("001223"));
}

#[test]
fn a_checkpoint_is_described_by_its_model_type() {
    for (model_type, name) in [
        ("bert", "bert"),
        ("xlm-roberta", "roberta"),
        ("camembert", "roberta"),
        ("xlm-roberta-xl", "xlm_roberta_xl"),
        ("new", "gte"),
        ("gemma2", "gemma2"),
        ("gemma3_text", "gemma3_text"),
        ("clip", "clip_text"),
        ("deberta-v2", "deberta_v2"),
        ("electra", "electra"),
        ("gpt2", "gpt2"),
        ("olmo3", "olmo3"),
        ("eurobert", "eurobert"),
        ("marian", "marian"),
        ("m2m_100", "m2m_100"),
        ("pegasus", "pegasus"),
        ("t5", "t5"),
        ("mt5", "t5"),
        ("umt5", "t5"),
    ] {
        let found = Description::for_config(&json!({"model_type": model_type}));
        assert_eq!(found.expect("it is shipped").name(), name);
    }
    // Some checkpoints use the `model_type` of another model and differ in a key.
    for (key, name) in [
        ("alibi", "jina_bert"),
        ("absolute", "bert"),
        ("relative_key", "bert"),
    ] {
        let config = json!({"model_type": "bert", "position_embedding_type": key});
        let found = Description::for_config(&config).expect("it is shipped");
        assert_eq!(found.name(), name);
    }
    // Without a `model_type`, `architectures` select the description, and a key distinguishes two descriptions of one architecture.
    for (flash, name) in [(json!(null), "roberta"), (json!(true), "xlm_roberta_flash")] {
        let architectures = ["XLMRobertaForSequenceClassification"];
        let config = json!({"architectures": architectures, "use_flash_attn": flash});
        let found = Description::for_config(&config).expect("it is shipped");
        assert_eq!(found.name(), name);
    }
    let refused = |config: Value| super::refused(Description::for_config(&config));
    insta::assert_snapshot!(refused(json!({"model_type": "mamba"})));
    insta::assert_snapshot!(refused(json!({"hidden_size": 3})));
    insta::assert_snapshot!(refused(json!(3)));
}

#[test]
fn a_description_refuses_checkpoints_of_other_models_and_names_the_one_for_them() {
    let refused = |model_type: &str| {
        let mut config = config();
        config["model_type"] = json!(model_type);
        let bert = Description::shipped("bert")
            .expect("it is shipped")
            .expect("it is right");
        super::refused(bert.build(&config, None))
    };
    insta::assert_snapshot!(refused("xlm-roberta"));
    insta::assert_snapshot!(refused("gpt2"));
}

#[test]
fn a_checkpoint_for_a_task_has_the_outputs_of_that_task_by_default() {
    let bert = Description::shipped("bert")
        .expect("it is shipped")
        .expect("it is right");
    let of = |architecture: &str| {
        let outputs = bert.outputs_for(&json!({"architectures": [architecture]}));
        outputs.expect("the description has the head")
    };
    assert_eq!(of("BertForSequenceClassification"), ["sequence_logits"]);
    assert_eq!(of("BertForTokenClassification"), ["token_logits"]);
    assert_eq!(
        of("BertForMaskedLM"),
        ["last_hidden_state", "sentence_embedding"]
    );
    assert_eq!(of("BertModel"), bert.default_outputs());
    let without = bert.outputs_for(&json!({})).expect("there is no head");
    assert_eq!(without, bert.default_outputs());
}

#[test]
fn an_unknown_shipped_description_is_none() {
    assert!(Description::shipped("gpt5").is_none());
}
