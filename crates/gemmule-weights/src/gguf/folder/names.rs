//! Architectures, and the published names of their tensors.

use std::collections::BTreeMap;

use super::{
    super::{Gguf, GgufProblem, Value, error::Result},
    Arrangement, Weight,
    settings::Settings,
    shown, wrong_key, wrong_tensor,
};

/// A group of architectures whose config.json files have the same keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    /// Llama and its relatives.
    Decoder,
    Gemma,
    Gemma3,
    Gpt2,
    Bert,
    NomicBert,
}

/// A supported architecture.
#[derive(Debug)]
pub(super) struct Architecture {
    /// Value of `general.architecture`.
    pub name: &'static str,
    pub model_type: &'static str,
    pub class: &'static str,
    pub family: Family,
    /// Stored and published names of the tensors outside the layers, without `.weight` and `.bias`.
    outside: &'static [(&'static str, &'static str)],
    /// Published prefix of the names of a layer's tensors, before the layer number.
    layers: &'static str,
    /// Stored and published names of the tensors of a layer.
    inside: &'static [(&'static str, &'static str)],
}

const OUTSIDE: &[(&str, &str)] = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
];
const LLAMA: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];
const GEMMA3: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_output", "self_attn.o_proj"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

const ARCHITECTURES: [Architecture; 11] = [
    Architecture {
        name: "llama",
        model_type: "llama",
        class: "LlamaForCausalLM",
        family: Family::Decoder,
        outside: OUTSIDE,
        layers: "model.layers.",
        inside: LLAMA,
    },
    Architecture {
        name: "qwen2",
        model_type: "qwen2",
        class: "Qwen2ForCausalLM",
        family: Family::Decoder,
        outside: OUTSIDE,
        layers: "model.layers.",
        inside: LLAMA,
    },
    Architecture {
        name: "qwen3",
        model_type: "qwen3",
        class: "Qwen3ForCausalLM",
        family: Family::Decoder,
        outside: OUTSIDE,
        layers: "model.layers.",
        inside: &[
            ("attn_norm", "input_layernorm"),
            ("attn_q", "self_attn.q_proj"),
            ("attn_k", "self_attn.k_proj"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_q_norm", "self_attn.q_norm"),
            ("attn_k_norm", "self_attn.k_norm"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_norm", "post_attention_layernorm"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ],
    },
    Architecture {
        name: "gpt2",
        model_type: "gpt2",
        class: "GPT2LMHeadModel",
        family: Family::Gpt2,
        outside: &[
            ("token_embd", "transformer.wte"),
            ("position_embd", "transformer.wpe"),
            ("output_norm", "transformer.ln_f"),
            ("output", "lm_head"),
        ],
        layers: "transformer.h.",
        inside: &[
            ("attn_norm", "ln_1"),
            ("attn_qkv", "attn.c_attn"),
            ("attn_output", "attn.c_proj"),
            ("ffn_norm", "ln_2"),
            ("ffn_up", "mlp.c_fc"),
            ("ffn_down", "mlp.c_proj"),
        ],
    },
    Architecture {
        name: "bert",
        model_type: "bert",
        class: "BertModel",
        family: Family::Bert,
        outside: &[
            ("token_embd", "embeddings.word_embeddings"),
            ("position_embd", "embeddings.position_embeddings"),
            ("token_types", "embeddings.token_type_embeddings"),
            ("token_embd_norm", "embeddings.LayerNorm"),
        ],
        layers: "encoder.layer.",
        inside: &[
            ("attn_q", "attention.self.query"),
            ("attn_k", "attention.self.key"),
            ("attn_v", "attention.self.value"),
            ("attn_output", "attention.output.dense"),
            ("attn_output_norm", "attention.output.LayerNorm"),
            ("ffn_up", "intermediate.dense"),
            ("ffn_down", "output.dense"),
            ("layer_output_norm", "output.LayerNorm"),
        ],
    },
    Architecture {
        name: "nomic-bert",
        model_type: "nomic_bert",
        class: "NomicBertModel",
        family: Family::NomicBert,
        outside: &[
            ("token_embd", "embeddings.word_embeddings"),
            ("token_types", "embeddings.token_type_embeddings"),
            ("token_embd_norm", "emb_ln"),
        ],
        layers: "encoder.layers.",
        inside: &[
            ("attn_qkv", "attn.Wqkv"),
            ("attn_output", "attn.out_proj"),
            ("attn_output_norm", "norm1"),
            ("ffn_up", "mlp.fc11"),
            ("ffn_gate", "mlp.fc12"),
            ("ffn_down", "mlp.fc2"),
            ("layer_output_norm", "norm2"),
        ],
    },
    Architecture {
        name: "gemma",
        model_type: "gemma",
        class: "GemmaForCausalLM",
        family: Family::Gemma,
        outside: OUTSIDE,
        layers: "model.layers.",
        inside: LLAMA,
    },
    Architecture {
        name: "gemma3",
        model_type: "gemma3_text",
        class: "Gemma3ForCausalLM",
        family: Family::Gemma3,
        outside: OUTSIDE,
        layers: "model.layers.",
        inside: GEMMA3,
    },
    Architecture {
        name: "gemma-embedding",
        model_type: "gemma3_text",
        class: "Gemma3TextModel",
        family: Family::Gemma3,
        outside: &[
            ("token_embd", "embed_tokens"),
            ("output_norm", "norm"),
            // Linear layers of sentence-transformers, which have separate folders.
            ("dense_2", "2_Dense/linear"),
            ("dense_3", "3_Dense/linear"),
        ],
        layers: "layers.",
        inside: GEMMA3,
    },
    Architecture {
        name: "phi3",
        model_type: "phi3",
        class: "Phi3ForCausalLM",
        family: Family::Decoder,
        outside: OUTSIDE,
        layers: "model.layers.",
        inside: &[
            ("attn_norm", "input_layernorm"),
            ("attn_qkv", "self_attn.qkv_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_norm", "post_attention_layernorm"),
            ("ffn_up", "mlp.gate_up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ],
    },
    Architecture {
        name: "olmo2",
        model_type: "olmo2",
        class: "Olmo2ForCausalLM",
        family: Family::Decoder,
        outside: OUTSIDE,
        layers: "model.layers.",
        inside: &[
            ("attn_q", "self_attn.q_proj"),
            ("attn_k", "self_attn.k_proj"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_q_norm", "self_attn.q_norm"),
            ("attn_k_norm", "self_attn.k_norm"),
            ("attn_output", "self_attn.o_proj"),
            ("post_attention_norm", "post_attention_layernorm"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        ],
    },
];

impl Architecture {
    /// Returns the architecture that a file names.
    pub(super) fn of(gguf: &Gguf) -> Result<&'static Self> {
        const KEY: &str = "general.architecture";
        let name = gguf.value(KEY, "a string", Value::as_str)?;
        let name = name.ok_or_else(|| GgufProblem::NoKey {
            key: KEY.to_owned(),
            expected: "the name of an architecture".to_owned(),
        })?;
        let known = ARCHITECTURES.iter().find(|known| known.name == name);
        known.ok_or_else(|| GgufProblem::Architecture {
            found: shown(name),
            known: ARCHITECTURES.map(|known| known.name).join(", "),
        })
    }
}

/// Returns whether a tensor corresponds to settings of the published config.json, not to a published weight.
fn is_setting(architecture: &Architecture, name: &str) -> bool {
    match architecture.name {
        "llama" => name == "rope_freqs.weight",
        "phi3" => ["rope_factors_long.weight", "rope_factors_short.weight"].contains(&name),
        _ => false,
    }
}

/// Returns all tensors under their published names.
pub(super) fn weights(settings: &Settings<'_>) -> Result<BTreeMap<String, Weight>> {
    let architecture = settings.architecture;
    let heads = settings.count("attention.head_count")?;
    let kv_heads = settings
        .integer("attention.head_count_kv")?
        .unwrap_or(heads);
    let layers = settings.count("block_count")?;
    let mut weights = BTreeMap::new();
    for tensor in settings.gguf.tensors() {
        if is_setting(architecture, &tensor.name) {
            continue;
        }
        let found = published(architecture, &tensor.name, layers).ok_or_else(|| {
            let problem = format!(
                "a model of the architecture {} and {layers} layers has no tensor of this name, or it is not read",
                architecture.name
            );
            wrong_tensor(&tensor.name, problem)
        })?;
        let arrangement = match (architecture.family, found.part, found.ending) {
            (Family::Decoder, "attn_q", _) if architecture.name == "llama" => {
                Arrangement::Halves { heads }
            }
            (Family::Decoder, "attn_k", _) if architecture.name == "llama" => {
                Arrangement::Halves { heads: kv_heads }
            }
            (Family::Gemma | Family::Gemma3, part, "weight") if part.ends_with("norm") => {
                Arrangement::MinusOne
            }
            (Family::Gpt2, "attn_qkv" | "attn_output" | "ffn_up" | "ffn_down", "weight") => {
                Arrangement::Transposed
            }
            _ => Arrangement::None,
        };
        let dims = arrangement.dims(&tensor.dims).map_err(|expected| {
            let problem = format!("it has the sizes {:?}; {expected}", tensor.dims);
            wrong_tensor(&tensor.name, problem)
        })?;
        let weight = Weight {
            dims,
            format: tensor.format,
            tensor: tensor.clone(),
            arrangement,
        };
        weights.insert(found.name, weight);
    }
    Ok(weights)
}

/// A published name, and the components of the stored name.
struct Published<'n> {
    name: String,
    part: &'n str,
    ending: &'n str,
}

/// Returns the published name of a tensor.
fn published<'n>(
    architecture: &Architecture,
    stored: &'n str,
    layers: u64,
) -> Option<Published<'n>> {
    let (path, ending) = stored.rsplit_once('.')?;
    if !["weight", "bias"].contains(&ending) {
        return None;
    }
    let known = |list: &[(&str, &'static str)], part: &str| {
        let found = list.iter().find(|&&(stored, _)| stored == part);
        found.map(|&(_, published)| published)
    };
    let Some(inside) = path.strip_prefix("blk.") else {
        let name = known(architecture.outside, path)?;
        let name = format!("{name}.{ending}");
        return Some(Published {
            name,
            part: path,
            ending,
        });
    };
    let (index, part) = inside.split_once('.')?;
    let number: u64 = index.parse().ok()?;
    // Refuse layer numbers that are not in canonical form, such as those with leading zeros.
    if number >= layers || number.to_string() != index {
        return None;
    }
    let name = known(architecture.inside, part)?;
    let name = format!("{}{number}.{name}.{ending}", architecture.layers);
    Some(Published { name, part, ending })
}

/// Checks that the number of layers does not exceed the number of tensors of the file.
pub(super) fn check_layers(settings: &Settings<'_>, layers: u64) -> Result<()> {
    let tensors = settings.gguf.tensors().len();
    match layers <= tensors as u64 {
        true => Ok(()),
        false => Err(wrong_key(
            &settings.key("block_count"),
            format!(
                "it is {layers}, but the file has {tensors} tensors; expected at most {tensors}"
            ),
        )),
    }
}
