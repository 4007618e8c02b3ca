//! Frequencies of rotary position embeddings, and the published ways to scale them for longer sequences, computed like
//! `modeling_rope_utils` of Hugging Face transformers.

use std::{f64::consts::TAU, ops::Range};

use serde_json::{Map, Value};

use super::{
    config::{Values, lookup},
    error::{At, ModelError, Problem},
    expr::Expr,
};

/// Keys that a scaling object of any kind may have. Each kind rejects other keys that it does not read.
const COMMON: [&str; 4] = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];
const KINDS: [(&str, &[&str]); 8] = [
    ("default", &[]),
    ("linear", &["factor"]),
    ("dynamic", &["factor", "original_max_position_embeddings"]),
    ("ntk", &["factor", "mixed_b"]),
    (
        "llama3",
        &[
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ],
    ),
    ("longrope", &LONG),
    // The name of `longrope` in the first checkpoints of Phi-3.
    ("su", &LONG),
    (
        "yarn",
        &[
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ],
    ),
];

/// Keys that a `dynamic` scaling with the key [`ALPHA`] may have. Only `alpha` changes the frequencies.
const STRETCHED: [&str; 6] = [
    "factor",
    ALPHA,
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
];

/// Key of a `dynamic` scaling with a number that enlarges the base `theta` for sequences of all lengths.
const ALPHA: &str = "alpha";

/// Keys of `longrope`.
const LONG: [&str; 5] = [
    "factor",
    "attention_factor",
    ORIGINAL,
    "short_factor",
    "long_factor",
];

/// Key with the number of positions that a model was trained for before its context was extended.
const ORIGINAL: &str = "original_max_position_embeddings";

/// Maximum number of rotated columns, larger than any head. Each rotary operator keeps one frequency per pair of columns.
const MAX_COLUMNS: u32 = 4096;

pub(super) struct RotaryParams {
    /// Radians per position for each pair of columns.
    pub frequencies: Vec<f32>,
    /// Factor by which the rotated values are multiplied.
    pub factor: f32,
    /// Maximum number of positions that the model supports with these frequencies; `None` if config.json has no limit.
    pub positions: Option<u32>,
    /// Maximum number of positions with the frequencies for long contexts, which [`MAX_CONTEXT`] selects; `None` if there are none.
    pub extended: Option<u32>,
}

/// Key of config.json with the number of positions, before or after scaling, depending on the kind of scaling.
const POSITIONS: &str = "max_position_embeddings";

/// Key of config.json with the maximum number of tokens of a sequence that the caller needs.
pub const MAX_CONTEXT: &str = "max_context";

/// The fields of [`RotaryParams`] in the same order, with frequencies and factor in f64.
type Scaled = (Vec<f64>, f64, Option<u32>, Option<u32>);

