//! The configuration of compressed-tensors: groups of modules, each with the quantization scheme of its weights.

use super::{
    super::{
        cache_scales::other_cache,
        error::{Result, wrong_key},
        keys::Keys,
        names::Modules,
    },
    Bits, Config, Group, Method, Scales, Scheme,
};
use crate::pickle::shown;

const FORMATS: [&str; 5] = [
    "dense",
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
];

pub(super) fn parse(mut keys: Keys) -> Result<Config> {
    let sparsity = keys.object("sparsity_config")?;
    // Some versions of Hugging Face transformers nest the configuration.
    if let Some(inner) = keys.object("quantization_config")? {
        keys = inner;
    }
    let path = keys.path("format");
    let format = keys.text(&["format"])?;
    // With mixed precision, each group has its own format.
    let format = format.filter(|format| format != "mixed-precision");
    check_format(&path, format.as_deref())?;
    if let Some(mut sparsity) = sparsity {
        let path = sparsity.path("format");
        match sparsity.text(&["format"])?.as_deref() {
            None | Some("dense") => {}
            Some(other) => {
                let problem = format!(
                    "is `{}`, and sparse weights are not read; use a checkpoint of dense weights",
                    shown(other)
                );
                return Err(wrong_key(&path, problem));
            }
        }
    }
    if let Some(mut transforms) = keys.object("transform_config")?
        && let Some(groups) = transforms.object("config_groups")?
        && groups.entries().next().is_some()
    {
        let problem =
            "has transforms of activations, which are not computed; use a checkpoint without them";
        return Err(wrong_key(&keys.path("transform_config"), problem));
    }
    let mut skipped = Vec::new();
    if let Some((key, texts)) = keys.texts(&["ignore"])? {
        skipped.push(Modules::compressed(key, texts)?);
    }
    let path = keys.path("config_groups");
    let Some(listed) = keys.object("config_groups")? else {
        let problem = "is missing; copy it from the published config.json";
        return Err(wrong_key(&path, problem));
    };
    let mut groups = Vec::new();
    let mut shown_groups = Vec::new();
    for (path, value) in listed.entries() {
        let (group, summary) = group(Keys::of(path, value)?, format.as_deref())?;
        if !shown_groups.contains(&summary) {
            shown_groups.push(summary);
        }
        groups.push(group);
    }
    Ok(Config {
        method: Method::Compressed(groups),
        skipped,
        summary: format!("compressed-tensors ({})", shown_groups.join("; ")),
        other_cache: other_cache(&mut keys),
        unknown: keys.unknown(&[
            "global_compression_ratio",
            "quantization_status",
            "version",
            "run_compressed",
        ]),
    })
}

fn check_format(path: &str, format: Option<&str>) -> Result<()> {
    match format {
        Some(other) if !FORMATS.contains(&other) => {
            let problem = format!(
                "is `{}`, which is not read; expected one of {}; use the model in one of these formats",
                shown(other),
                FORMATS.join(", ")
            );
            Err(wrong_key(path, problem))
        }
        _ => Ok(()),
    }
}

/// Parses a group. Also returns its description for the log.
fn group(mut keys: Keys, outer: Option<&str>) -> Result<(Group, String)> {
    let path = keys.path("format");
    let own = keys.text(&["format"])?;
    check_format(&path, own.as_deref())?;
    let Some((key, texts)) = keys.texts(&["targets"])? else {
        return Err(wrong_key(
            &keys.path("targets"),
            "is missing, expected a list of modules",
        ));
    };
    let targets = Modules::compressed(key, texts)?;
    if let Some(class) = targets.other_class() {
        let problem = format!(
            "has the class `{}`, expected Linear, names of modules, or patterns (`re:…`)",
            shown(class)
        );
        return Err(wrong_key(targets.key(), problem));
    }
    let weights = keys.object("weights")?;
    let has_inputs = keys.object("input_activations")?.is_some();
    let scheme = match (weights, own.as_deref().or(outer)) {
        (None, _) | (_, Some("dense")) => Scheme::Plain,
        (Some(weights), Some(format)) => scheme(weights, format)?,
        (Some(_), None) => {
            let problem = format!("is missing, expected one of {}", FORMATS.join(", "));
            return Err(wrong_key(&path, problem));
        }
    };
    let summary = summary(&scheme);
    let group = Group {
        targets,
        scheme,
        has_inputs,
    };
    Ok((group, summary))
}

