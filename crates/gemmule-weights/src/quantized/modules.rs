//! The tensors of each module. Determines which modules are quantized, and the matrices that their tensors represent.

mod layouts;

use std::collections::BTreeMap;

use self::layouts::Module;
use super::{
    Config, Info, Matrix, QuantizedError,
    config::{Method, Scales, Scheme},
    error::{Result, wrong_key, wrong_tensor},
    matrix::{check_dims, check_element},
    names::Match,
};
use crate::{Element, pickle::shown};

const WEIGHT: &str = "weight";
const SCALE: &str = "weight_scale";
const SCALE_INV: &str = "weight_scale_inv";
const ZERO_POINT: &str = "weight_zero_point";
const PACKED: &str = "weight_packed";
const SHAPE: &str = "weight_shape";
const ORDER: &str = "weight_g_idx";
const QWEIGHT: &str = "qweight";
const QZEROS: &str = "qzeros";
const SCALES: &str = "scales";
const G_IDX: &str = "g_idx";

/// Suffixes of the names of tensors that belong to a quantized weight. The last five occur only in unsupported layouts.
const PARTS: [&str; 16] = [
    WEIGHT,
    SCALE,
    SCALE_INV,
    ZERO_POINT,
    PACKED,
    SHAPE,
    ORDER,
    QWEIGHT,
    QZEROS,
    SCALES,
    G_IDX,
    "weight_scale_2",
    "weight_global_scale",
    "weight_meta",
    "SCB",
    "absmax",
];

/// Suffixes of the names of tensors that quantize activations, keys or values.
const OF_ACTIVATIONS: [&str; 14] = [
    "activation_scale",
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "k_scale",
    "k_zero_point",
    "kv_scale",
    "output_scale",
    "output_zero_point",
    "prob_output_scale",
    "q_scale",
    "q_zero_point",
    "v_scale",
    "v_zero_point",
];

/// The matrices of a checkpoint.
#[derive(Debug, Default)]
pub struct Matrices {
    pub matrices: Vec<Matrix>,
    /// Names of all tensors that belong to the matrices or quantize activations.
    pub parts: Vec<String>,
    /// Number of tensors that quantize activations, which are ignored.
    pub of_activations: usize,
}

/// Tensors of a module, by the suffix of their names.
type Parts<'t> = BTreeMap<&'static str, (&'t str, &'t Info)>;

fn by_module<'t>(tensors: &'t BTreeMap<String, Info>) -> BTreeMap<&'t str, Parts<'t>> {
    let mut modules: BTreeMap<&str, Parts<'_>> = BTreeMap::new();
    for (name, info) in tensors {
        let Some((module, last)) = name.rsplit_once('.') else {
            continue;
        };
        if let Some(&part) = PARTS.iter().find(|&&part| part == last) {
            let parts = modules.entry(module).or_default();
            parts.insert(part, (name, info));
        }
    }
    modules
}

/// Returns whether elements of this type are quantized or packed values, which cannot be used as weights directly.
fn is_packed(element: Element) -> bool {
    match element {
        Element::F8E4M3
        | Element::F8E4M3Fnuz
        | Element::F8E5M2
        | Element::F8E5M2Fnuz
        | Element::F8E8M0
        | Element::I32
        | Element::I16
        | Element::I8
        | Element::U32
        | Element::U16
        | Element::U8 => true,
        Element::F64
        | Element::F32
        | Element::F16
        | Element::BF16
        | Element::C128
        | Element::C64
        | Element::I64
        | Element::U64
        | Element::Bool => false,
    }
}

/// Checks that a checkpoint without a `quantization_config` has no quantized tensors.
///
/// # Errors
/// Returns an error if there is a quantized tensor. The error names the first one.
pub fn check_plain(tensors: &BTreeMap<String, Info>) -> Result<()> {
    for parts in by_module(tensors).values() {
        let weight = parts.get(WEIGHT).copied();
        let packed = weight.filter(|(_, info)| is_packed(info.element));
        let words = [QWEIGHT, PACKED]
            .into_iter()
            .find_map(|part| parts.get(part));
        let words = words.copied().filter(|(_, info)| is_packed(info.element));
        let scales = [SCALE, SCALE_INV]
            .into_iter()
            .find_map(|part| parts.get(part));
        let scales = scales.copied().filter(|_| weight.is_some());
        if let Some((name, info)) = packed.or(words).or(scales) {
            let problem = format!(
                "is stored as {}, a part of a quantized checkpoint, but config.json has no `quantization_config`, which says how to read it; use the published config.json. Older checkpoints have it in quantize_config.json (GPTQ, AWQ) or hf_quant_config.json (ModelOpt): copy its content there, with its `quant_method`",
                info.element
            );
            return Err(wrong_tensor(name, problem));
        }
    }
    Ok(())
}

