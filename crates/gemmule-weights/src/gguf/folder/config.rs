//! config.json, with the keys of Hugging Face transformers.

use serde_json::{Value as Json, json};

use super::{
    super::{GgufProblem, Value, error::Result},
    names::{Family, check_layers},
    rope,
    settings::Settings,
    wrong_key, wrong_tensor,
};

/// Settings that change results and that no supported architecture has.
const UNREAD: [&str; 10] = [
    "expert_count",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "rope.dimension_sections",
];
/// Default base of the rotary frequencies.
const THETA: f64 = 10000.0;
/// Gemma 3: by default, every sixth layer attends to all tokens.
const PATTERN: u64 = 6;
/// Gemma 3: number of layers of the largest model, 27B. In this model, `query_pre_attn_scalar` is the hidden size divided by the number of
/// heads. In the other models, it is the head size.
const LAYERS_OF_27B: u64 = 62;

/// Numbers that all architectures have.
struct Sizes {
    vocab: u64,
    positions: u64,
    hidden: u64,
    layers: u64,
    heads: u64,
    inner: u64,
}

/// Returns the contents of config.json.
pub(super) fn config(settings: &Settings<'_>) -> Result<Json> {
    for key in UNREAD {
        let is_set = match settings.gguf.metadata().get(&settings.key(key)) {
            None => false,
            Some(value) => value.as_u64() != Some(0) && value.as_f64() != Some(0.0),
        };
        if is_set {
            let problem = format!(
                "it is not read for the architecture {}; expected no such key",
                settings.architecture.name
            );
            return Err(wrong_key(&settings.key(key), problem));
        }
    }
    let sizes = sizes(settings)?;
    let mut config = match settings.architecture.family {
        Family::Decoder => decoder(settings, &sizes)?,
        Family::Gemma => gemma(settings, &sizes)?,
        Family::Gemma3 => gemma3(settings, &sizes)?,
        Family::Gpt2 => gpt2(settings, &sizes)?,
        Family::Bert => bert(settings, &sizes)?,
        Family::NomicBert => nomic_bert(settings, &sizes)?,
    };
    config["model_type"] = settings.architecture.model_type.into();
    config["architectures"] = json!([settings.architecture.class]);
    config["vocab_size"] = sizes.vocab.into();
    config["tie_word_embeddings"] = (!settings.has("output.weight")).into();
    for (name, key) in [
        ("bos_token_id", "tokenizer.ggml.bos_token_id"),
        ("eos_token_id", "tokenizer.ggml.eos_token_id"),
        ("pad_token_id", "tokenizer.ggml.padding_token_id"),
    ] {
        let expected = "the number of a token";
        if let Some(id) = settings.gguf.value(key, expected, Value::as_u64)? {
            config[name] = id.into();
        }
    }
    Ok(config)
}

fn sizes(settings: &Settings<'_>) -> Result<Sizes> {
    const TABLE: &str = "token_embd.weight";
    let sizes = Sizes {
        vocab: settings.rows(TABLE)?,
        positions: settings.count("context_length")?,
        hidden: settings.count("embedding_length")?,
        layers: settings.count("block_count")?,
        heads: settings.count("attention.head_count")?,
        inner: settings.count("feed_forward_length")?,
    };
    check_layers(settings, sizes.layers)?;
    let columns = settings.gguf.tensor(TABLE).map(|tensor| tensor.row());
    if columns != Some(sizes.hidden) {
        let problem = format!(
            "its rows have {} elements; expected {}, the value of `{}`",
            columns.unwrap_or(0),
            sizes.hidden,
            settings.key("embedding_length")
        );
        return Err(wrong_tensor(TABLE, problem));
    }
    if !sizes.hidden.is_multiple_of(sizes.heads)
        && settings.integer("attention.key_length")?.is_none()
    {
        let problem = format!(
            "it is {}; expected a divisor of {}",
            sizes.heads, sizes.hidden
        );
        return Err(wrong_key(&settings.key("attention.head_count"), problem));
    }
    Ok(sizes)
}

/// Returns the number of columns of a head.
fn head(settings: &Settings<'_>, sizes: &Sizes) -> Result<u64> {
    let head = match settings.integer("attention.key_length")? {
        Some(_) => settings.count("attention.key_length")?,
        None => sizes.hidden / sizes.heads,
    };
    let value = settings.integer("attention.value_length")?;
    if let Some(value) = value.filter(|&value| value != head) {
        let problem = format!("it is {value}; expected {head}, the length of a key");
        return Err(wrong_key(&settings.key("attention.value_length"), problem));
    }
    Ok(head)
}

