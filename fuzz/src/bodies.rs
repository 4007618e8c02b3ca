//! Sends arbitrary bytes as a request body to a route of a server with three small models, or reads them as the configuration file of a
//! server. The first byte selects the route or the file. Each response must be one that the OpenAPI document contains.

use std::{sync::LazyLock, time::Duration};

use gemmule::{
    DeviceChoice,
    http::Bodies,
    schedule::{CostTable, Settings, scheduler},
    serve::{Model, ModelChoice, Models, ServeConfig},
};

fn model(name: &str) -> Model {
    let root = super::root();
    let costs = CostTable::parse(include_str!("../../examples/costs.ron"));
    let model = Model::open(ModelChoice {
        folder: root.join("tests/checkpoints").join(name),
        name: name.to_owned(),
        devices: vec![DeviceChoice::Cpu],
        dtype: None,
        kv_dtype: Default::default(),
        max_context: None,
        invariant: false,
        scheduler: scheduler("packed", &Settings::default()).expect("it is known"),
        costs: Some(costs.expect("the example is sound")),
        batch_bytes: 1 << 30,
        cache_bytes: None,
        queue: Duration::from_secs(60),
        tokenizers: 1,
        all_tokens: true,
        sparse: false,
        token_vectors: false,
        fill_mask: false,
        default_prompt: Default::default(),
        task: None,
        route_of: None,
        share: None,
        previous: None,
        trace: None,
        cache: None,
    });
    model.expect("the small checkpoints are sound")
}

static BODIES: LazyLock<Bodies> = LazyLock::new(|| {
    let models = ["st-mean", "ce-one", "writer"].map(model);
    Bodies::new(Models::new(models.into())).expect("a runtime")
});

pub fn run(bytes: &[u8]) {
    let Some((&first, rest)) = bytes.split_first() else {
        return;
    };
    let mut paths = Bodies::paths();
    let n = Bodies::paths().count() + 1;
    match paths.nth(usize::from(first) % n) {
        Some(path) => drop(BODIES.post(path, rest)),
        None => {
            let text = String::from_utf8_lossy(rest);
            if let Err(error) = ServeConfig::parse(&text) {
                assert!(!error.to_string().is_empty());
            }
        }
    }
}