impl Values<'_> {
    /// Returns the rotation of the first `width` columns of a head, or of the share `part` of these columns, rounded down.
    pub fn rotary(
        &self,
        width: &At<Expr>,
        part: Option<&At<Expr>>,
        theta: &At<Expr>,
        scaling: &[At<String>],
    ) -> Result<RotaryParams, ModelError> {
        let whole = self.size(width)?;
        let columns = match part {
            None => whole,
            Some(part) => {
                let share = self.real_of(&part.value, &part.span)?;
                (f64::from(whole) * share).min(f64::from(MAX_COLUMNS) + 1.0) as u32
            }
        };
        if columns == 0 || columns % 2 != 0 || columns > MAX_COLUMNS.min(whole) {
            let problem = Problem::OutOfRange {
                what: "the `width` of `rotary`".to_owned(),
                found: columns.to_string(),
                expected: format!(
                    "an even number up to {}: columns are rotated in pairs",
                    MAX_COLUMNS.min(whole)
                ),
            };
            let label = format!("is {columns}");
            let exprs: Vec<&At<Expr>> = part.into_iter().chain([width]).collect();
            return Err(self.about(problem, &exprs, label));
        }
        let theta = f64::from(self.eps(theta)?);
        let width_span = width.span.clone();
        let width = f64::from(columns);
        let plain: Vec<f64> = (0..columns / 2)
            .map(|pair| theta.powf(-f64::from(2 * pair) / width))
            .collect();
        let there = scaling
            .iter()
            .filter_map(|key| Some((key, lookup(self.config, &key.value)?)));
        let there: Vec<(&At<String>, &Value)> = there.collect();
        if let [(first, one), (key, other), ..] = there.as_slice()
            && one != other
        {
            let expected = format!("nothing beside `{}`: remove one of them", first.value);
            return Err(self.wrong(&key.value, other, &expected, &key.span));
        }
        let (frequencies, factor, positions, extended) = match there.first() {
            None => (plain, 1.0, self.positions(&width_span)?, None),
            Some((key, value)) => {
                let published = Published {
                    values: self,
                    key,
                    has_part: part.is_some(),
                    object: value
                        .as_object()
                        .ok_or_else(|| self.wrong(&key.value, value, "an object", &key.span))?,
                };
                published.scale(plain, width, theta)?
            }
        };
        Ok(RotaryParams {
            frequencies: frequencies.into_iter().map(|f| f as f32).collect(),
            factor: factor as f32,
            positions,
            extended,
        })
    }

    /// Value of `max_position_embeddings` in config.json, if present.
    pub fn positions(&self, span: &Range<usize>) -> Result<Option<u32>, ModelError> {
        let Some(value) = lookup(self.config, POSITIONS) else {
            return Ok(None);
        };
        let found = value.as_f64().and_then(whole_positions);
        let wrong = || self.wrong(POSITIONS, value, "a number of positions", span);
        found.map(Some).ok_or_else(wrong)
    }

    /// Value of [`MAX_CONTEXT`] in config.json, if present.
    pub fn max_context(&self) -> Result<Option<u32>, ModelError> {
        let Some(value) = lookup(self.config, MAX_CONTEXT) else {
            return Ok(None);
        };
        let found = value.as_f64().and_then(whole_positions);
        found.map(Some).ok_or_else(|| {
            self.file.error_elsewhere(Problem::out_of_range(
                format!("`{MAX_CONTEXT}`"),
                value,
                "a number of positions",
            ))
        })
    }
}

/// Returns `found` if it is a whole number of positions from 1 to `i32::MAX`.
fn whole_positions(found: f64) -> Option<u32> {
    let is_whole = found >= 1.0 && found <= f64::from(i32::MAX) && found.fract() == 0.0;
    is_whole.then_some(found as u32)
}

/// `positions` times a scaling factor, rounded down.
fn scaled_positions(positions: f64, factor: f64) -> u32 {
    (positions * factor).floor().clamp(1.0, f64::from(i32::MAX)) as u32
}

/// An object of config.json that specifies the frequency scaling.
struct Published<'a> {
    values: &'a Values<'a>,
    key: &'a At<String>,
    /// Whether the description gives the share of the columns that is rotated (`part` of `rotary`).
    has_part: bool,
    object: &'a Map<String, Value>,
}

