//! Changes each key of config.json, one at a time, for every shipped family of models. Either the outputs are those of transformers, or an
//! error names the key.
//!
//! `scripts/config_sweep.py` stores the keys, their changed values, and some values of each output of transformers.

use std::{collections::BTreeMap, num::NonZeroUsize, path::Path, sync::OnceLock};

use gemmule::{
    Batch, DType, DeviceChoice, Engine, EngineError,
    engine::ModelFile,
    generate::{Event, Request, SamplingParams},
    model::Description,
    runtime::weights::RandomWeights,
    search::{Beams, Rules},
};
use miette::Diagnostic;
use serde::Deserialize;
use serde_json::{Map, Value};

/// Some values of each output, by the output's name.
type Outputs = BTreeMap<String, Vec<f64>>;

#[derive(Deserialize)]
struct Family {
    description: String,
    config: Map<String, Value>,
    ids: Vec<Vec<u32>>,
    outputs: Outputs,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    key: String,
    /// The new value of the key. `None` removes the key; JSON's null is `Some(Value::Null)`.
    #[serde(default, deserialize_with = "some")]
    value: Option<Value>,
    /// Expected outputs. `None` if they equal those of the unchanged config.json.
    outputs: Option<Outputs>,
}

fn some<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(from).map(Some)
}

/// Name of the output of encoder-decoder models that contains the results of a beam search: the tokens and the score of the best beam.
const WRITTEN: &str = "written";

fn families() -> &'static BTreeMap<String, Family> {
    static FAMILIES: OnceLock<BTreeMap<String, Family>> = OnceLock::new();
    FAMILIES.get_or_init(|| {
        let file = Path::new("tests/references/config_sweep.json");
        let text = std::fs::read_to_string(file).expect("the references are there");
        serde_json::from_str(&text).expect("they are in this form")
    })
}

impl Family {
    /// Reads the description from its file at run time, so that tests need not be compiled again after the description changes.
    fn source(&self) -> String {
        let file = format!("models/{}.ron", self.description);
        std::fs::read_to_string(file).expect("the description is there")
    }

    fn changed(&self, case: &Case) -> Value {
        let mut config = self.config.clone();
        match &case.value {
            Some(value) => drop(config.insert(case.key.clone(), value.clone())),
            None => drop(config.remove(&case.key)),
        }
        config.into()
    }

    /// Returns the names of the outputs that one run of a batch computes: all but [`WRITTEN`].
    fn plain(&self) -> Vec<&str> {
        let names = self.outputs.keys().map(String::as_str);
        names.filter(|&name| name != WRITTEN).collect()
    }

    fn engine(
        &self,
        description: &Description,
        config: &Value,
        writes: bool,
    ) -> Result<Engine, EngineError> {
        let weights = RandomWeights {
            seed: 20,
            deviation: if self.outputs.contains_key(WRITTEN) {
                0.3
            } else {
                0.1
            },
        };
        let model = ModelFile::Description(Box::new(description.clone()));
        let builder = Engine::from_model(model)
            .config_value(config.clone())
            .random_weights(weights)
            .dtype(DType::F32)
            .threads(NonZeroUsize::MIN)
            .no_fused_launches(true)
            .device(DeviceChoice::Cpu);
        match writes {
            true => builder.generating().build(),
            false => builder.outputs(self.plain()).build(),
        }
    }

    /// Computes the outputs. Returns the same rows of each output as `scripts/config_sweep.py` stores, in the same order.
    fn run(&self, description: &Description, config: &Value) -> Result<Outputs, EngineError> {
        let mut session = self.engine(description, config, false)?.session()?;
        let mut found = Outputs::new();
        for ids in &self.ids {
            let outputs = session.run(&Batch::from_sequences(std::slice::from_ref(ids))?)?;
            for name in self.plain() {
                let output = outputs.get(name)?;
                let [n_rows, width] = [output.shape[0], output.shape[1]].map(|n| n as usize);
                let mut take = |row: usize| {
                    let row = output.values[row * width..].iter().take(width.min(6));
                    let own = found.entry(name.to_owned()).or_default();
                    own.extend(row.map(|&v| f64::from(v)));
                };
                if name == "last_hidden_state" {
                    take(n_rows / 2 - 1);
                }
                take(n_rows - 1);
            }
        }
        if self.outputs.contains_key(WRITTEN) {
            found.insert(WRITTEN.to_owned(), self.write(description, config)?);
        }
        Ok(found)
    }

