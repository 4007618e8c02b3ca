//! Problems to time: an operator of one shape, and the kernels that compute it.

use std::{fmt, str::FromStr};

use gemmule::{
    DType,
    kernels::{Case, KernelSpec, chain::Chain},
    names::nearest,
};
use serde::Serialize;

use crate::launched::ChosenBy;

/// Number of heads in the softmax problems and in most attention problems.
pub(super) const HEADS: u32 = 12;

/// An operator of one shape, with the contenders that compute it.
#[derive(Clone, Debug)]
pub(super) struct Problem {
    pub task: Task,
    /// The sequences that the kernels run on.
    pub case: Case,
    /// Contenders. The first is the kernel that a model launches, and its result is the reference for the others.
    pub contenders: Vec<Contender>,
}

/// A contender: one or several launches of our kernels that compute a task.
#[derive(Clone, Debug)]
pub(super) struct Contender {
    /// Description of the computation, which is the same for every shape. Launches are separated by commas.
    pub label: &'static str,
    pub chain: Chain,
    /// Whether a model launches this contender.
    pub picked: bool,
    /// Whether the cost model, timings or a rule selected this contender; `None` if a model does not launch it.
    pub chosen_by: Option<ChosenBy>,
}

impl Contender {
    pub fn picked(label: &'static str, chain: Chain, by: ChosenBy) -> Self {
        Self {
            label,
            chain,
            picked: true,
            chosen_by: Some(by),
        }
    }

    pub fn other(label: &'static str, chain: Chain) -> Self {
        Self {
            label,
            chain,
            picked: false,
            chosen_by: None,
        }
    }
}

/// Returns the first kernel whose maximum size is at least `size`. A maximum of `None` means that the kernel supports every size.
pub(super) fn by_limit<K>(variants: Vec<(Option<u64>, K)>, size: u32) -> K {
    let (_, kernel) = variants
        .into_iter()
        .find(|(limit, _)| limit.is_none_or(|limit| u64::from(size) <= limit))
        .expect("the last variant serves every size");
    kernel
}

/// Returns the selected kernel, followed by `others`. Skips entries without a kernel, and entries whose kernel or label an earlier entry
/// already has.
pub(super) fn variants<K: Clone + PartialEq + Into<KernelSpec>>(
    (label, by): (&'static str, ChosenBy),
    picked: &K,
    others: impl IntoIterator<Item = (&'static str, Option<K>)>,
) -> Vec<Contender> {
    let mut seen = vec![picked.clone()];
    let mut all = vec![Contender::picked(label, Chain::of(picked.clone()), by)];
    for (label, kernel) in others {
        let known = all.iter().any(|c| c.label == label);
        if let Some(kernel) = kernel.filter(|k| !known && !seen.contains(k)) {
            all.push(Contender::other(label, Chain::of(kernel.clone())));
            seen.push(kernel);
        }
    }
    all
}

/// An operator and its sizes, in the format of the peers' requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(super) enum Task {
    /// Softmax of the scores of `batch` sequences of equal length.
    Softmax {
        batch: u32,
        length: u32,
        heads: u32,
    },
    #[serde(rename = "layernorm")]
    LayerNorm {
        rows: u32,
        width: u32,
    },
    #[serde(rename = "bias_residual_layernorm")]
    BiasResidualLayerNorm {
        rows: u32,
        width: u32,
    },
    Attention {
        set: String,
        heads: u32,
        kv_heads: u32,
        head: u32,
        causal: bool,
        /// Max distance in tokens between a query and a key that it attends to.
        #[serde(skip_serializing_if = "Option::is_none")]
        window: Option<u32>,
        lens: Vec<u32>,
    },
    /// Attention to `keys` keys per sequence. The last `new` keys belong to the tokens of the queries. The others are cached.
    CachedAttention {
        heads: u32,
        kv_heads: u32,
        head: u32,
        sequences: u32,
        new: u32,
        keys: u32,
        #[serde(skip_serializing_if = "Option::is_none")]
        window: Option<u32>,
        /// Whether the cache is in E4M3.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        e4m3: bool,
    },
    Gemm {
        rows: u32,
        n: u32,
        k: u32,
    },
    GemmBiasGelu {
        rows: u32,
        n: u32,
        k: u32,
    },
}

/// Minimum work of a task for any implementation, from which a rate is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Work {
    /// Bytes of the operands, each read once, and of the results, each written once. Vectors with the width of a row are not counted.
    Bytes(f64),
    /// Operations on valid tokens; a multiply-add counts as two.
    Flop(f64),
}

impl Work {
    pub fn unit(self) -> &'static str {
        match self {
            Work::Bytes(_) => "GB/s",
            Work::Flop(_) => "TFLOP/s",
        }
    }

    /// Returns the rate in [`Work::unit`].
    pub fn rate(self, us: f64) -> f64 {
        match self {
            Work::Bytes(n) => n / us / 1e3,
            Work::Flop(n) => n / us / 1e6,
        }
    }
}

/// Returns the number of pairs of a token and an earlier token that is at most `window` tokens away, in a sequence of `n` tokens.
fn up_to(n: u32, window: Option<u32>) -> f64 {
    let far = f64::from(window.map_or(n, |window| window.min(n)));
    // Each token from index `far` on has `far` earlier tokens within the window.
    far * (far - 1.0).max(0.0) / 2.0 + (f64::from(n) - far) * far
}

