//! Writes the checkpoints of `tests/checkpoints` as GGUF files, like llama.cpp's converter.
#![allow(
    dead_code,
    reason = "each test file is a crate of its own and uses a part"
)]

use std::path::{Path, PathBuf};

use half::f16;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value as Json;

/// Storage format of the matrices of a GGUF file. All other tensors are F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    F32,
    F16,
    /// Q8_0: blocks of 32 elements. Matrices whose row length is not a multiple of 32 are F32.
    Q8,
    /// Q4_0: blocks of 32 elements, with the same exception as `Q8`. The element with the largest magnitude is stored as -8, so a block in
    /// which this element is positive has a negative scale.
    Q4,
}

/// Builder of a GGUF file.
#[derive(Default)]
pub struct Gguf {
    n_keys: u64,
    keys: Vec<u8>,
    tensors: Vec<Tensor>,
}

struct Tensor {
    name: String,
    dims: Vec<u64>,
    values: Vec<f32>,
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Gguf {
    fn key(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.n_keys += 1;
        text(&mut self.keys, key);
        self.keys.extend(kind.to_le_bytes());
        self.keys.extend(value);
    }

    pub fn integer(&mut self, key: &str, value: u32) {
        self.key(key, 4, &value.to_le_bytes());
    }

    pub fn real(&mut self, key: &str, value: f32) {
        self.key(key, 6, &value.to_le_bytes());
    }

    pub fn text(&mut self, key: &str, value: &str) {
        let mut bytes = Vec::new();
        text(&mut bytes, value);
        self.key(key, 8, &bytes);
    }

    pub fn texts<S: AsRef<str>>(&mut self, key: &str, values: &[S]) {
        let mut bytes = 8u32.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        for value in values {
            text(&mut bytes, value.as_ref());
        }
        self.key(key, 9, &bytes);
    }

    pub fn kinds(&mut self, values: &[i32]) {
        let mut bytes = 5u32.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        bytes.extend(values.iter().flat_map(|kind| kind.to_le_bytes()));
        self.key("tokenizer.ggml.token_type", 9, &bytes);
    }

    pub fn tensor(&mut self, name: String, dims: Vec<u64>, values: Vec<f32>) {
        self.tensors.push(Tensor { name, dims, values });
    }

    /// Returns the bytes of the file, in version 3 of the GGUF format, with all matrices in `stored`.
    pub fn bytes(&self, stored: Stored) -> Vec<u8> {
        self.mixed(|_| stored)
    }

    /// Returns the bytes of a file in which `stored` chooses the format of each matrix by its name.
    pub fn mixed(&self, stored: impl Fn(&str) -> Stored) -> Vec<u8> {
        const ALIGNMENT: usize = 32;
        let pad = |out: &mut Vec<u8>| out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend(self.n_keys.to_le_bytes());
        out.extend(&self.keys);
        let mut data = Vec::new();
        for tensor in &self.tensors {
            let row = tensor.dims.last().copied().unwrap_or(1);
            let stored = match (tensor.dims.len(), stored(&tensor.name)) {
                (2, stored @ (Stored::Q8 | Stored::Q4)) if row % 32 == 0 => stored,
                (2, Stored::F16) => Stored::F16,
                _ => Stored::F32,
            };
            let code: u32 = match stored {
                Stored::F32 => 0,
                Stored::F16 => 1,
                Stored::Q8 => 8,
                Stored::Q4 => 2,
            };
            text(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            out.extend(tensor.dims.iter().rev().flat_map(|d| d.to_le_bytes()));
            out.extend(code.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            encode(&mut data, &tensor.values, stored);
            pad(&mut data);
        }
        pad(&mut out);
        out.extend(data);
        out
    }
}

fn encode(out: &mut Vec<u8>, values: &[f32], stored: Stored) {
    match stored {
        Stored::F32 => out.extend(values.iter().flat_map(|x| x.to_le_bytes())),
        Stored::F16 => out.extend(values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes())),
        Stored::Q8 => {
            for block in values.chunks_exact(32) {
                let largest = block.iter().fold(0f32, |most, x| most.max(x.abs()));
                let scale = largest / 127.0;
                out.extend(f16::from_f32(scale).to_le_bytes());
                let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
                out.extend(block.iter().map(|x| (x * inverse).round() as i8 as u8));
            }
        }
        Stored::Q4 => {
            for block in values.chunks_exact(32) {
                let larger = |most: f32, &x: &f32| if x.abs() > most.abs() { x } else { most };
                let scale = block.iter().fold(0f32, larger) / -8.0;
                out.extend(f16::from_f32(scale).to_le_bytes());
                let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
                let code = |x: f32| (x * inverse + 8.5).clamp(0.0, 15.0) as u8;
                let (low, high) = block.split_at(16);
                let pairs = low.iter().zip(high);
                out.extend(pairs.map(|(&a, &b)| code(a) | code(b) << 4));
            }
        }
    }
}

pub fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/checkpoints")
        .join(name)
}

fn json(folder: &Path, name: &str) -> Json {
    let text = std::fs::read_to_string(folder.join(name)).expect("it is there");
    serde_json::from_str(&text).expect("JSON")
}

/// Adds the tensors of a safetensors file. `stored` maps a tensor's name in `file` to its name in the GGUF file, or to `None` to omit it.
fn add_tensors(gguf: &mut Gguf, file: &Path, stored: impl Fn(&str) -> Option<String>) {
    let bytes = std::fs::read(file).expect("it is there");
    let tensors = SafeTensors::deserialize(&bytes).expect("it is whole");
    let mut views = tensors.tensors();
    views.sort_by(|(a, _), (b, _)| a.cmp(b));
    for (name, view) in views {
        let Some(stored) = stored(&name) else {
            continue;
        };
        assert_eq!(view.dtype(), Dtype::F16, "{name}");
        let halves = view.data().as_chunks().0.iter();
        let values = halves.map(|&half| f16::from_le_bytes(half).to_f32());
        let dims = view.shape().iter().map(|&d| d as u64).collect();
        gguf.tensor(stored, dims, values.collect());
    }
}

/// Converts a tensor's published name to that of llama.cpp. Each entry of `parts` is a part of the published name and its replacement.
fn renamed(name: &str, parts: &[(&str, &str)]) -> String {
    parts
        .iter()
        .fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}

/// Converts `tests/checkpoints/st-mean`: BERT with WordPiece and mean pooling.
pub fn bert() -> Gguf {
    const NAMES: [(&str, &str); 11] = [
        ("embeddings.word_embeddings", "token_embd"),
        ("embeddings.position_embeddings", "position_embd"),
        ("embeddings.token_type_embeddings", "token_types"),
        ("embeddings.LayerNorm", "token_embd_norm"),
        ("encoder.layer.", "blk."),
        ("attention.output.LayerNorm", "attn_output_norm"),
        ("attention.output.dense", "attn_output"),
        ("attention.self.query", "attn_q"),
        ("attention.self.key", "attn_k"),
        ("attention.self.value", "attn_v"),
        ("intermediate.dense", "ffn_up"),
    ];
    let folder = checkpoint("st-mean");
    let mut gguf = Gguf::default();
    gguf.text("general.architecture", "bert");
    for (key, value) in [
        ("block_count", 2),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 48),
        ("attention.head_count", 2),
        ("pooling_type", 1),
    ] {
        gguf.integer(&format!("bert.{key}"), value);
    }
    gguf.real("bert.attention.layer_norm_epsilon", 1e-12);
    let vocab = json(&folder, "tokenizer.json")["model"]["vocab"].clone();
    let vocab = vocab.as_object().expect("tokens");
    let mut tokens: Vec<(&String, u64)> = vocab
        .iter()
        .map(|(token, id)| (token, id.as_u64().expect("an id")))
        .collect();
    tokens.sort_by_key(|&(_, id)| id);
    const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
    let stored = |&(token, _): &(&String, u64)| match token.strip_prefix("##") {
        _ if SPECIAL.contains(&token.as_str()) => token.clone(),
        Some(inside) => inside.to_owned(),
        None => format!("▁{token}"),
    };
    let stored: Vec<String> = tokens.iter().map(stored).collect();
    gguf.text("tokenizer.ggml.model", "bert");
    gguf.texts("tokenizer.ggml.tokens", &stored);
    let kinds = tokens.iter().map(|(token, _)| match token.as_str() {
        "[UNK]" => 2,
        token if SPECIAL.contains(&token) => 3,
        _ => 1,
    });
    gguf.kinds(&kinds.collect::<Vec<i32>>());
    for (key, id) in [
        ("unknown", 1),
        ("seperator", 3),
        ("padding", 0),
        ("cls", 2),
        ("mask", 4),
    ] {
        gguf.integer(&format!("tokenizer.ggml.{key}_token_id"), id);
    }
    add_tensors(&mut gguf, &folder.join("model.safetensors"), |name| {
        let is_read = !name.contains("position_ids") && !name.starts_with("pooler");
        let name = renamed(name, &NAMES);
        // Replace these endings last. Some names that `NAMES` replaces as a whole have the same ending, such as `attention.output.dense`.
        let rest = [
            (".output.LayerNorm", ".layer_output_norm"),
            (".output.dense", ".ffn_down"),
        ];
        is_read.then(|| renamed(&name, &rest))
    });
    gguf
}