    /// Generates text with a beam search of two beams. Returns the tokens and the score of the best beam for each sequence of `ids`.
    fn write(&self, description: &Description, config: &Value) -> Result<Vec<f64>, EngineError> {
        let engine = self.engine(description, config, true)?;
        let mut generator = engine.generator(1 << 20)?;
        let mut found = Vec::new();
        for ids in &self.ids {
            let rules = Rules {
                max_new_tokens: 5,
                suppressed: vec![1],
                ..Rules::default()
            };
            let options = SamplingParams {
                rules,
                beams: Some(Beams::of(2)),
                decoder_start: Some(2),
                ..SamplingParams::default()
            };
            let prompt = ids.clone();
            let admitted = generator.admit(Request { prompt, options });
            admitted.expect("it can be written");
            while generator.is_busy() {
                for event in generator.poll()? {
                    if let Event::Found { hypotheses, .. } = event {
                        found.extend(hypotheses[0].tokens.iter().map(|&token| f64::from(token)));
                        found.push(f64::from(hypotheses[0].score));
                    }
                }
            }
        }
        Ok(found)
    }

    /// Returns a text of the graphs that `description` builds with `config`, or `None` if they cannot be built. Models with equal texts
    /// compute equal values.
    fn graphs(&self, description: &Description, config: &Value) -> Option<String> {
        let mut text = String::new();
        let mut names = self.plain();
        if self.outputs.contains_key(WRITTEN) {
            names.push("next_token_logits");
        }
        for name in names {
            let model = description.build(config, Some(&[name])).ok()?;
            for id in model.graph.topological() {
                let operands = model.graph.operands(id);
                text += &format!("{:?} {operands:?}\n", model.graph.node(id));
            }
        }
        Some(text)
    }
}

/// Returns whether all values agree up to the rounding of f32.
fn are_near(found: &Outputs, expected: &Outputs) -> bool {
    expected.iter().all(|(name, expected)| {
        let found = found.get(name).map(Vec::as_slice).unwrap_or_default();
        let mut pairs = found.iter().zip(expected);
        found.len() == expected.len() && pairs.all(|(a, b)| (a - b).abs() <= 1e-3 * (1.0 + b.abs()))
    })
}

/// Returns the text of an error with its causes and its help.
fn text(error: &EngineError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        text += &format!("; {inner}");
        source = inner.source();
    }
    if let EngineError::Model(error) = error
        && let Some(help) = error.help()
    {
        text += &format!("; {help}");
    }
    text
}

