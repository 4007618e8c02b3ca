use super::super::Description;
use serde_json::json;
#[test]
fn x() {
    let config = json!({"vocab_size": 11, "max_position_embeddings": 8, "type_vocab_size": 2, "hidden_size": 8, "embedding_size": 4,
        "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16});
    for n in Description::shipped_names() {
        let d = Description::shipped(n)
            .unwrap()
            .map_err(miette::Report::new)
            .unwrap();
        let all: Vec<&str> = d.output_names();
        let m = d
            .build(&config, Some(&all))
            .map_err(miette::Report::new)
            .unwrap();
        println!("{}", m.graph.text());
    }
}