/// Converts `tests/checkpoints/writer`: GPT-2 with single characters as tokens. The tokenizer of the GGUF file is a BPE without merges.
pub fn writer() -> Gguf {
    const NAMES: [(&str, &str); 10] = [
        ("transformer.h.", "blk."),
        ("transformer.wte", "token_embd"),
        ("transformer.wpe", "position_embd"),
        ("transformer.ln_f", "output_norm"),
        ("attn.c_attn", "attn_qkv"),
        ("attn.c_proj", "attn_output"),
        ("ln_1", "attn_norm"),
        ("ln_2", "ffn_norm"),
        ("mlp.c_fc", "ffn_up"),
        ("mlp.c_proj", "ffn_down"),
    ];
    let folder = checkpoint("writer");
    let mut gguf = Gguf::default();
    gguf.text("general.architecture", "gpt2");
    for (key, value) in [
        ("block_count", 4),
        ("context_length", 256),
        ("embedding_length", 96),
        ("feed_forward_length", 384),
        ("attention.head_count", 3),
    ] {
        gguf.integer(&format!("gpt2.{key}"), value);
    }
    gguf.real("gpt2.attention.layer_norm_epsilon", 1e-5);
    let vocab = json(&folder, "tokenizer.json")["model"]["vocab"].clone();
    let mut tokens: Vec<(String, u64)> = vocab
        .as_object()
        .expect("tokens")
        .iter()
        .map(|(token, id)| {
            let bytes = token.replace(' ', "Ġ").replace('\n', "Ċ");
            (bytes, id.as_u64().expect("an id"))
        })
        .collect();
    tokens.sort_by_key(|&(_, id)| id);
    let tokens: Vec<String> = tokens.into_iter().map(|(token, _)| token).collect();
    gguf.text("tokenizer.ggml.model", "gpt2");
    gguf.text("tokenizer.ggml.pre", "gpt-2");
    gguf.texts("tokenizer.ggml.tokens", &tokens);
    let kinds = (0..tokens.len()).map(|id| if id == 0 { 3 } else { 1 });
    gguf.kinds(&kinds.collect::<Vec<i32>>());
    gguf.texts::<&str>("tokenizer.ggml.merges", &[]);
    gguf.integer("tokenizer.ggml.bos_token_id", 0);
    gguf.integer("tokenizer.ggml.eos_token_id", 0);
    add_tensors(&mut gguf, &folder.join("model.safetensors"), |name| {
        Some(renamed(name, &NAMES))
    });
    for tensor in &mut gguf.tensors {
        let is_transposed = ["attn_qkv", "attn_output", "ffn_up", "ffn_down"]
            .iter()
            .any(|part| tensor.name.contains(&format!("{part}.weight")));
        if is_transposed {
            let (rows, columns) = (tensor.dims[0] as usize, tensor.dims[1] as usize);
            let at = |column| (0..rows).map(move |row| row * columns + column);
            let values = &tensor.values;
            tensor.values = (0..columns).flat_map(at).map(|at| values[at]).collect();
            tensor.dims.reverse();
        }
    }
    gguf
}

