//! `quantization_config` of config.json: the method, its settings, and the modules that are not quantized.

mod compressed;

use serde_json::Value;

use super::{
    cache_scales::{OtherCache, other_cache},
    error::{QuantizedError, Result, wrong_key},
    keys::Keys,
    names::Modules,
};
use crate::pickle::shown;

/// Keys of config.json that may contain the configuration. Earlier versions of compressed-tensors use the second one.
const KEYS: [&str; 2] = ["quantization_config", "compression_config"];

/// Parsed `quantization_config`.
#[derive(Debug)]
pub struct Config {
    pub(super) method: Method,
    /// Modules whose weights are not quantized.
    pub(super) skipped: Vec<Modules>,
    /// Name and settings of the method, for the log.
    summary: String,
    unknown: Vec<String>,
    /// Reason why the scales of the KV cache do not apply to a cache in E4M3; `None` if the scales apply.
    other_cache: Option<OtherCache>,
}

/// Quantization method, which determines the tensors of a module.
#[derive(Debug)]
pub(super) enum Method {
    /// `weight` in E4M3, with a scale per tensor, per output or per block.
    Fp8 {
        /// Rows and columns of a block that shares a scale.
        block: Option<[u64; 2]>,
    },
    Gptq {
        bits: Bits,
        /// Inputs per group; `None` if all inputs form one group.
        group: Option<u64>,
        /// Whether `g_idx` lists the group of each input (`desc_act`).
        ordered: bool,
        /// Whether the checkpoint stores each zero point minus one, as in version 1 of the GPTQ format.
        less_one: bool,
    },
    Awq {
        group: Option<u64>,
    },
    Compressed(Vec<Group>),
}

/// Size of a packed integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bits {
    Four,
    Eight,
}

impl Bits {
    pub fn count(self) -> u32 {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }

    /// Number of integers in a 32-bit word.
    pub fn per_word(self) -> u64 {
        u64::from(32 / self.count())
    }

    /// Code that represents 0 for signed integers.
    pub fn middle(self) -> u16 {
        1 << (self.count() - 1)
    }
}

/// Modules of compressed-tensors that share a scheme.
#[derive(Debug)]
pub(super) struct Group {
    pub targets: Modules,
    pub scheme: Scheme,
    /// Whether the inputs of the modules are quantized, too.
    pub has_inputs: bool,
}

/// Quantization scheme of a group's weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    /// The weights are not quantized.
    Plain,
    Fp8(Scales),
    Int8 {
        scales: Scales,
        symmetric: bool,
    },
    Packed {
        bits: Bits,
        scales: Scales,
        symmetric: bool,
        /// Whether `weight_g_idx` lists the group of each input.
        ordered: bool,
    },
}

/// Values of a matrix that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scales {
    Tensor,
    Channel,
    Group(u64),
    Block([u64; 2]),
}

impl Config {
    /// Parses the quantization of config.json; `None` if there is none.
    ///
    /// # Errors
    /// Returns an error for an unsupported method, or for settings that are invalid, unsupported or contradictory. Keys that
    /// [`unknown`](Self::unknown) returns are ignored.
    pub fn parse(config: &Value) -> Result<Option<Self>> {
        let mut found: Option<(String, &Value)> = None;
        let top = config.as_object().into_iter().flatten();
        for (outer, value) in top {
            let inner = value.as_object().into_iter().flatten();
            let inner = inner.map(|(key, value)| (format!("{outer}.{key}"), key, value));
            for (path, key, value) in std::iter::once((outer.clone(), outer, value)).chain(inner) {
                let is_inside = found.as_ref().is_some_and(|(found, _)| found == outer);
                if !KEYS.contains(&key.as_str()) || value.is_null() || (is_inside && path != *outer)
                {
                    continue;
                }
                match &found {
                    Some((first, other)) if *other != value => {
                        let problem = format!(
                            "differs from `{}`; expected one configuration of the whole checkpoint",
                            shown(first)
                        );
                        return Err(wrong_key(&path, problem));
                    }
                    Some(_) => {}
                    None => found = Some((path, value)),
                }
            }
        }
        match found {
            Some((path, value)) => Self::of(path, value.clone()).map(Some),
            None => Ok(None),
        }
    }

