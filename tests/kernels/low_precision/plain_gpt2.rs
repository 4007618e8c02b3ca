//! A reference implementation of GPT-2 with plain loops in f64. It optionally rounds keys and values to E4M3, by a search for the nearest
//! value.

use std::collections::BTreeMap;

use serde_json::Value;

/// Checkpoint folder of a small trained GPT-2 in f16.
pub const FOLDER: &str = "tests/checkpoints/writer";

pub struct PlainGpt2 {
    weights: BTreeMap<String, Vec<f64>>,
    width: usize,
    heads: usize,
    layers: usize,
    vocabulary: usize,
    /// All E4M3 values from 0 to 448, in ascending order. Empty if keys and values are not rounded.
    values: Vec<f64>,
}

impl PlainGpt2 {
    pub fn new(is_rounded: bool) -> Self {
        let read = |name: &str| std::fs::read(format!("{FOLDER}/{name}")).expect("a checkpoint");
        let config: Value = serde_json::from_slice(&read("config.json")).expect("JSON");
        let size = |key: &str| config[key].as_u64().expect("a size") as usize;
        let bytes = read("model.safetensors");
        let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("tensors");
        let weights = tensors.iter().map(|(name, tensor)| {
            assert_eq!(tensor.dtype(), safetensors::Dtype::F16);
            let values = tensor.data().chunks_exact(2);
            let values = values.map(|b| from_f16(u16::from_le_bytes([b[0], b[1]])));
            let name = name.strip_prefix("transformer.").unwrap_or(name);
            (name.to_owned(), values.collect())
        });
        let values = (0..127u32).map(|code| {
            let (exponent, mantissa) = ((code >> 3) as i32, f64::from(code & 7));
            match exponent {
                0 => mantissa / 8.0 * 2f64.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
            }
        });
        Self {
            weights: weights.collect(),
            width: size("n_embd"),
            heads: size("n_head"),
            layers: size("n_layer"),
            vocabulary: size("vocab_size"),
            values: if is_rounded {
                values.collect()
            } else {
                Vec::new()
            },
        }
    }

    /// Returns, for each token of a sequence, the logits of the next token.
    pub fn logits(&self, tokens: &[u32]) -> Vec<Vec<f64>> {
        let (width, head) = (self.width, self.width / self.heads);
        let (words, places) = (&self.weights["wte.weight"], &self.weights["wpe.weight"]);
        let mut rows: Vec<Vec<f64>> = Vec::new();
        for (position, &token) in tokens.iter().enumerate() {
            let word = &words[token as usize * width..][..width];
            let place = &places[position * width..][..width];
            rows.push(word.iter().zip(place).map(|(a, b)| a + b).collect());
        }
        for layer in 0..self.layers {
            let of = |name: &str| format!("h.{layer}.{name}");
            let all: Vec<Vec<f64>> = rows
                .iter()
                .map(|row| self.linear(&of("attn.c_attn"), &self.norm(&of("ln_1"), row)))
                .collect();
            let stored = |row: &Vec<f64>, part: usize| -> Vec<f64> {
                let columns = &row[part * width..][..width];
                columns.iter().map(|&v| self.rounded(v)).collect()
            };
            let keys: Vec<Vec<f64>> = all.iter().map(|row| stored(row, 1)).collect();
            let values: Vec<Vec<f64>> = all.iter().map(|row| stored(row, 2)).collect();
            for (t, row) in rows.iter_mut().enumerate() {
                let mut context = vec![0.0; width];
                for h in 0..self.heads {
                    let columns = h * head..(h + 1) * head;
                    let query = &all[t][columns.clone()];
                    let score = |key: &Vec<f64>| {
                        let terms = key[columns.clone()].iter().zip(query);
                        terms.map(|(k, q)| k * q).sum::<f64>() / (head as f64).sqrt()
                    };
                    let weights: Vec<f64> = keys[..=t].iter().map(|k| score(k).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    for (weight, value) in weights.iter().zip(&values) {
                        let columns = columns.clone();
                        for (to, v) in context[columns.clone()].iter_mut().zip(&value[columns]) {
                            *to += weight / sum * v;
                        }
                    }
                }
                let added = self.linear(&of("attn.c_proj"), &context);
                row.iter_mut().zip(added).for_each(|(to, v)| *to += v);
                let up = self.linear(&of("mlp.c_fc"), &self.norm(&of("ln_2"), row));
                let added = self.linear(
                    &of("mlp.c_proj"),
                    &up.into_iter().map(gelu).collect::<Vec<_>>(),
                );
                row.iter_mut().zip(added).for_each(|(to, v)| *to += v);
            }
        }
        let logits = |row: &Vec<f64>| {
            let row = self.norm("ln_f", row);
            let of = |id: usize| {
                words[id * width..][..width]
                    .iter()
                    .zip(&row)
                    .map(|(a, b)| a * b)
                    .sum()
            };
            (0..self.vocabulary).map(of).collect()
        };
        rows.iter().map(logits).collect()
    }

    /// Returns the E4M3 value nearest to `value`, or `value` itself if keys and values are not rounded. Ties go to the value with an even
    /// mantissa.
    fn rounded(&self, value: f64) -> f64 {
        let distance = |code: usize| (self.values[code] - value.abs()).abs();
        let mut codes = 0..self.values.len();
        let Some(mut nearest) = codes.next() else {
            return value;
        };
        for code in codes {
            let is_nearer = distance(code) < distance(nearest);
            if is_nearer || (distance(code) == distance(nearest) && code % 2 == 0) {
                nearest = code;
            }
        }
        self.values[nearest].copysign(value)
    }

    /// Returns `x · weight + bias` for a weight of shape `[inputs, outputs]`.
    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mut out = self.weights[&format!("{name}.bias")].clone();
        let weight = self.weights[&format!("{name}.weight")].chunks_exact(out.len());
        for (x, row) in x.iter().zip(weight) {
            out.iter_mut().zip(row).for_each(|(to, w)| *to += x * w);
        }
        out
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        let scale = (variance + 1e-5).sqrt();
        let [gamma, beta] = ["weight", "bias"].map(|part| &self.weights[&format!("{name}.{part}")]);
        let parts = x.iter().zip(gamma.iter().zip(beta));
        parts
            .map(|(v, (g, b))| (v - mean) / scale * g + b)
            .collect()
    }
}

fn gelu(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    0.5 * x * (1.0 + inner.tanh())
}

fn from_f16(bits: u16) -> f64 {
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023) / 1024.0);
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-14),
        _ => (1.0 + mantissa) * 2f64.powi(exponent - 15),
    };
    if bits >> 15 == 1 {
        -magnitude
    } else {
        magnitude
    }
}
