//! The model that an artifact was compiled for.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{
    graph::Op,
    model::{Description, MAX_CONTEXT, Model, Module},
    runtime::batch::Limits,
    text::limit_context,
};

/// The description that a program was compiled from, and a digest of its graph. The graph was built from the description, with the sizes
/// and modules of a checkpoint folder. Another folder fits the program if its sizes and modules give a graph with the same digest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// File name of the description.
    name: String,
    /// Text of the description.
    source: String,
    /// Names of output heads with their own tensor in the checkpoint, although config.json ties them to another tensor. The two tensors
    /// differ in their values.
    own: BTreeSet<String>,
    outputs: Vec<String>,
    max_context: Option<u32>,
    /// Sizes that the description reads from config.json.
    sizes: BTreeMap<String, u64>,
    /// Descriptions of the modules after the transformer, for error messages.
    modules: Vec<String>,
    digest: [u8; 32],
}

impl Origin {
    /// Returns the origin of `model`, which was built from the other arguments.
    pub(super) fn of(
        description: &Description,
        config: &Value,
        modules: &[Module],
        model: &Model,
    ) -> Self {
        let (name, source) = description.source();
        let outputs = model.graph.outputs().iter();
        let max_context = config.get(MAX_CONTEXT).and_then(Value::as_u64);
        Self {
            name: name.to_owned(),
            source: source.to_owned(),
            own: description.own().clone(),
            outputs: outputs.map(|(name, _)| name.clone()).collect(),
            max_context: max_context.and_then(|n| u32::try_from(n).ok()),
            sizes: model.dims.clone(),
            modules: in_words(modules),
            digest: digest(model),
        }
    }

    /// Checks that `config` and `modules` give the graph that the program was compiled from.
    ///
    /// # Errors
    /// Returns a description of the differences if the graphs differ.
    pub(super) fn check(&self, mut config: Value, modules: &[Module]) -> Result<(), String> {
        limit_context(&mut config, self.max_context);
        let description = Description::parse(&self.name, &self.source);
        let description = description.map_err(|error| error.to_string())?;
        let description = description.with_own(self.own.clone());
        let outputs: Vec<&str> = self.outputs.iter().map(String::as_str).collect();
        let model = description.build_with(&config, Some(&outputs), modules);
        let model = model.map_err(|error| error.to_string())?;
        match digest(&model) == self.digest {
            true => Ok(()),
            false => Err(self.differences(&model, modules)),
        }
    }

    fn differences(&self, model: &Model, modules: &[Module]) -> String {
        let names: BTreeSet<&String> = self.sizes.keys().chain(model.dims.keys()).collect();
        let shown = |size: Option<&u64>| size.map_or("absent".to_owned(), u64::to_string);
        let mut found = Vec::new();
        for name in names {
            let (own, other) = (self.sizes.get(name), model.dims.get(name));
            if own != other {
                let (own, other) = (shown(own), shown(other));
                found.push(format!("`{name}` was {own} and is {other} in the folder"));
            }
        }
        let modules = in_words(modules);
        if modules != self.modules {
            let joined = |modules: &[String]| match modules {
                [] => "none".to_owned(),
                modules => modules.join(", "),
            };
            found.push(format!(
                "the modules after the transformer were {}; in the folder they are {}",
                joined(&self.modules),
                joined(&modules)
            ));
        }
        match found.is_empty() {
            true => "other settings of config.json differ".to_owned(),
            false => found.join("; "),
        }
    }
}

fn in_words(modules: &[Module]) -> Vec<String> {
    modules.iter().map(Module::to_string).collect()
}

/// Returns a digest of a model: its operators with their shapes and operands, the names of its weights and outputs, and its limits. The
/// names of other values are not included.
fn digest(model: &Model) -> [u8; 32] {
    let graph = &model.graph;
    let order = graph.topological();
    let places: HashMap<_, usize> = order.iter().copied().zip(0..).collect();
    let mut hash = Sha256::new();
    for &id in &order {
        let node = graph.node(id);
        let operands = graph.operands(id).into_iter().map(|id| places.get(&id));
        let operands: Vec<Option<&usize>> = operands.collect();
        hash.update(format!(
            "{:?} {:?} {} {operands:?}",
            node.op, node.shape, node.part
        ));
        if matches!(node.op, Op::Weight(_)) {
            hash.update(&node.name);
        }
        hash.update("\n");
    }
    for (name, id) in graph.outputs() {
        hash.update(format!("{name} {:?}\n", places.get(id)));
    }
    let adapter = &model.weight_names.adapter;
    hash.update(format!("{:?} {adapter:?}", Limits::of(model)));
    hash.finalize().into()
}
