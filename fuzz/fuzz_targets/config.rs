//! Any JSON as config.json of the shipped descriptions: it is built or refused.

#![no_main]

use std::sync::LazyLock;

use gemmule::model::Description;
use libfuzzer_sys::fuzz_target;

static SHIPPED: LazyLock<Vec<Description>> = LazyLock::new(|| {
    let shipped = Description::shipped_names().iter();
    shipped
        .filter_map(|name| Description::shipped(name))
        .map(|description| description.expect("shipped descriptions are right"))
        .collect()
});

fuzz_target!(|text: &[u8]| {
    let Ok(config) = serde_json::from_slice(text) else {
        return;
    };
    // One description an input: four times the inputs in the same time.
    let which = text.iter().fold(0, |sum: usize, &b| sum.wrapping_add(b.into()));
    if let Some(description) = SHIPPED.get(which % SHIPPED.len().max(1)) {
        let outputs = description.output_names();
        if let Ok(model) = description.build(&config, Some(&outputs)) {
            model.graph.verify().expect("a graph that is built is sound");
        }
    }
});