fn summary(scheme: &Scheme) -> String {
    let shown = |scales: &Scales| match scales {
        Scales::Tensor => "a scale per tensor".to_owned(),
        Scales::Channel => "a scale per output".to_owned(),
        Scales::Group(size) => format!("groups of {size}"),
        Scales::Block([rows, columns]) => format!("blocks of {rows} x {columns}"),
    };
    match scheme {
        Scheme::Plain => "not quantized".to_owned(),
        Scheme::Fp8(scales) => format!("fp8, {}", shown(scales)),
        Scheme::Int8 { scales, .. } => format!("int8, {}", shown(scales)),
        Scheme::Packed { bits, scales, .. } => {
            format!(
                "packed integers of {} bits, {}",
                bits.count(),
                shown(scales)
            )
        }
    }
}

fn scheme(mut keys: Keys, format: &str) -> Result<Scheme> {
    let path = keys.path("type");
    let is_float = match keys.text(&["type"])?.as_deref() {
        None | Some("int") => false,
        Some("float") => true,
        Some(other) => {
            let problem = format!("is `{}`, expected int or float", shown(other));
            return Err(wrong_key(&path, problem));
        }
    };
    let n_bits = keys.whole(&["num_bits"])?.unwrap_or(8);
    let wrong_bits = |keys: &Keys, expected: &str| {
        let problem = format!(
            "is {n_bits}, expected {expected} with the format {format}; use the model in that number of bits"
        );
        wrong_key(&keys.path("num_bits"), problem)
    };
    if keys.take("dynamic").is_some_and(|value| value != false) {
        let problem = "is set, so the weights are not stored quantized; expected false";
        return Err(wrong_key(&keys.path("dynamic"), problem));
    }
    let symmetric = keys.flag("symmetric")?.unwrap_or(true);
    let scales = scales(&mut keys)?;
    let ordered = match keys.take("actorder") {
        None => false,
        Some(value) if value == false || value == "weight" || value == "static" => false,
        Some(value) if value == true || value == "group" || value == "dynamic" => true,
        Some(_) => {
            let problem = "is unknown, expected weight, static, group or dynamic";
            return Err(wrong_key(&keys.path("actorder"), problem));
        }
    };
    let mismatch = |keys: &Keys, is: &str, expected: &str| {
        let problem = format!("is {is}, but the format is {format}, which stores {expected}");
        wrong_key(&keys.path("type"), problem)
    };
    match (format, is_float) {
        ("float-quantized" | "naive-quantized", true) => {
            if n_bits != 8 {
                return Err(wrong_bits(&keys, "8"));
            }
            if !symmetric {
                let problem = "is false, expected true for values in fp8";
                return Err(wrong_key(&keys.path("symmetric"), problem));
            }
            Ok(Scheme::Fp8(scales))
        }
        ("int-quantized" | "naive-quantized", false) => match n_bits {
            2..=8 => Ok(Scheme::Int8 { scales, symmetric }),
            _ => Err(wrong_bits(&keys, "2 to 8")),
        },
        ("pack-quantized", false) => {
            let bits = match n_bits {
                4 => Bits::Four,
                8 => Bits::Eight,
                _ => return Err(wrong_bits(&keys, "4 or 8")),
            };
            Ok(Scheme::Packed {
                bits,
                scales,
                symmetric,
                ordered,
            })
        }
        (_, true) => Err(mismatch(&keys, "float", "integers")),
        (_, false) => Err(mismatch(&keys, "int", "floating point")),
    }
}

fn scales(keys: &mut Keys) -> Result<Scales> {
    let path = keys.path("group_size");
    let whole = keys.whole(&["group_size"])?;
    let group = match whole {
        None | Some(-1) => None,
        Some(size @ 1..) => Some(size.unsigned_abs()),
        Some(found) => {
            let problem = format!("is {found}, expected a positive number");
            return Err(wrong_key(&path, problem));
        }
    };
    let block = keys.pair("block_structure")?;
    let strategy_path = keys.path("strategy");
    let strategy = keys.text(&["strategy"])?;
    match (strategy.as_deref(), group, block) {
        (None, None, None) if whole == Some(-1) => Ok(Scales::Channel),
        (Some("tensor") | None, None, None) => Ok(Scales::Tensor),
        (Some("channel"), None, None) => Ok(Scales::Channel),
        (Some("group") | None, Some(size), None) => Ok(Scales::Group(size)),
        (Some("block"), None, Some(sizes)) => Ok(Scales::Block(sizes)),
        (Some("group"), None, _) => Err(wrong_key(&path, "is missing, expected a positive number")),
        (Some("block"), _, None) => {
            let problem = "is missing, expected two positive numbers";
            Err(wrong_key(&keys.path("block_structure"), problem))
        }
        (Some("tensor" | "channel" | "group" | "block") | None, _, _) => {
            let problem =
                "contradicts `group_size` or `block_structure`; copy the published config.json";
            Err(wrong_key(&strategy_path, problem))
        }
        (Some(other), _, _) => {
            let problem = format!(
                "is `{}`, expected tensor, channel, group or block",
                shown(other)
            );
            Err(wrong_key(&strategy_path, problem))
        }
    }
}