/// Converts `tests/checkpoints/st-gemma`: Gemma 3 as an encoder, with two linear layers after the pooling. The GGUF file has no tokenizer.
pub fn gemma() -> Gguf {
    const NAMES: [(&str, &str); 15] = [
        ("embed_tokens", "token_embd"),
        ("layers.", "blk."),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "post_attention_norm"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    let folder = checkpoint("st-gemma");
    let mut gguf = Gguf::default();
    gguf.text("general.architecture", "gemma-embedding");
    for (key, value) in [
        ("block_count", 3),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 48),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("attention.sliding_window", 12),
        // Every second layer attends to all tokens: here, the second of the three layers.
        ("attention.sliding_window_pattern", 2),
        ("pooling_type", 1),
    ] {
        gguf.integer(&format!("gemma-embedding.{key}"), value);
    }
    gguf.real("gemma-embedding.attention.layer_norm_rms_epsilon", 1e-6);
    gguf.real("gemma-embedding.rope.freq_base", 1e6);
    add_tensors(&mut gguf, &folder.join("model.safetensors"), |name| {
        let name = renamed(name, &NAMES);
        Some(match name.strip_prefix("norm.") {
            Some(rest) => format!("output_norm.{rest}"),
            None => name,
        })
    });
    for tensor in &mut gguf.tensors {
        if tensor.name.ends_with("norm.weight") {
            tensor.values.iter_mut().for_each(|x| *x += 1.0);
        }
    }
    for (module, stored) in [("2_Dense", "dense_2"), ("3_Dense", "dense_3")] {
        let file = folder.join(module).join("model.safetensors");
        add_tensors(&mut gguf, &file, |name| {
            Some(name.replace("linear", stored))
        });
    }
    gguf
}
