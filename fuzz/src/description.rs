//! Reads arbitrary text as the description of a model. The result must be a model, or an error that can be rendered.

use gemmule::model::Description;
use miette::{GraphicalReportHandler, GraphicalTheme};
use serde_json::json;

pub fn run(source: &str) {
    let config = json!({
        "vocab_size": 11, "max_position_embeddings": 8, "type_vocab_size": 2, "hidden_size": 8,
        "embedding_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 16,
    });
    let built = Description::parse("fuzz.ron", source).and_then(|d| d.build(&config, None));
    match built {
        Ok(model) => {
            model
                .graph
                .verify()
                .expect("a graph that is built is sound");
            let _ = model.check_expectations(&model.graph);
        }
        // Rendering an error takes ten times as long as parsing, so only one error in eight is rendered.
        Err(error) if source.bytes().fold(0, u8::wrapping_add) % 8 == 0 => {
            let mut text = String::new();
            GraphicalReportHandler::new_themed(GraphicalTheme::unicode_nocolor())
                .render_report(&mut text, &error)
                .expect("every error renders");
        }
        Err(_) => {}
    }
}