    fn of(path: String, value: Value) -> Result<Self> {
        let is_legacy = path.ends_with(KEYS[1]);
        let mut keys = Keys::of(path, value)?;
        let named = keys.text(&["quant_method"])?;
        let named = match named {
            Some(named) => named,
            None if is_legacy => "compressed-tensors".to_owned(),
            None => {
                let is_bitsandbytes =
                    keys.take("load_in_8bit").is_some() || keys.take("load_in_4bit").is_some();
                if is_bitsandbytes {
                    return Err(method("bitsandbytes"));
                }
                let problem = "is missing, so the method of quantization is unknown; copy it from the published config.json";
                return Err(wrong_key(&keys.path("quant_method"), problem));
            }
        };
        match named.as_str() {
            "fp8" => fp8(keys),
            "fbgemm_fp8" => fbgemm(keys),
            "modelopt" => modelopt(keys),
            "gptq" => gptq(keys),
            "awq" => awq(keys),
            "compressed-tensors" => compressed::parse(keys),
            other => Err(method(other)),
        }
    }

    /// Returns a line for the log: the method and its settings.
    pub fn summary(&self) -> &str {
        &self.summary
    }

    /// Returns whether the method quantizes weights but leaves the inputs of their linear layers unquantized. This holds for GPTQ and AWQ,
    /// and for compressed-tensors if a group of 8-bit weights has no `input_activations`. The other fp8 methods quantize inputs, too.
    pub fn keeps_inputs(&self) -> bool {
        match &self.method {
            Method::Fp8 { .. } => false,
            Method::Gptq { .. } | Method::Awq { .. } => true,
            Method::Compressed(groups) => groups.iter().any(|group| match group.scheme {
                Scheme::Fp8(_) | Scheme::Int8 { .. } => !group.has_inputs,
                Scheme::Packed { bits, .. } => bits == Bits::Eight && !group.has_inputs,
                Scheme::Plain => false,
            }),
        }
    }

    /// Checks that the scales of the KV cache, if there are any, are for a cache in E4M3.
    ///
    /// # Errors
    /// Returns an error that names the key of config.json that specifies another type.
    pub fn check_cache(&self) -> Result<()> {
        match &self.other_cache {
            Some(other) => Err(other.error()),
            None => Ok(()),
        }
    }

    /// Returns the keys that are unknown and therefore ignored.
    pub fn unknown(&self) -> &[String] {
        &self.unknown
    }
}

fn method(found: &str) -> QuantizedError {
    let cure = match found {
        "bitsandbytes" | "hqq" | "torchao" | "mxfp4" | "quanto" | "eetq" => {
            ", or save it dequantized: AutoModelForCausalLM.from_pretrained(FOLDER).dequantize().save_pretrained(NEW) in Python"
        }
        _ => "",
    };
    QuantizedError::Method {
        found: shown(found),
        cure,
    }
}

/// Keys under which tools list the modules that are not quantized.
const SKIPPED: [&str; 4] = [
    "modules_to_not_convert",
    "ignored_layers",
    "ignore",
    "exclude_modules",
];

fn skipped(keys: &mut Keys) -> Result<Vec<Modules>> {
    let mut lists = Vec::new();
    for name in SKIPPED {
        if let Some((key, texts)) = keys.texts(&[name])? {
            lists.push(Modules::parts(key, texts)?);
        }
    }
    Ok(lists)
}

