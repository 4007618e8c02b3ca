//! Scaling of rotary embeddings.

use std::f64::consts::TAU;

use serde_json::{Value as Json, json};

use super::{
    super::{GgufProblem, error::Result},
    settings::Settings,
    shown, wrong_key, wrong_tensor,
};

/// Scaling of Llama 3.1 and later: `low_freq_factor`, `high_freq_factor` and `original_max_position_embeddings`. A GGUF file contains only
/// the resulting factors. llama.cpp's converter uses these numbers for all models that do not specify them.
const LLAMA3: (f64, f64, f64) = (1.0, 4.0, 8192.0);
/// Maximum relative difference between factors stored as f32 and computed factors.
const TOLERANCE: f64 = 1e-4;

/// Returns the value of `rope_scaling`; `None` if positions are not scaled. `head` is the number of rotated columns per head.
pub(super) fn scaling(
    settings: &Settings<'_>,
    theta: f64,
    head: u64,
    positions: u64,
) -> Result<Option<Json>> {
    let factor = match settings.real("rope.scaling.factor")? {
        // The key of older files.
        None => settings.real("rope.scale_linear")?,
        factor => factor,
    };
    let factor = factor.filter(|&factor| factor != 0.0 && factor != 1.0);
    for (key, neutral) in [
        ("rope.scaling.yarn_ext_factor", 1.0),
        ("rope.scaling.yarn_attn_factor", 1.0),
        ("rope.scaling.yarn_log_multiplier", 0.0),
        ("rope.scaling.alpha", 0.0),
    ] {
        if settings.real(key)?.is_some_and(|found| found != neutral) {
            let problem = format!("it is not read; expected {neutral} or no such key");
            return Err(wrong_key(&settings.key(key), problem));
        }
    }
    if settings.has("rope_freqs.weight") {
        return match factor {
            None => llama3(settings, theta, head),
            Some(_) => Err(wrong_tensor(
                "rope_freqs.weight",
                "the metadata scales positions, too; expected one kind of scaling",
            )),
        };
    }
    if settings.has("rope_factors_long.weight") {
        return longrope(settings, head, positions).map(Some);
    }
    let kind = settings.text("rope.scaling.type")?;
    match (kind, factor) {
        (Some("none"), _) | (None | Some("linear" | "yarn"), None) => Ok(None),
        (None | Some("linear"), Some(factor)) => {
            Ok(Some(json!({"rope_type": "linear", "factor": factor})))
        }
        (Some("yarn"), Some(factor)) => yarn(settings, factor).map(Some),
        (Some(kind), _) => Err(wrong_key(
            &settings.key("rope.scaling.type"),
            format!("it is `{}`; expected none, linear or yarn", shown(kind)),
        )),
    }
}

fn yarn(settings: &Settings<'_>, factor: f64) -> Result<Json> {
    let original = settings.count("rope.scaling.original_context_length")?;
    let mut scaling = json!({
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    });
    for (key, published) in [
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ] {
        if let Some(value) = settings.real(key)? {
            scaling[published] = value.into();
        }
    }
    // llama.cpp multiplies this factor by YaRN's attention factor, `0.1 · ln(factor) + 1`.
    if let Some(attention) = settings
        .real("rope.scaling.attn_factor")?
        .filter(|&x| x != 1.0)
    {
        scaling["attention_factor"] = (attention * (0.1 * factor.ln() + 1.0)).into();
    }
    Ok(scaling)
}

/// Returns the factors in a tensor, one for each pair of rotated columns.
fn factors(settings: &Settings<'_>, name: &str, head: u64) -> Result<Vec<f32>> {
    let tensor = settings
        .gguf
        .tensor(name)
        .ok_or_else(|| GgufProblem::Tensor {
            tensor: name.to_owned(),
            problem: "it is missing; expected one factor for each pair of rotated columns"
                .to_owned(),
        })?;
    if tensor.dims != [head / 2] {
        let problem = format!(
            "it has the sizes {:?}; expected [{}], half of the columns of a head",
            tensor.dims,
            head / 2
        );
        return Err(wrong_tensor(name, problem));
    }
    settings.gguf.read(tensor).map_err(|error| error.problem)
}

fn llama3(settings: &Settings<'_>, theta: f64, head: u64) -> Result<Option<Json>> {
    const NAME: &str = "rope_freqs.weight";
    let found = factors(settings, NAME, head)?;
    let factor = found.iter().copied().fold(1.0, f32::max);
    if found.iter().all(|&x| x == 1.0) {
        return Ok(None);
    }
    let (low, high, original) = LLAMA3;
    let factor = f64::from(factor);
    let is_known = found.iter().enumerate().all(|(i, &found)| {
        let frequency = theta.powf(-(2.0 * i as f64) / head as f64);
        let turns = original * frequency / TAU;
        let smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        let expected = 1.0 / ((1.0 - smooth) / factor + smooth);
        (f64::from(found) - expected).abs() <= TOLERANCE * expected
    });
    match is_known {
        true => Ok(Some(json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original as u64,
        }))),
        false => Err(wrong_tensor(
            NAME,
            format!(
                "its factors are not those of Llama 3 with low_freq_factor {low}, high_freq_factor {high} and {original} original positions, and others are not read"
            ),
        )),
    }
}

fn longrope(settings: &Settings<'_>, head: u64, positions: u64) -> Result<Json> {
    let original = settings.count("rope.scaling.original_context_length")?;
    let list = |name: &str| -> Result<Vec<f64>> {
        let factors = factors(settings, name, head)?;
        Ok(factors.into_iter().map(super::settings::decimal).collect())
    };
    let mut scaling = json!({
        "rope_type": "longrope",
        "long_factor": list("rope_factors_long.weight")?,
        "short_factor": list("rope_factors_short.weight")?,
        "original_max_position_embeddings": original,
    });
    if let Some(attention) = settings.real("rope.scaling.attn_factor")? {
        let scale = positions as f64 / original as f64;
        let usual = match scale > 1.0 {
            true => (1.0 + scale.ln() / (original as f64).ln()).sqrt(),
            false => 1.0,
        };
        if (attention - usual).abs() > TOLERANCE * usual {
            scaling["attention_factor"] = attention.into();
        }
    }
    Ok(scaling)
}