#[track_caller]
fn sweep(name: &str) {
    let family = &families()[name];
    let description = Description::parse(name, &family.source()).expect("it is right");
    let own = Value::from(family.config.clone());
    let found = family
        .run(&description, &own)
        .expect("the family's own config.json runs");
    assert!(
        are_near(&found, &family.outputs),
        "{found:?} is not {:?}",
        family.outputs
    );
    let graphs = family.graphs(&description, &own).expect("it is built");
    let mut runs = BTreeMap::from([(graphs, Ok(found))]);
    let (mut wrong, mut n_refused) = (Vec::new(), 0);
    for case in &family.cases {
        let config = family.changed(case);
        let shown = match &case.value {
            Some(value) => format!("{}: {value}", case.key),
            None => format!("without {}", case.key),
        };
        let expected = case.outputs.as_ref().unwrap_or(&family.outputs);
        let run = || {
            family
                .run(&description, &config)
                .map_err(|error| text(&error))
        };
        let mut unbuilt = None;
        // If another case has the same graphs, reuse its outputs.
        let found = match family.graphs(&description, &config) {
            Some(graphs) => runs.entry(graphs).or_insert_with(run),
            None => unbuilt.insert(run()),
        };
        match found {
            Ok(found) if are_near(found, expected) => {}
            Ok(found) => wrong.push(format!(
                "{shown}: {found:?}, but transformers has {expected:?}"
            )),
            Err(error) => {
                n_refused += 1;
                if !error.contains(&format!("`{}", case.key)) {
                    wrong.push(format!("{shown}: an error that does not name it: {error}"));
                }
            }
        }
    }
    let (n, n_graphs) = (family.cases.len(), runs.len());
    println!("{name}: {n} cases, {n_graphs} graphs, {n_refused} refused");
    assert!(
        wrong.is_empty(),
        "{} are wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

macro_rules! sweeps {
    ($($name:ident),*) => {
        $(#[test]
        fn $name() {
            sweep(stringify!($name));
        })*

        #[test]
        fn every_stored_family_is_swept() {
            let swept = [$(stringify!($name)),*];
            let stored: Vec<&str> = families().keys().map(String::as_str).collect();
            let mut sorted = swept.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, stored);
            // transformers has no classes for these descriptions. Their models are defined by papers, or by code in their checkpoints.
            let without = ["jina_bert", "vae", "gte", "nomic_bert", "neobert", "static_embedding", "sparse_static_embedding", "xlm_roberta_flash"];
            let mut described: Vec<&str> = families().values().map(|f| f.description.as_str()).collect();
            described.extend(without);
            let missing = Description::shipped_names().iter().find(|name| !described.contains(name));
            assert_eq!(missing, None);
        }
    };
}

sweeps!(
    bert,
    roberta,
    xlm_roberta,
    camembert,
    xlm_roberta_xl,
    distilbert,
    albert,
    albert_groups,
    electra,
    mpnet,
    deberta,
    deberta_v2,
    roformer,
    modernbert,
    eurobert,
    gemma3_text,
    gemma3_writer,
    gemma,
    cohere,
    cohere_norms,
    cohere2,
    glm,
    glm4,
    glm_tokens,
    exaone,
    exaone4,
    exaone4_full,
    exaone4_tokens,
    seed_oss,
    seed_oss_tokens,
    ernie4_5,
    helium,
    helium_tokens,
    hunyuan_v1_dense,
    arcee,
    arcee_tokens,
    nemotron,
    nemotron_tokens,
    olmo,
    mpt,
    mpt_tokens,
    gpt_bigcode,
    gpt_bigcode_tokens,
    gpt_neo,
    gpt_neo_tokens,
    xglm,
    biogpt,
    biogpt_tokens,
    internlm3,
    openai_gpt,
    modernbert_decoder,
    roberta_prelayernorm,
    data2vec_text,
    luke,
    hyperclovax,
    megatron_bert,
    rembert,
    blenderbot,
    blenderbot_small,
    gptj,
    falcon,
    falcon_groups,
    falcon_rw,
    falcon_tokens,
    gemma2,
    gemma2_tokens,
    gemma_tokens,
    clip_text,
    gpt2,
    gpt2_tokens,
    llama_tokens,
    qwen2_tokens,
    qwen3_tokens,
    llama,
    mistral,
    mistral_window,
    qwen2,
    qwen3,
    phi3,
    phi3_window,
    phi3_tokens,
    olmo2,
    olmo3,
    starcoder2,
    starcoder2_tokens,
    stablelm,
    stablelm_tokens,
    phi,
    phi_tokens,
    smollm3,
    smollm3_tokens,
    granite,
    opt,
    gpt_neox,
    bloom,
    bloom_slices,
    marian,
    bart,
    bart_classifier,
    mbart,
    m2m_100,
    pegasus,
    t5,
    mt5,
    umt5
);

/// Additional keys of config.json for families whose code is published with their checkpoints. The published code reads or writes these
/// keys, but the stored configurations lack them. The values are the defaults of the published code.
const PUBLISHED: [(&str, &str); 4] = [
    (
        "neobert",
        r#"{"decoder_init_range": 0.02, "dim_head": 64, "embedding_init_range": 0.02, "classifier_init_range": 0.02,
            "tie_word_embeddings": false}"#,
    ),
    (
        "nomic_bert",
        r#"{"attn_pdrop": 0.0, "dense_seq_output": true, "embd_pdrop": 0.0, "fused_bias_fc": true, "fused_dropout_add_ln": true,
            "hidden_act": "silu", "initializer_range": 0.02, "num_experts": 0, "pad_vocab_size_multiple": 64,
            "parallel_block_tied_norm": false, "reorder_and_upcast_attn": false, "resid_pdrop": 0.0,
            "rotary_scaling_factor": null, "scale_attn_by_inverse_layer_idx": false, "scale_attn_weights": true,
            "summary_type": "cls_index", "use_cache": true, "use_flash_attn": true, "use_xentropy": true}"#,
    ),
    (
        "gte",
        r#"{"attention_probs_dropout_prob": 0.0, "classifier_dropout": null, "hidden_dropout_prob": 0.1,
            "initializer_range": 0.02, "pad_token_id": 0}"#,
    ),
    (
        "jina_bert",
        r#"{"add_cross_attention": false, "attention_probs_dropout_prob": 0.0, "classifier_dropout": null,
            "gradient_checkpointing": false, "hidden_dropout_prob": 0.1, "initializer_range": 0.02, "is_decoder": false,
            "model_max_length": 8192, "pad_token_id": 0, "use_cache": true}"#,
    ),
];