fn fp8(mut keys: Keys) -> Result<Config> {
    let block = keys.pair("weight_block_size")?;
    let refuse = |keys: &mut Keys, name: &str, known: &[&str]| match keys.text(&[name])? {
        Some(found) if !known.contains(&found.as_str()) => {
            let problem = format!("is `{}`, expected {}", shown(&found), known.join(" or "));
            Err(wrong_key(&keys.path(name), problem))
        }
        _ => Ok(()),
    };
    refuse(&mut keys, "fmt", &["e4m3", "float8_e4m3fn"])?;
    refuse(&mut keys, "scale_fmt", &["float", "ue8m0"])?;
    refuse(&mut keys, "expert_dtype", &["fp8"])?;
    refuse(&mut keys, "activation_scheme", &["dynamic", "static"])?;
    let sizes = block.map(|[rows, columns]| format!(", in blocks of {rows} x {columns}"));
    Ok(Config {
        method: Method::Fp8 { block },
        skipped: skipped(&mut keys)?,
        summary: format!("fp8{}", sizes.unwrap_or_default()),
        other_cache: other_cache(&mut keys),
        unknown: keys.unknown(&[
            "dequantize",
            "is_checkpoint_fp8_serialized",
            "modules_to_convert",
            "quantization_status",
        ]),
    })
}

fn fbgemm(mut keys: Keys) -> Result<Config> {
    Ok(Config {
        method: Method::Fp8 { block: None },
        skipped: skipped(&mut keys)?,
        summary: "fbgemm_fp8".to_owned(),
        other_cache: other_cache(&mut keys),
        unknown: keys.unknown(&["activation_scale_ub"]),
    })
}

fn modelopt(mut keys: Keys) -> Result<Config> {
    let algorithm = keys.text(&["quant_algo"])?;
    if algorithm.as_deref() != Some("fp8") {
        let found = match algorithm {
            Some(found) => format!("is `{}`", shown(&found)),
            None => "is missing".to_owned(),
        };
        let problem =
            format!("{found}, expected FP8, the only one of ModelOpt's algorithms that is read");
        return Err(wrong_key(&keys.path("quant_algo"), problem));
    }
    Ok(Config {
        method: Method::Fp8 { block: None },
        skipped: skipped_by_wildcards(&mut keys)?,
        summary: "fp8 of ModelOpt".to_owned(),
        other_cache: other_cache(&mut keys),
        unknown: keys.unknown(&["config_groups", "producer"]),
    })
}

/// Reads lists of names in which `*` matches any text.
fn skipped_by_wildcards(keys: &mut Keys) -> Result<Vec<Modules>> {
    let mut lists = Vec::new();
    for name in SKIPPED {
        let Some((key, texts)) = keys.texts(&[name])? else {
            continue;
        };
        let texts = texts.into_iter().map(|text| match text.contains('*') {
            true => format!("re:{}$", text.replace('.', r"\.").replace('*', ".*")),
            false => text,
        });
        lists.push(Modules::compressed(key, texts.collect())?);
    }
    Ok(lists)
}

fn bits(keys: &mut Keys, read: &[Bits]) -> Result<Bits> {
    let path = keys.path("bits");
    let expected = || {
        let counts: Vec<String> = read.iter().map(|bits| bits.count().to_string()).collect();
        counts.join(" or ")
    };
    match keys.whole(&["bits", "w_bit", "wbits"])? {
        Some(found) => {
            let mut read = read.iter();
            let bits = read.find(|bits| i64::from(bits.count()) == found);
            bits.copied().ok_or_else(|| {
                let problem = format!(
                    "is {found}, expected {}; use the model in that number of bits",
                    expected()
                );
                wrong_key(&path, problem)
            })
        }
        None => {
            let problem = format!("is missing, expected {}", expected());
            Err(wrong_key(&path, problem))
        }
    }
}

/// Returns the number of inputs per group; `None` if all inputs form one group.
fn group_size(keys: &mut Keys) -> Result<Option<u64>> {
    let path = keys.path("group_size");
    match keys.whole(&["group_size", "q_group_size"])? {
        Some(-1) => Ok(None),
        Some(size @ 1..) => Ok(Some(size.unsigned_abs())),
        Some(found) => {
            let problem = format!("is {found}, expected a positive number, or -1 for one group");
            Err(wrong_key(&path, problem))
        }
        None => Err(wrong_key(
            &path,
            "is missing; copy it from the published config.json",
        )),
    }
}

fn groups_shown(group: Option<u64>) -> String {
    match group {
        Some(size) => format!("groups of {size}"),
        None => "one group per output".to_owned(),
    }
}