impl Task {
    pub fn op(&self) -> &'static str {
        match self {
            Task::Softmax { .. } => "softmax",
            Task::LayerNorm { .. } => "layernorm",
            Task::BiasResidualLayerNorm { .. } => "bias_residual_layernorm",
            Task::Attention { .. } => "attention",
            Task::CachedAttention { .. } => "cached_attention",
            Task::Gemm { .. } => "gemm",
            Task::GemmBiasGelu { .. } => "gemm_bias_gelu",
        }
    }

    pub fn work(&self, dtype: DType) -> Work {
        let matrices = |n: f64, rows: u32, width: u32| {
            Work::Bytes(n * f64::from(rows) * f64::from(width) * dtype.bytes() as f64)
        };
        match self {
            Task::Softmax {
                batch,
                length,
                heads,
            } => matrices(
                2.0 * f64::from(*batch) * f64::from(*heads),
                *length,
                *length,
            ),
            Task::LayerNorm { rows, width } => matrices(2.0, *rows, *width),
            Task::BiasResidualLayerNorm { rows, width } => matrices(3.0, *rows, *width),
            Task::Attention {
                heads,
                head,
                causal,
                window,
                lens,
                ..
            } => {
                // Each token attends to itself, and, on each side, to at most `window` other tokens.
                let of = |n: u32| {
                    let side = up_to(n, *window);
                    f64::from(n) + if *causal { side } else { 2.0 * side }
                };
                let pairs: f64 = lens.iter().map(|&n| of(n)).sum();
                Work::Flop(4.0 * pairs * f64::from(*heads) * f64::from(*head))
            }
            Task::CachedAttention {
                kv_heads,
                head,
                sequences,
                new: 1,
                keys,
                ..
            } => matrices(
                2.0 * f64::from(*sequences) * f64::from(*kv_heads),
                *keys,
                *head,
            ),
            Task::CachedAttention {
                heads,
                head,
                sequences,
                new,
                keys,
                window,
                ..
            } => {
                let earlier = up_to(*keys, *window) - up_to(*keys - *new, *window);
                let pairs = f64::from(*new) + earlier;
                let columns = f64::from(*heads) * f64::from(*head);
                Work::Flop(4.0 * f64::from(*sequences) * pairs * columns)
            }
            Task::Gemm { rows, n, k } | Task::GemmBiasGelu { rows, n, k } => {
                Work::Flop(2.0 * f64::from(*rows) * f64::from(*n) * f64::from(*k))
            }
        }
    }
}

/// Formats the shape:
///
/// - `20x500`: sequences x length
/// - `1229x768`: rows x width
/// - `b16_m128 12x64`: set, heads x head size
/// - `16x512 16kv8x128 causal`: also the number of key heads (8), and whether attention is causal
/// - `8x 1 of 96 32kv8x128`: sequences, new tokens, keys, heads, key heads x head size
/// - `1x8192 16kv4x128 causal window 4096`: also the max distance of keys that are attended to
/// - `1229x3072x768`: rows x outputs x inputs
impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Task::Softmax { batch, length, .. } => write!(f, "{batch}x{length}"),
            Task::LayerNorm { rows, width } | Task::BiasResidualLayerNorm { rows, width } => {
                write!(f, "{rows}x{width}")
            }
            Task::Attention {
                set,
                heads,
                kv_heads,
                head,
                causal,
                window,
                ..
            } => {
                let groups = match kv_heads == heads {
                    true => String::new(),
                    false => format!("kv{kv_heads}"),
                };
                let causal = if *causal { " causal" } else { "" };
                write!(f, "{set} {heads}{groups}x{head}{causal}")?;
                within(f, *window)
            }
            Task::CachedAttention {
                heads,
                kv_heads,
                head,
                sequences,
                new,
                keys,
                window,
                e4m3,
            } => {
                let format = if *e4m3 { " e4m3" } else { "" };
                write!(
                    f,
                    "{sequences}x {new} of {keys} {heads}kv{kv_heads}x{head}{format}"
                )?;
                within(f, *window)
            }
            Task::Gemm { rows, n, k } | Task::GemmBiasGelu { rows, n, k } => {
                write!(f, "{rows}x{n}x{k}")
            }
        }
    }
}

fn within(f: &mut fmt::Formatter<'_>, window: Option<u32>) -> fmt::Result {
    window.map_or(Ok(()), |window| write!(f, " window {window}"))
}

/// Group of operators, which `--only` selects by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    Softmax,
    LayerNorm,
    Attention,
    Cached,
    Windows,
    Gemm,
}

impl Family {
    pub const ALL: [(&'static str, Family); 6] = [
        ("softmax", Family::Softmax),
        ("layernorm", Family::LayerNorm),
        ("attention", Family::Attention),
        ("cached", Family::Cached),
        ("windows", Family::Windows),
        ("gemm", Family::Gemm),
    ];
}

#[derive(Debug, thiserror::Error)]
#[error("`{word}` is not a family of kernels{near}; expected some of {known}")]
pub(super) struct NoFamily {
    word: String,
    near: String,
    known: String,
}

impl FromStr for Family {
    type Err = NoFamily;

    fn from_str(word: &str) -> Result<Self, NoFamily> {
        let known = || Self::ALL.iter().map(|(name, _)| *name);
        let found = Self::ALL.iter().find(|(name, _)| *name == word);
        found.map(|(_, family)| *family).ok_or_else(|| NoFamily {
            word: word.to_owned(),
            near: nearest(word, known())
                .map(|near| format!(" (did you mean `{near}`?)"))
                .unwrap_or_default(),
            known: known().collect::<Vec<_>>().join(", "),
        })
    }
}