/// Returns values of the same kind that differ from `value`.
fn others(value: &Value) -> Vec<Value> {
    match value {
        Value::Null => vec![true.into(), 2.into()],
        Value::Bool(is) => vec![(!is).into()],
        Value::Number(n) if n.is_u64() => {
            let n = n.as_u64().expect("it is one");
            vec![(n + 1).into(), (2 * n + 2).into()]
        }
        Value::Number(n) => vec![(n.as_f64().expect("it is one") * 2.0 + 0.25).into()],
        Value::String(_) => vec!["other".into()],
        Value::Array(_) => Vec::new(),
        Value::Object(entries) => {
            let each = entries.iter().flat_map(|(key, value)| {
                others(value).into_iter().map(|other| {
                    let mut changed = entries.clone();
                    changed.insert(key.clone(), other);
                    changed.into()
                })
            });
            each.collect()
        }
    }
}

/// transformers has no classes for these families, so there are no expected outputs. The snapshot lists the keys that have no effect. A
/// reviewer checks that they concern only training, speed or other outputs.
#[test]
fn keys_of_families_with_published_code_change_the_graph_or_are_refused_by_name() {
    let mut report = String::new();
    for (family, more) in PUBLISHED {
        let source = std::fs::read_to_string(format!("models/{family}.ron"));
        let source = source.expect("the description is there");
        let description = Description::parse(family, &source).expect("it is right");
        let text = std::fs::read_to_string(format!("tests/references/{family}_h320a5.json"));
        let mut config: Map<String, Value> =
            serde_json::from_str(&text.expect("it is there")).expect("JSON");
        config.extend(serde_json::from_str::<Map<String, Value>>(more).expect("JSON"));
        let build = |config: &Map<String, Value>| {
            let config = Value::from(config.clone());
            let model = description.build(&config, None)?;
            let nodes = model.graph.topological().into_iter();
            let nodes = nodes.map(|id| format!("{:?}", model.graph.node(id)));
            let positions = model.max_positions;
            Ok::<_, gemmule::model::ModelError>((nodes.collect::<String>(), positions))
        };
        let own = build(&config).expect("the family's own config.json is built");
        let mut outcomes: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for (key, value) in &config {
            for other in others(value) {
                let mut changed = config.clone();
                changed.insert(key.clone(), other.clone());
                let outcome = match build(&changed) {
                    Ok(found) if found == own => "without effect",
                    Ok(_) => "change the graph",
                    Err(error) => {
                        let error = text_of(error);
                        let unfit = ["shapes do not match", "number of parts"];
                        match unfit.iter().any(|text| error.contains(text)) {
                            true => "do not fit the other sizes",
                            false => {
                                assert!(error.contains(key.as_str()), "{key}: {other}: {error}");
                                "refused"
                            }
                        }
                    }
                };
                let shown = match other {
                    Value::Object(_) => format!("{key} {other}"),
                    other => format!("{key}: {other}"),
                };
                outcomes.entry(outcome).or_default().push(shown);
            }
        }
        report += &format!("{family}\n");
        for (outcome, keys) in outcomes {
            report += &format!("  {outcome}: {}\n", keys.join(", "));
        }
    }
    insta::assert_snapshot!(report);
}

fn text_of(error: gemmule::model::ModelError) -> String {
    text(&EngineError::Model(Box::new(error)))
}
