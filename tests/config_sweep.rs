//! Every key of every shipped family's config.json, changed: the values are those of transformers, or an error names the key.
//!
//! `scripts/config_sweep.py` stores the keys, their values and a few values of each output.

use std::{collections::BTreeMap, num::NonZeroUsize, path::Path, sync::OnceLock};

use gemmule::{
    Batch, DType, DeviceChoice, Engine, EngineError,
    engine::{Event, Request, SamplingParams},
    model::Description,
    runtime::weights::RandomWeights,
    search::{Beams, Rules},
};
use miette::Diagnostic;
use serde::Deserialize;
use serde_json::{Map, Value};

/// Values by the name of their output.
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
    /// The key is removed, where `None`; a null is a value.
    #[serde(default, deserialize_with = "some")]
    value: Option<Value>,
    /// Those of the family's own config.json, where `None`.
    outputs: Option<Outputs>,
}

fn some<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(from).map(Some)
}

/// The output that stands for what a model writes from a source: tokens and the score of the best beam.
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
    /// The source of the description, from its file: a change of it compiles nothing.
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

    /// The outputs that one engine computes.
    fn plain(&self) -> Vec<&str> {
        let names = self.outputs.keys().map(String::as_str);
        names.filter(|&name| name != WRITTEN).collect()
    }

    fn engine(&self, config: &Value, writes: bool) -> Result<Engine, EngineError> {
        let weights = RandomWeights {
            seed: 20,
            deviation: if self.outputs.contains_key(WRITTEN) {
                0.3
            } else {
                0.1
            },
        };
        let builder = Engine::from_source(&self.description, self.source())
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

    /// What the description computes, in the order and at the rows of `scripts/config_sweep.py`.
    fn run(&self, config: &Value) -> Result<Outputs, EngineError> {
        let mut session = self.engine(config, false)?.session()?;
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
            found.insert(WRITTEN.to_owned(), self.write(config)?);
        }
        Ok(found)
    }

    /// Tokens and the score of the best of two beams.
    fn write(&self, config: &Value) -> Result<Vec<f64>, EngineError> {
        let engine = self.engine(config, true)?;
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

    /// The graphs of a config.json, from which equal values follow.
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

/// Whether all values are as near as two computations in f32 are.
fn are_near(found: &Outputs, expected: &Outputs) -> bool {
    expected.iter().all(|(name, expected)| {
        let found = found.get(name).map(Vec::as_slice).unwrap_or_default();
        let mut pairs = found.iter().zip(expected);
        found.len() == expected.len() && pairs.all(|(a, b)| (a - b).abs() <= 1e-3 * (1.0 + b.abs()))
    })
}

/// An error with all that is said of it.
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
    let found = family.run(&own).expect("the family's own config.json runs");
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
        let run = || family.run(&config).map_err(|error| text(&error));
        let mut unbuilt = None;
        // Equal graphs have equal values.
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
            // These have no class in transformers: their code is published with their checkpoints, or they are of a paper.
            let without = ["jina_bert", "vae", "gte", "nomic_bert"];
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
    electra,
    mpnet,
    deberta_v2,
    modernbert,
    gemma3_text,
    clip_text,
    gpt2,
    gpt2_tokens,
    llama_tokens,
    qwen3_tokens,
    llama,
    mistral,
    mistral_window,
    qwen3,
    marian,
    bart,
    mbart,
    m2m_100,
    t5
);
