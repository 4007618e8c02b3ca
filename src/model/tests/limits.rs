//! Short descriptions that request excessive time or memory.

use super::super::error::suggest;
use super::{TINY, build, changed, parse, refused};

#[test]
fn long_names_are_not_compared_for_suggestions() {
    // The distance between two names of this length takes minutes to compute.
    let (name, known) = ("a".repeat(100_000), "b".repeat(100_000));
    assert!(suggest(&name, [known.as_str()]).starts_with("there is `b"));
    assert!(suggest("a", [known.as_str()]).starts_with("there is `b"));
    assert_eq!(
        suggest("hiden", ["hidden", known.as_str()]),
        "did you mean `hidden`?"
    );
}

#[test]
fn value_names_have_a_maximum_length() {
    let long = "a".repeat(65);
    let source = TINY.replace("name: \"layer\"", &format!("name: \"{long}\""));
    assert!(refused(build(&source)).contains("at most 64 characters"));
    let source = TINY.replace("name: \"layer\"", &format!("name: \"{}\"", &long[1..]));
    assert!(build(&source).is_ok());
}

#[test]
fn weight_names_have_a_maximum_length() {
    let long = "a".repeat(250);
    let source = changed("layers.{i}.weight", &format!("layers.{{i}}.{long}"));
    assert!(refused(build(&source)).contains("at most 256 bytes"));
}

#[test]
fn lines_have_a_maximum_length() {
    for filling in ["a", "\t", "長"] {
        let comment = format!("/*{}*/", filling.repeat(70_000 / filling.len()));
        let source = changed("dims:", &format!("{comment} dums:"));
        assert!(refused(parse(&source)).contains("line 3 has"), "{filling}");
        // A line of the maximum length is shown in the error, with the marker below it.
        let comment = format!("/*{}*/", filling.repeat(8_000 / filling.len()));
        let source = changed("dims:", &format!("{comment} dums:"));
        assert!(refused(parse(&source)).contains("dums"), "{filling}");
    }
}

#[test]
fn raw_control_characters_are_refused_without_being_shown() {
    for (evil, code) in [
        ("\u{1b}", "1B"),
        ("\u{0}", "00"),
        ("\u{7f}", "7F"),
        ("\u{9b}", "9B"),
        ("\u{202e}", "2E"),
    ] {
        for source in [
            changed("dims:", &format!("/*ä{evil}[2J*/ dims:")),
            changed("\"tiny\"", &format!("\"{evil}\"")),
        ] {
            let text = refused(parse(&source));
            assert!(
                !text.contains(evil) && text.contains(&format!("{code};")),
                "{text}"
            );
        }
    }
    let text = refused(parse(&changed("dims:", "/*ä\u{1b}[2J*/ dims:")));
    insta::assert_snapshot!(text, @r"
    × line 3, column 8 has the raw control character U+001B; remove it, or write it as an escape in
    │ a string
    ");
    // A weight name may contain a control character as an escape, and both line endings are accepted.
    let escaped = changed("table: \"table\"", "table: \"ta\\u{1b}ble\"");
    assert!(parse(&escaped).is_ok());
    assert!(parse(&TINY.replace('\n', "\r\n")).is_ok());
}

/// Tests numbers that determine the memory of a model but are not limited by the shape of a tensor in the checkpoint.
#[test]
fn numbers_that_determine_the_size_of_computed_tables_have_a_range() {
    let config = |more: serde_json::Value| {
        let mut config = serde_json::json!({
            "vocab_size": 30, "hidden_size": 16, "d_model": 16, "num_attention_heads": 2, "num_heads": 2, "num_hidden_layers": 1,
            "encoder_layers": 1, "decoder_layers": 1, "num_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
            "intermediate_size": 24, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_ff": 24, "d_kv": 8, "max_position_embeddings": 40,
            "activation_function": "relu", "type_vocab_size": 0, "position_buckets": 8, "relative_attention": true, "share_att_key": true,
            "norm_rel_ebd": "layer_norm", "pos_att_type": ["c2p", "p2c"],
        });
        let own = config.as_object_mut().expect("an object");
        own.extend(more.as_object().expect("an object").clone());
        config
    };
    let refused = |model: &str, more: serde_json::Value| {
        let description = super::Description::shipped(model).expect("it is shipped");
        let description = description.expect("it is right");
        super::refused(description.build(&config(more), None))
    };
    for (model, key, number, expected) in [
        (
            "m2m_100",
            "max_position_embeddings",
            2_000_000_000u64,
            "at most 33554432 elements",
        ),
        (
            "t5",
            "relative_attention_max_distance",
            16_000_000,
            "at most 33554432 elements",
        ),
        (
            "llama",
            "head_dim",
            2_000_000_000,
            "expected 1 to 2147483647",
        ),
        ("llama", "head_dim", 100_000, "an even number up to 4096"),
        (
            "llama",
            "num_hidden_layers",
            1_000_000_000_000,
            "more than 20000 values",
        ),
    ] {
        let mut more = serde_json::Map::new();
        more.insert(key.to_owned(), number.into());
        // Lines are wrapped to the width of a terminal.
        let text = refused(model, more.into());
        let words = text.split_whitespace().filter(|word| *word != "│");
        let text = words.collect::<Vec<_>>().join(" ");
        assert!(text.contains(expected), "{text}");
        let names_key = text.contains(&format!("`{key}` of config.json"));
        assert!(names_key || key == "num_hidden_layers", "{text}");
    }
    // Any other large number is rejected, or does not increase time or memory.
    let numbers = [
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_hidden_layers",
        "intermediate_size",
        "max_position_embeddings",
        "type_vocab_size",
        "num_labels",
        "embedding_size",
        "num_hidden_groups",
        "inner_group_num",
        "position_buckets",
        "max_relative_positions",
        "relative_attention_num_buckets",
        "relative_attention_max_distance",
        "d_model",
        "d_kv",
        "d_ff",
        "num_layers",
        "num_decoder_layers",
        "num_heads",
        "encoder_layers",
        "decoder_layers",
        "encoder_ffn_dim",
        "pad_token_id",
        "local_attention",
        "global_attn_every_n_layers",
        "sliding_window",
        "sliding_window_pattern",
        "max_window_layers",
        "query_pre_attn_scalar",
        "projection_dim",
    ];
    let began = std::time::Instant::now();
    for model in super::Description::shipped_names() {
        let description = super::Description::shipped(model).expect("it is shipped");
        let description = description.expect("it is right");
        for key in numbers {
            for number in [i64::from(i32::MAX), i64::MAX, 1 << 24] {
                let mut more = serde_json::Map::new();
                more.insert(key.to_owned(), number.into());
                drop(description.build(&config(more.into()), None));
            }
        }
    }
    assert!(began.elapsed().as_secs() < 60, "{:?}", began.elapsed());
}

#[test]
fn thousands_of_expectations_are_counted_at_once() {
    let source = changed(
        "body: [",
        "expect: {\"gemms\": 1, \"linear\": 1, \"add\": 1, \"launches\": 2}, body: [",
    )
    .replace("times: \"layers\"", "times: 6000");
    let source = source.replace("\"layers\": Key(\"num_hidden_layers\"),", "");
    let model = build(&source).expect("nothing is wrong with it");
    assert_eq!(model.expectations.len(), 24_000);
    // Counting each expectation separately would take half a billion node visits.
    model.check_expectations(&model.graph).expect("they hold");
}