impl Published<'_> {
    fn scale(&self, plain: Vec<f64>, width: f64, theta: f64) -> Result<Scaled, ModelError> {
        let kind = self.kind()?;
        if let Some(partial) = self.number("partial_rotary_factor")?
            && partial != 1.0
            && !self.has_part
        {
            return Err(self.refuse(
                "partial_rotary_factor",
                "1, or a description that says which columns are rotated",
            ));
        }
        let published = self.values.positions(&self.key.span)?;
        match kind {
            // `max_position_embeddings` is the number of positions before scaling.
            "linear" => {
                let factor = self.above_zero("factor")?;
                let positions = published.map(|n| scaled_positions(f64::from(n), factor));
                let scaled = plain.into_iter().map(|f| f / factor);
                Ok((scaled.collect(), 1.0, positions, None))
            }
            "yarn" => {
                let (all, attention) = self.yarn(plain, width, theta)?;
                let original = self.above_zero("original_max_position_embeddings")?;
                let positions = scaled_positions(original, self.above_zero("factor")?);
                Ok((all, attention, Some(positions), None))
            }
            // `max_position_embeddings` is the number of positions after scaling.
            "ntk" => (self.ntk(width, theta)).map(|all| (all, 1.0, published, None)),
            "llama3" => self.llama3(plain).map(|all| (all, 1.0, published, None)),
            "longrope" | "su" => self.longrope(plain, published),
            "dynamic" if self.is_stretched() => {
                let base = theta * self.above_zero(ALPHA)?.powf(width / (width - 2.0));
                let pairs = (0..plain.len()).map(|pair| 2.0 * pair as f64);
                let all = pairs.map(|column| base.powf(-column / width));
                Ok((all.collect(), 1.0, published, None))
            }
            // Beyond the original number of positions, frequencies depend on the sequence length, so keys in a cache would change as a
            // sequence grows. Longer sequences are therefore rejected.
            "dynamic" => Ok((plain, 1.0, Some(self.trained_positions()?), None)),
            _ => Ok((plain, 1.0, published, None)),
        }
    }

    /// Returns the kind, one of [`KINDS`], and checks that the object has no key that the kind does not read.
    fn kind(&self) -> Result<&'static str, ModelError> {
        let field = match self.object.contains_key("rope_type") {
            true => "rope_type",
            false => "type",
        };
        let name = match self.object.get(field) {
            None => "default",
            Some(Value::String(name)) => name,
            Some(_) => return Err(self.refuse(field, "the name of a scaling")),
        };
        let names: Vec<&str> = KINDS.iter().map(|(name, _)| *name).collect();
        let Some((kind, keys)) = KINDS.iter().find(|(known, _)| *known == name) else {
            return Err(self.refuse(field, &names.join(", ")));
        };
        let keys = match *kind == "dynamic" && self.is_stretched() {
            true => &STRETCHED[..],
            false => *keys,
        };
        let unknown = self
            .object
            .iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(key, _)| key.as_str())
            .find(|key| !COMMON.contains(key) && !keys.contains(key));
        match unknown {
            Some(key) => Err(self.refuse(key, &format!("nothing: `{kind}` does not read it"))),
            None => Ok(kind),
        }
    }

    /// Returns whether the object has the key [`ALPHA`].
    fn is_stretched(&self) -> bool {
        self.object.get(ALPHA).is_some_and(|alpha| !alpha.is_null())
    }

    /// Divides low frequencies by `factor`, keeps high frequencies, and interpolates in between.
    fn llama3(&self, plain: Vec<f64>) -> Result<Vec<f64>, ModelError> {
        let factor = self.above_zero("factor")?;
        let low = self.above_zero("low_freq_factor")?;
        let high = self.above_zero("high_freq_factor")?;
        let positions = self.above_zero("original_max_position_embeddings")?;
        if high <= low {
            return Err(self.refuse("high_freq_factor", "more than low_freq_factor"));
        }
        let scaled = |f: f64| {
            let turns = positions * f / TAU;
            let between = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            (1.0 - between) * f / factor + between * f
        };
        Ok(plain.into_iter().map(scaled).collect())
    }

    /// Scales the base: `(factor · theta)^(−2j / width) / factor^(2 / width)`. The last frequency equals that of `linear`, and the first
    /// frequencies hardly change (NTK-aware scaling, as in the code published with GTE). With `mixed_b`, the frequencies are
    /// `theta^(−2j / width) / exp(a (j + 1)^b)` with `a = ln(factor) / (width / 2)^b`.
    fn ntk(&self, width: f64, theta: f64) -> Result<Vec<f64>, ModelError> {
        let factor = self.above_zero("factor")?;
        let mixed = self.number("mixed_b")?;
        // The published code ignores a factor of 1 or less. Such a factor is an error here.
        if factor <= 1.0 {
            return Err(self.refuse("factor", "a number above 1"));
        }
        let half = width / 2.0;
        let frequency = |pair: f64| match mixed {
            None => (factor * theta).powf(-pair / half) / factor.powf(1.0 / half),
            Some(b) => {
                let a = factor.ln() / half.powf(b);
                theta.powf(-pair / half) / (a * (pair + 1.0).powf(b)).exp()
            }
        };
        Ok((0..half as u32)
            .map(|pair| frequency(f64::from(pair)))
            .collect())
    }

    /// Divides each frequency by its own factor (LongRoPE, Ding et al. 2024). There is a list of factors for contexts of up to the original
    /// number of positions, and one for longer contexts. The maximum context selects one list for all sequences, as in vLLM, because keys
    /// in a cache cannot be rotated again when a sequence grows. Hugging Face transformers selects a list for each forward pass.
    fn longrope(&self, plain: Vec<f64>, published: Option<u32>) -> Result<Scaled, ModelError> {
        let short = self.factors("short_factor", plain.len())?;
        let long = self.factors("long_factor", plain.len())?;
        // config.json of Phi-3 has this key outside the scaling object. That value takes precedence over one in the object.
        let beside = lookup(self.values.config, ORIGINAL).and_then(Value::as_f64);
        let original = match (beside, self.number(ORIGINAL)?, published) {
            (Some(found), ..) | (None, Some(found), _) => found,
            (None, None, Some(positions)) => f64::from(positions),
            (None, None, None) => return Err(self.refuse(ORIGINAL, "a number of positions")),
        };
        let positions = whole_positions(original).filter(|&n| n > 1);
        let positions =
            positions.ok_or_else(|| self.refuse(ORIGINAL, "a number of positions above 1"))?;
        let given = self.number("factor")?;
        let all = published.unwrap_or(positions);
        let factor = given.unwrap_or_else(|| f64::from(all) / original);
        let attention = match self.number("attention_factor")? {
            Some(given) => given,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + factor.ln() / original.ln()).sqrt(),
        };
        let max_context = self.values.max_context()?;
        let (factors, reach) = match max_context.is_some_and(|n| n > positions) {
            true => (long, all),
            false => (short, positions.min(all)),
        };
        let scaled = plain.into_iter().zip(factors).map(|(f, by)| f / by);
        Ok((scaled.collect(), attention, Some(reach), Some(all)))
    }

    /// Returns a list of `n` positive numbers.
    fn factors(&self, field: &str, n: usize) -> Result<Vec<f64>, ModelError> {
        let list = self.object.get(field).and_then(Value::as_array);
        let numbers = list.into_iter().flatten().map(Value::as_f64);
        let numbers: Option<Vec<f64>> = numbers.collect();
        numbers
            .filter(|all| all.len() == n && all.iter().all(|&by| by > 0.0 && by.is_finite()))
            .ok_or_else(|| self.refuse(field, &format!("a list of {n} numbers above 0")))
    }

    /// YaRN scaling (Peng et al. 2023).
    fn yarn(&self, plain: Vec<f64>, width: f64, theta: f64) -> Result<(Vec<f64>, f64), ModelError> {
        let factor = self.above_zero("factor")?;
        let positions = self.above_zero("original_max_position_embeddings")?;
        let fast = self.number("beta_fast")?.unwrap_or(32.0);
        let slow = self.number("beta_slow")?.unwrap_or(1.0);
        let truncate = match self.object.get("truncate") {
            None | Some(Value::Null) => true,
            Some(Value::Bool(truncate)) => *truncate,
            Some(_) => return Err(self.refuse("truncate", "true or false")),
        };
        let pair_of = |turns: f64| width * (positions / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (pair_of(fast), pair_of(slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(width - 1.0));
        if low == high {
            high += 0.001;
        }
        let scaled = |(pair, f): (usize, f64)| {
            let ramp = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
            ramp * f / factor + (1.0 - ramp) * f
        };
        let all = plain.into_iter().enumerate().map(scaled).collect();
        let of = |m: f64| match factor > 1.0 {
            true => 0.1 * m * factor.ln() + 1.0,
            false => 1.0,
        };
        let scales = (self.number("mscale")?, self.number("mscale_all_dim")?);
        let attention = match (self.number("attention_factor")?, scales) {
            (Some(given), _) => given,
            (None, (Some(m), Some(all))) if m != 0.0 && all != 0.0 => of(m) / of(all),
            (None, _) => of(1.0),
        };
        Ok((all, attention))
    }

    /// Number of positions up to which `dynamic` does not scale.
    fn trained_positions(&self) -> Result<u32, ModelError> {
        if let Some(original) = self.number(ORIGINAL)? {
            let refused = || self.refuse(ORIGINAL, "a number of positions");
            return whole_positions(original).ok_or_else(refused);
        }
        let span = &self.key.span;
        let missing = || {
            self.values
                .wrong(POSITIONS, &Value::Null, "a number of positions", span)
        };
        self.values.positions(span)?.ok_or_else(missing)
    }

    fn number(&self, field: &str) -> Result<Option<f64>, ModelError> {
        match self.object.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                let number = value.as_f64().filter(|x| x.is_finite());
                number
                    .map(Some)
                    .ok_or_else(|| self.refuse(field, "a number"))
            }
        }
    }

    fn above_zero(&self, field: &str) -> Result<f64, ModelError> {
        let found = self.number(field)?.filter(|&x| x > 0.0);
        found.ok_or_else(|| self.refuse(field, "a number above 0"))
    }

    fn refuse(&self, field: &str, expected: &str) -> ModelError {
        let key = format!("{}.{field}", self.key.value);
        let value = self.object.get(field).unwrap_or(&Value::Null);
        self.values.wrong(&key, value, expected, &self.key.span)
    }
}
