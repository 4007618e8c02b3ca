//! Scales of a KV cache in E4M3: the names of their tensors, and their values.
//!
//! Programs that write checkpoints give these tensors different names. The name of a scale begins with the name of the attention module, or
//! of the linear layer that computes the keys or the values.

use half::{bf16, f16};

use super::{
    Info, QuantizedError,
    error::{Result, wrong_key, wrong_tensor},
    keys::Keys,
};
use crate::{Element, pickle::shown};

/// Kind of the rows of a KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheRows {
    Keys,
    Values,
}

impl CacheRows {
    fn scale(self) -> &'static str {
        match self {
            Self::Keys => "k_scale",
            Self::Values => "v_scale",
        }
    }

    /// Returns the names that the tensor of the scale may have, without the prefix of the checkpoint. `linear` is the name of the linear
    /// layer that computes the rows, such as `layers.0.self_attn.k_proj`.
    pub fn scale_names(self, linear: &str) -> Vec<String> {
        let own = self.scale();
        let mut names = Vec::new();
        if let Some((attention, _)) = linear.rsplit_once('.') {
            let of_attention = [
                own.to_owned(),
                format!("attn.{own}"),
                format!("qkv_proj.{own}"),
                // A scale that keys and values share.
                "kv_scale".to_owned(),
                "attn.kv_scale".to_owned(),
            ];
            names.extend(of_attention.map(|name| format!("{attention}.{name}")));
        }
        let of_linear = [own, "output_scale", "kv_scale"];
        names.extend(of_linear.map(|name| format!("{linear}.{name}")));
        names
    }
}

/// Returns whether a tensor is the scale of keys or values in a cache.
pub fn is_cache_scale(name: &str) -> bool {
    match name.rsplit_once('.') {
        Some((_, "k_scale" | "v_scale" | "kv_scale")) => true,
        Some((linear, "output_scale")) => {
            linear.ends_with(".k_proj") || linear.ends_with(".v_proj")
        }
        _ => false,
    }
}

/// Returns the value of a scale.
///
/// # Errors
/// Returns an error if the tensor is not one positive number in f32, f16 or bf16, or if the number or its reciprocal is subnormal or not
/// finite in f32.
pub fn cache_scale(name: &str, info: &Info, bytes: &[u8]) -> Result<f32> {
    if info.dims.iter().any(|&n| n != 1) {
        let problem = format!(
            "is {:?}, expected one number: a KV cache in fp8 has one scale for the keys of a layer and one for its values; use the cache in the type of the activations",
            info.dims
        );
        return Err(wrong_tensor(name, problem));
    }
    let scale = match (info.element, bytes) {
        (Element::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (Element::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (Element::BF16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        (element, _) => {
            let problem = format!(
                "is stored as {element}, expected a scale in {}, {} or {}",
                Element::F32,
                Element::F16,
                Element::BF16
            );
            return Err(wrong_tensor(name, problem));
        }
    };
    // Products with the reciprocal must be finite, too.
    match scale.is_normal() && scale > 0.0 && scale.recip().is_normal() {
        true => Ok(scale),
        false => {
            let problem = format!(
                "is {scale}, expected a positive number that a KV cache in fp8 can be divided by; use the cache in the type of the activations, or another checkpoint"
            );
            Err(wrong_tensor(name, problem))
        }
    }
}

/// Reason why the scales of a checkpoint do not apply to a KV cache in E4M3: a key of config.json, and the problem with its value.
#[derive(Debug)]
pub(super) struct OtherCache {
    key: String,
    problem: String,
}

impl OtherCache {
    pub fn error(&self) -> QuantizedError {
        wrong_key(&self.key, self.problem.clone())
    }
}

/// Reads the keys that describe the quantization of the KV cache. Returns `None` if there are none or if they specify E4M3, else the reason
/// why the scales do not apply to E4M3. An invalid key is such a reason rather than an error, because the checkpoint can be used without
/// the scales.
pub(super) fn other_cache(keys: &mut Keys) -> Option<OtherCache> {
    match read_cache(keys) {
        Ok(other) => other,
        Err(error) => Some(OtherCache {
            key: keys.path("kv_cache_scheme"),
            problem: format!("is not understood: {error}"),
        }),
    }
}

fn read_cache(keys: &mut Keys) -> Result<Option<OtherCache>> {
    const CURE: &str = "use the cache in the type of the activations";
    let key = keys.path("kv_cache_quant_algo");
    if let Some(found) = keys.text(&["kv_cache_quant_algo"])?
        && found != "fp8"
    {
        let problem = format!(
            "is `{}`, but its scales are used for a KV cache in fp8; {CURE}",
            shown(&found)
        );
        return Ok(Some(OtherCache { key, problem }));
    }
    let key = keys.path("kv_cache_scheme");
    let Some(mut scheme) = keys.object("kv_cache_scheme")? else {
        return Ok(None);
    };
    let bits = scheme.whole(&["num_bits"])?;
    let kind = scheme.text(&["type"])?;
    let is_symmetric = scheme.flag("symmetric")?;
    let is_e4m3 = bits.is_none_or(|bits| bits == 8)
        && kind.as_deref().is_none_or(|kind| kind == "float")
        && is_symmetric != Some(false);
    let problem = || {
        format!(
            "has {} bits of type `{}`{}, but its scales are used for a KV cache in fp8; {CURE}",
            bits.map_or("an unknown number of".to_owned(), |bits| bits.to_string()),
            shown(kind.as_deref().unwrap_or("float")),
            match is_symmetric {
                Some(false) => " with zero points",
                Some(true) | None => "",
            }
        )
    };
    Ok((!is_e4m3).then(|| OtherCache {
        key,
        problem: problem(),
    }))
}