/// Returns the config.json of a decoder with rotary positions.
fn rotary(settings: &Settings<'_>, sizes: &Sizes) -> Result<Json> {
    let head = head(settings, sizes)?;
    let kv_heads = settings
        .integer("attention.head_count_kv")?
        .unwrap_or(sizes.heads);
    if kv_heads == 0 || !sizes.heads.is_multiple_of(kv_heads) {
        let problem = format!("it is {kv_heads}; expected a divisor of {}", sizes.heads);
        return Err(wrong_key(&settings.key("attention.head_count_kv"), problem));
    }
    let theta = settings.real("rope.freq_base")?.unwrap_or(THETA);
    let rotated = settings.integer("rope.dimension_count")?.unwrap_or(head);
    let mut config = json!({
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "max_position_embeddings": sizes.positions,
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon")?,
        "rope_theta": theta,
    });
    if rotated != head {
        if settings.architecture.name != "phi3" || rotated == 0 || rotated > head {
            let problem = format!("it is {rotated}; expected {head}, the columns of a head");
            return Err(wrong_key(&settings.key("rope.dimension_count"), problem));
        }
        config["partial_rotary_factor"] = (rotated as f64 / head as f64).into();
    }
    if let Some(scaling) = rope::scaling(settings, theta, rotated, sizes.positions)? {
        config["rope_scaling"] = scaling;
    }
    // The key `attention_bias` applies to all four linear layers of attention, so check that all or none have biases. The config.json
    // files of Qwen2 and Phi-3 do not have this key.
    if !["qwen2", "phi3"].contains(&settings.architecture.name) {
        let attention = ["attn_q", "attn_k", "attn_v", "attn_output"];
        config["attention_bias"] = biases(settings, &attention)?.into();
    }
    if settings.flag("attention.causal")? == Some(false) {
        config["is_causal"] = false.into();
    }
    Ok(config)
}

fn decoder(settings: &Settings<'_>, sizes: &Sizes) -> Result<Json> {
    let mut config = rotary(settings, sizes)?;
    config["hidden_act"] = "silu".into();
    let window = settings
        .integer("attention.sliding_window")?
        .filter(|&window| window > 0);
    match settings.architecture.name {
        "phi3" => {
            config["sliding_window"] = json!(window);
            let original = settings.integer("rope.scaling.original_context_length")?;
            config["original_max_position_embeddings"] = original.unwrap_or(sizes.positions).into();
        }
        _ => {
            if let Some(window) = window {
                let problem = format!("it is {window}; expected 0 or no such key");
                return Err(wrong_key(
                    &settings.key("attention.sliding_window"),
                    problem,
                ));
            }
        }
    }
    if settings.architecture.name == "llama" {
        config["mlp_bias"] = biases(settings, &["ffn_gate", "ffn_up", "ffn_down"])?.into();
    }
    Ok(config)
}

/// Returns whether the given parts of the first layer have biases. Either all or none of them must have one.
fn biases(settings: &Settings<'_>, parts: &[&str]) -> Result<bool> {
    let name = |part: &str| format!("blk.0.{part}.bias");
    let has = |part: &&&str| settings.has(&name(part));
    let Some(missing) = parts.iter().find(|part| !has(part)) else {
        return Ok(true);
    };
    match parts.iter().find(has) {
        None => Ok(false),
        Some(found) => Err(wrong_tensor(
            &name(found),
            format!("`{}` is missing; expected both or none", name(missing)),
        )),
    }
}

fn gemma(settings: &Settings<'_>, sizes: &Sizes) -> Result<Json> {
    let mut config = rotary(settings, sizes)?;
    config["hidden_act"] = "gelu_pytorch_tanh".into();
    config["hidden_activation"] = "gelu_pytorch_tanh".into();
    Ok(config)
}

fn gemma3(settings: &Settings<'_>, sizes: &Sizes) -> Result<Json> {
    let mut config = rotary(settings, sizes)?;
    config["hidden_activation"] = "gelu_pytorch_tanh".into();
    let local = settings.real("rope.freq_base_swa")?.unwrap_or(THETA);
    config["rope_local_base_freq"] = local.into();
    // No key of a GGUF file has this number. Like llama.cpp, derive it from the number of layers.
    config["query_pre_attn_scalar"] = match sizes.layers {
        LAYERS_OF_27B => (sizes.hidden / sizes.heads).into(),
        _ => config["head_dim"].clone(),
    };
    match settings
        .integer("attention.sliding_window")?
        .filter(|&window| window > 0)
    {
        Some(window) => {
            config["sliding_window"] = window.into();
            let is_local = local_layers(settings, sizes.layers)?;
            let kind = |is_local: bool| match is_local {
                true => "sliding_attention",
                false => "full_attention",
            };
            config["layer_types"] = is_local.into_iter().map(kind).collect();
        }
        None => {
            let all = (0..sizes.layers).map(|_| "full_attention");
            config["layer_types"] = all.collect();
        }
    }
    if let Some(cap) = settings
        .real("final_logit_softcapping")?
        .filter(|&cap| cap != 0.0)
    {
        config["final_logit_softcapping"] = cap.into();
    }
    let is_encoder = settings.architecture.name == "gemma-embedding";
    config["use_bidirectional_attention"] = is_encoder.into();
    if is_encoder {
        // `is_causal` would repeat the information of `use_bidirectional_attention`.
        if let Some(config) = config.as_object_mut() {
            config.remove("is_causal");
        }
    }
    Ok(config)
}

