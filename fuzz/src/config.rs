//! Builds the shipped descriptions with arbitrary JSON as config.json. The result must be a model or an error.

use std::sync::LazyLock;

use gemmule::model::Description;
use serde_json::Value;

/// Max number of layers of an input. More layers reach no additional code, but may take hundreds of times as long. Other tests
/// include a model with many layers.
const MAX_LAYERS: f64 = 16.0;

static SHIPPED: LazyLock<Vec<Description>> = LazyLock::new(|| {
    let shipped = Description::shipped_names().iter();
    shipped
        .filter_map(|name| Description::shipped(name))
        .map(|description| description.expect("shipped descriptions are right"))
        .collect()
});

/// Returns whether the input should be added to the corpus.
pub fn run(text: &[u8]) -> bool {
    let Ok(config) = serde_json::from_slice::<Value>(text) else {
        return true;
    };
    let layers = ["num_hidden_layers", "n_layers"].map(|key| config.get(key)?.as_f64());
    if layers.into_iter().flatten().any(|n| n > MAX_LAYERS) {
        return false;
    }
    // Build only one description per input, chosen by the input. The fuzzer then tries four times as many inputs in the same time.
    let which = text
        .iter()
        .fold(0, |sum: usize, &b| sum.wrapping_add(b.into()));
    let description = &SHIPPED[which % SHIPPED.len()];
    let outputs = description.output_names();
    if let Ok(model) = description.build(&config, Some(&outputs)) {
        model
            .graph
            .verify()
            .expect("a graph that is built is sound");
    }
    true
}