impl Config {
    /// Finds the matrices of a checkpoint by the names, types and shapes of its tensors. `read` returns the bytes of a tensor. It is
    /// called only for tensors `weight_shape`, which contain the shape of a packed matrix.
    ///
    /// # Errors
    /// Returns the errors of `read`. Returns an error if a tensor is missing, superfluous, or contradicts the configuration in type or
    /// shape.
    pub fn matrices<E: From<QuantizedError>>(
        &self,
        tensors: &BTreeMap<String, Info>,
        mut read: impl FnMut(&str) -> Result<Vec<u8>, E>,
    ) -> Result<Matrices, E> {
        let mut found = Matrices::default();
        for (module, parts) in by_module(tensors) {
            let is_quantized = |(&part, (_, info)): (&&str, &(&str, &Info))| {
                part != WEIGHT || is_packed(info.element)
            };
            let Some((_, &(first, _))) = parts.iter().find(|&(part, of)| is_quantized((part, of)))
            else {
                continue;
            };
            for skipped in &self.skipped {
                if skipped.find(module)?.is_some() {
                    let problem = format!(
                        "is a part of a quantized weight, but `{}` names its module as not quantized; does the config.json belong to this checkpoint?",
                        shown(skipped.key())
                    );
                    return Err(wrong_tensor(first, problem).into());
                }
            }
            let shape = match parts.get(SHAPE) {
                Some(&(name, info)) => {
                    check_element(name, info, &[Element::I64, Element::I32])?;
                    check_dims(name, info, &[&[2]])?;
                    Some(shape(name, info.element, &read(name)?)?)
                }
                None => None,
            };
            let matrix = self.matrix(
                Module {
                    module,
                    parts: &parts,
                    first,
                },
                shape,
            )?;
            found
                .parts
                .extend(parts.values().map(|&(name, _)| name.to_owned()));
            found.matrices.push(matrix);
        }
        let of_activations = tensors.keys().filter(|name| {
            let last = name.rsplit_once('.').map(|(_, last)| last);
            last.is_some_and(|last| OF_ACTIVATIONS.contains(&last))
        });
        let n = found.parts.len();
        found.parts.extend(of_activations.cloned());
        found.of_activations = found.parts.len() - n;
        Ok(found)
    }

    fn matrix(&self, module: Module<'_>, shape: Option<[u64; 2]>) -> Result<Matrix> {
        match &self.method {
            Method::Fp8 { block } => {
                module.check_parts("fp8", &[WEIGHT, SCALE, SCALE_INV])?;
                let name = match (module.find(SCALE), module.find(SCALE_INV)) {
                    (Some((name, _)), Some((other, _))) => {
                        let problem = format!(
                            "is a second scale of the weight, next to `{}`; expected one; use a checkpoint with one scale per weight",
                            shown(name)
                        );
                        return Err(wrong_tensor(other, problem));
                    }
                    (None, Some(_)) => SCALE_INV,
                    (None, None) if block.is_some() => SCALE_INV,
                    (Some(_), None) | (None, None) => SCALE,
                };
                let scales = block.map(Scales::Block);
                module.fp8(name, scales)
            }
            Method::Gptq {
                bits,
                group,
                ordered,
                less_one,
            } => module.gptq(*bits, *group, *ordered, *less_one),
            Method::Awq { group } => module.awq(*group),
            Method::Compressed(_) => {
                let (key, scheme) = self.scheme(module.module)?;
                match scheme {
                    Scheme::Plain => {
                        let problem = format!(
                            "is a part of a quantized weight, but the group of `{}` is not quantized; does the config.json belong to this checkpoint?",
                            shown(key)
                        );
                        Err(wrong_tensor(module.first, problem))
                    }
                    Scheme::Fp8(scales) => {
                        module.check_parts("fp8", &[WEIGHT, SCALE, ZERO_POINT])?;
                        module.fp8(SCALE, Some(*scales))
                    }
                    Scheme::Int8 { scales, symmetric } => module.int8(*scales, *symmetric),
                    Scheme::Packed {
                        bits,
                        scales,
                        symmetric,
                        ordered,
                    } => module.packed(*bits, *scales, *symmetric, *ordered, shape),
                }
            }
        }
    }

    /// Returns the scheme of a module, together with a key of config.json: the key of the list of targets that contains the module. Exact
    /// names take precedence over patterns, and patterns over classes.
    fn scheme(&self, module: &str) -> Result<(&str, &Scheme)> {
        let Method::Compressed(groups) = &self.method else {
            let problem = "has no groups";
            return Err(wrong_key("quantization_config", problem));
        };
        let mut best: Option<(Match, &str, &Scheme)> = None;
        for group in groups {
            let Some(how) = group.targets.find(module)? else {
                continue;
            };
            let key = group.targets.key();
            match best {
                Some((other, first, scheme)) if other == how && *scheme != group.scheme => {
                    let problem = format!(
                        "has the module `{}`, which `{}` has, too, with other settings; expected one group for each module",
                        shown(module),
                        shown(first)
                    );
                    return Err(wrong_key(key, problem));
                }
                Some((other, ..)) if other >= how => {}
                _ => best = Some((how, key, &group.scheme)),
            }
        }
        best.map(|(_, key, scheme)| (key, scheme)).ok_or_else(|| {
            let problem = format!(
                "has no group with the module `{}` as a target, which has quantized tensors; does the config.json belong to this checkpoint?",
                shown(module)
            );
            wrong_key("quantization_config.config_groups", problem)
        })
    }
}

/// Reads the shape of a matrix from a tensor.
fn shape(name: &str, element: Element, bytes: &[u8]) -> Result<[u64; 2]> {
    let sizes: Vec<i64> = match element {
        Element::I64 => {
            let words = bytes.as_chunks::<8>().0.iter();
            words.map(|&word| i64::from_le_bytes(word)).collect()
        }
        _ => {
            let words = bytes.as_chunks::<4>().0.iter();
            words.map(|&word| i32::from_le_bytes(word).into()).collect()
        }
    };
    match sizes.as_slice() {
        &[rows, columns] if rows > 0 && columns > 0 => {
            Ok([rows.unsigned_abs(), columns.unsigned_abs()])
        }
        _ => {
            let problem = format!(
                "holds the sizes {sizes:?}, expected two positive numbers; download the checkpoint again"
            );
            Err(wrong_tensor(name, problem))
        }
    }
}