/// Returns for each layer of Gemma 3 whether its attention is limited to a window.
fn local_layers(settings: &Settings<'_>, layers: u64) -> Result<Vec<bool>> {
    const KEY: &str = "attention.sliding_window_pattern";
    let key = settings.key(KEY);
    let every = match settings.gguf.metadata().get(&key) {
        None => PATTERN,
        Some(Value::Array(super::super::Array::Bool(list))) => {
            return match list.len() as u64 == layers {
                true => Ok(list.clone()),
                false => Err(wrong_key(
                    &key,
                    format!(
                        "it has {} elements; expected {layers}, one for each layer",
                        list.len()
                    ),
                )),
            };
        }
        Some(value) => value.as_u64().filter(|&every| every > 0).ok_or_else(|| {
            wrong_key(
                &key,
                "expected an integer of at least 1, or a truth value for each layer",
            )
        })?,
    };
    Ok((1..=layers).map(|layer| layer % every != 0).collect())
}

fn gpt2(settings: &Settings<'_>, sizes: &Sizes) -> Result<Json> {
    Ok(json!({
        "n_embd": sizes.hidden,
        "n_inner": sizes.inner,
        "n_layer": sizes.layers,
        "n_head": sizes.heads,
        "n_positions": settings.rows("position_embd.weight")?,
        "n_ctx": sizes.positions,
        "layer_norm_epsilon": settings.number("attention.layer_norm_epsilon")?,
        "activation_function": "gelu_new",
    }))
}

/// Checks that the model is BERT, because related models such as RoBERTa have the same architecture name.
fn check_bert(settings: &Settings<'_>) -> Result<()> {
    const KEY: &str = "tokenizer.ggml.model";
    let unsupported = |problem: String| Err(GgufProblem::Unsupported { problem });
    if let Some("gpt2" | "t5") = settings.gguf.value(KEY, "a string", Value::as_str)? {
        return unsupported(format!(
            "its architecture is `{}`, and its tokenizer that of RoBERTa, whose position embeddings are not stored as published; expected BERT with WordPiece",
            settings.architecture.name
        ));
    }
    if !settings.has("token_types.weight") {
        return unsupported(
            "it has no tensor `token_types.weight`: it is a relative of BERT such as DistilBERT, which is not read; use its safetensors".to_owned(),
        );
    }
    if settings.flag("attention.causal")? == Some(true) {
        return Err(wrong_key(
            &settings.key("attention.causal"),
            "it is true; expected false",
        ));
    }
    Ok(())
}

fn bert(settings: &Settings<'_>, sizes: &Sizes) -> Result<Json> {
    check_bert(settings)?;
    Ok(json!({
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "max_position_embeddings": settings.rows("position_embd.weight")?,
        "type_vocab_size": settings.rows("token_types.weight")?,
        "layer_norm_eps": settings.number("attention.layer_norm_epsilon")?,
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
    }))
}

/// Returns the config.json of nomic-embed-text, with the keys of the published model code.
fn nomic_bert(settings: &Settings<'_>, sizes: &Sizes) -> Result<Json> {
    check_bert(settings)?;
    Ok(json!({
        "n_embd": sizes.hidden,
        "n_inner": sizes.inner,
        "n_layer": sizes.layers,
        "n_head": sizes.heads,
        "n_positions": sizes.positions,
        "max_trained_positions": sizes.positions,
        "type_vocab_size": settings.rows("token_types.weight")?,
        "layer_norm_epsilon": settings.number("attention.layer_norm_epsilon")?,
        "activation_function": "swiglu",
        "rotary_emb_base": settings.number("rope.freq_base")?,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": false,
        "rotary_emb_scale_base": null,
        "rotary_scaling_factor": null,
        "qkv_proj_bias": false,
        "mlp_fc1_bias": false,
        "mlp_fc2_bias": false,
        "prenorm": false,
        "causal": false,
    }))
}

/// Returns the contents of `1_Pooling/config.json`.
pub(super) fn pooling(settings: &Settings<'_>) -> Result<Option<Json>> {
    let mode = match settings.integer("pooling_type")? {
        None | Some(0) => return Ok(None),
        Some(1) => "pooling_mode_mean_tokens",
        Some(2) => "pooling_mode_cls_token",
        Some(3) => "pooling_mode_lasttoken",
        Some(found) => {
            let problem = format!(
                "it is {found}; expected 0 (none), 1 (mean), 2 (first token) or 3 (last token)"
            );
            return Err(wrong_key(&settings.key("pooling_type"), problem));
        }
    };
    let mut pooling = json!({"word_embedding_dimension": settings.count("embedding_length")?});
    for name in [
        "pooling_mode_cls_token",
        "pooling_mode_mean_tokens",
        "pooling_mode_lasttoken",
    ] {
        pooling[name] = (name == mode).into();
    }
    Ok(Some(pooling))
}