fn gptq(mut keys: Keys) -> Result<Config> {
    let bits = bits(&mut keys, &[Bits::Four, Bits::Eight])?;
    let group = group_size(&mut keys)?;
    let ordered = keys.flag("desc_act")?.unwrap_or(false);
    let path = keys.path("checkpoint_format");
    let less_one = match keys.text(&["checkpoint_format", "format"])?.as_deref() {
        None | Some("gptq") => true,
        Some("gptq_v2") => false,
        Some(other) => {
            let problem = format!(
                "is `{}`, expected gptq or gptq_v2; use the checkpoint in one of these formats",
                shown(other)
            );
            return Err(wrong_key(&path, problem));
        }
    };
    if keys.flag("is_marlin_format")? == Some(true) {
        let problem = "is true, and weights in the order of Marlin are not read; use the checkpoint in the format gptq";
        return Err(wrong_key(&keys.path("is_marlin_format"), problem));
    }
    let path = keys.path("pack_dtype");
    if let Some(found) = keys.text(&["pack_dtype"])?
        && found != "int32"
    {
        let problem = format!("is `{}`, expected int32", shown(&found));
        return Err(wrong_key(&path, problem));
    }
    let mut skipped = skipped(&mut keys)?;
    let path = keys.path("dynamic");
    if let Some(dynamic) = keys.object("dynamic")? {
        let start = format!("{path}.");
        let mut excluded = Modules::default();
        for (key, settings) in dynamic.entries() {
            let pattern = key.strip_prefix(&start).unwrap_or(&key);
            if let Some(pattern) = pattern.strip_prefix("-:") {
                excluded.add_pattern(&path, pattern)?;
            } else if settings.as_object().is_none_or(|s| !s.is_empty()) {
                let problem = format!(
                    "has settings of their own for the modules `{}`, which is not read; use a checkpoint whose modules have the same settings",
                    shown(pattern)
                );
                return Err(wrong_key(&path, problem));
            }
        }
        skipped.push(excluded);
    }
    let order = if ordered {
        ", in the order of activations"
    } else {
        ""
    };
    Ok(Config {
        method: Method::Gptq {
            bits,
            group,
            ordered,
            less_one,
        },
        skipped,
        other_cache: None,
        summary: format!(
            "gptq in {} bits, {}{order}",
            bits.count(),
            groups_shown(group)
        ),
        unknown: keys.unknown(&GPTQ_HARMLESS),
    })
}

/// Keys that affect only calibration or kernels.
const GPTQ_HARMLESS: [&str; 27] = [
    "act_group_aware",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "cache_examples_on_gpu",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "exllama_config",
    "lm_head",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "mse",
    "pad_token_id",
    "static_groups",
    "sym",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
    "disable_exllama",
];

fn awq(mut keys: Keys) -> Result<Config> {
    bits(&mut keys, &[Bits::Four])?;
    let group = group_size(&mut keys)?;
    let path = keys.path("version");
    match keys
        .text(&["version", "format", "checkpoint_format"])?
        .as_deref()
    {
        None | Some("gemm") => {}
        Some(other) => {
            let problem = format!(
                "is `{}`, expected gemm; use the checkpoint in that layout",
                shown(other)
            );
            return Err(wrong_key(&path, problem));
        }
    }
    let path = keys.path("backend");
    if keys.text(&["backend"])?.as_deref() == Some("llm-awq") {
        let problem =
            "is llm-awq, whose layout is not read; use a checkpoint of AutoAWQ in the layout gemm";
        return Err(wrong_key(&path, problem));
    }
    if keys.flag("zero_point")? == Some(false) {
        let problem =
            "is false, and AWQ without zero points is not read; use a checkpoint with zero points";
        return Err(wrong_key(&keys.path("zero_point"), problem));
    }
    let mut harmless = GPTQ_HARMLESS.to_vec();
    harmless.extend([
        "do_fuse",
        "fuse_max_seq_len",
        "modules_to_fuse",
        "exllama_config",
        "desc_act",
    ]);
    Ok(Config {
        method: Method::Awq { group },
        skipped: skipped(&mut keys)?,
        summary: format!("awq in 4 bits, {}", groups_shown(group)),
        other_cache: None,
        unknown: keys.unknown(&harmless),
    })
}
