//! One file per kernel: its parameters, launch geometry, CPU reference and cases.
//!
//! A kernel is plain data: a struct such as [`BiasResidualLayerNorm`](layernorm::BiasResidualLayerNorm) whose fields
//! are all that its source depends on. [`Kernel::params`] is the only list of parameters: the signature in the
//! generated source, the launch and the tests all read it. [`Kernel::reference`] is the definition in f32/f64 that the
//! CUDA kernel and the fast CPU code are checked against.

pub mod attention;
pub mod beam_search;
pub mod cache;
pub mod chain;
mod class;
pub mod decoding;
pub mod draw;
pub mod elementwise;
pub mod embedding;
pub mod gemm;
pub mod layernorm;
pub mod log_probability;
pub mod pack;
pub mod pooling;
pub mod prepare_attention;
pub mod rms_norm;
pub mod rotary;
mod rows;
mod spec;
pub mod trial;
pub mod upload;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use crate::machine::Instructions;
pub use class::Class;
pub use spec::{KernelSpec, representative};

use crate::machine::Machine;
use crate::tensor::{Element, Extents, Shape, Size};

/// A parameter of a kernel: its name, and the source of its argument.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// Name in the generated signature.
    pub name: &'static str,
    pub role: Role,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Role {
    /// `const T* name`, a tensor of this shape. `fill` says what a test puts there.
    Read {
        element: Element,
        shape: Shape,
        fill: Fill,
    },
    /// `T* name`. The kernel writes every element for which the reference is not NaN.
    Write { element: Element, shape: Shape },
    /// `unsigned int name`, a scalar computed from the batch.
    Count(Size),
}

/// Test data for a tensor that a kernel reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fill {
    /// Normal values.
    Normal { mean: f32, deviation: f32 },
    /// Integers from 0 to below this.
    Below(u32),
    /// Data that describes the batch.
    Meta(Meta),
    /// A row of logits for each sequence: normal values, in every third row rounded, so that many are equal.
    Logits { vocabulary: u32 },
    /// A [`Choice`](decoding::Choice) for each sequence.
    Choices { vocabulary: u32 },
    /// Tokens that are known of each sequence.
    Known,
    /// What was chosen for each sequence: tokens, and what may stand in their place.
    Chosen { vocabulary: u32 },
    /// What is known of beams that are searched.
    Beams(beam_search::BeamData),
}

impl Fill {
    /// Activations: mean 0, deviation 1.
    pub const ACTIVATION: Fill = Fill::Normal {
        mean: 0.0,
        deviation: 1.0,
    };
    /// Weights of a matrix: small, so that results of a GEMM have the magnitude of its input.
    pub const WEIGHT: Fill = Fill::Normal {
        mean: 0.0,
        deviation: 0.05,
    };
}

/// Tensors that describe a batch and are computed by the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Meta {
    /// i32 `[tokens]`: vocabulary ids.
    TokenIds,
    /// i32 `[tokens]`: segment ids.
    TypeIds,
    /// i32 `[tokens]`: index of the token in its sequence, from 0.
    Positions,
    /// i32 `[batch + 1]`: first token of each sequence; the last entry is the number of tokens.
    CuLens,
    /// i64 `[batch + 1]`: offset of each sequence's scores in a head's `pairs`, the prefix sum of squared lengths.
    PairOffsets,
    /// i32 `[batch, longest]`: 1 where a padded input holds a token.
    Mask,
    /// i32 `[batch]`: tokens of a sequence that are not masked as keys, from 1 to its length; the length if nothing is
    /// padded.
    ValidLens,
    /// i32 `[tokens]`: the slot of a KV cache that a token's keys and values are written to.
    TokenSlots,
    /// i32 `[slots]`: the slots of each sequence's keys by position, one sequence after another.
    Slots,
    /// i32 `[batch]`: where in [`Meta::Slots`] a sequence begins.
    SlotStarts,
    /// i32 `[batch]`: keys of a sequence: its tokens in the batch, and those in the cache before.
    KeyLens,
    /// i32 `[source_slots]`: the slots of the keys of each sequence's source by position, one sequence after another.
    /// Sequences of one source repeat them.
    SourceSlots,
    /// i32 `[batch]`: where in [`Meta::SourceSlots`] a sequence begins.
    SourceStarts,
    /// i32 `[batch]`: keys of a sequence's source.
    SourceLens,
    /// i32 `[2·batch]`: the low and the high half of the seed of each sequence's noise.
    Seeds,
}

impl Meta {
    pub fn element(self) -> Element {
        match self {
            Meta::PairOffsets => Element::I64,
            _ => Element::I32,
        }
    }
}

/// A matrix that a kernel copies by TMA: its parameter is a tensor map instead of a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Name of the parameter: a tensor `[rows, columns]` of 16-bit elements, with rows of a
    /// multiple of 16 bytes.
    pub param: &'static str,
    pub box_rows: u32,
    /// 64 or 32 columns use the 128-byte or the 64-byte swizzle in shared memory. Boxes of another multiple of 8
    /// columns are not swizzled.
    pub box_columns: u32,
    pub order: RowOrder,
}

/// Order of a box's rows in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// The matrix's order.
    Plain,
    /// In each [`RowOrder::GROUP`] rows, row 8q + 2j + e lies at place 8j + 2q + e (q, j < 4, e < 2). As the N extent
    /// of an MMA such rows give a lane accumulators of 8 neighbouring columns. Matrix and box have a multiple of that
    /// many rows; coordinates are a column, three zeros, and the group.
    Quads,
    /// The matrix's order, in this many boxes side by side, which one copy places one behind the other. The matrix has
    /// a multiple of `box_columns` columns; coordinates are a zero, a row, and the first box's number.
    Boxes(u32),
    /// In each [`RowOrder::BLOCK`] rows, row 32w + 4g + 2i + h lies at place 64i + 16w + 8h + g (w < 4, g < 8; i,
    /// h < 2). As the M extent of MMAs such rows give a lane accumulators of 4 neighbouring rows. The matrix has a
    /// multiple of [`RowOrder::GROUP`] rows, and a box [`RowOrder::BLOCK`]; coordinates are a column, two zeros, the
    /// group, and zero.
    Fours,
    /// In each sixteen rows, eight of the matrix's first half, and the same eight of its second half. The matrix has a multiple
    /// of sixteen rows, and so has a box; coordinates are a column, two zeros, and the number of the first eight.
    Halves,
}

impl RowOrder {
    /// Rows that are permuted among themselves.
    pub const GROUP: u32 = 32;
    /// Rows of a box in the order of [`RowOrder::Fours`].
    pub const BLOCK: u32 = 128;
}

/// Grid, threads and shared memory of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    pub grid: [u32; 3],
    /// Threads of a CTA, which is one-dimensional.
    pub threads: u32,
    /// Dynamic shared memory of a CTA, in bytes.
    pub shared_bytes: u32,
}

impl Launch {
    /// A one-dimensional grid. Saturates beyond 32 bits, which the driver then refuses.
    pub(crate) fn of_ctas(ctas: u64, threads: u32, shared_bytes: u32) -> Self {
        Self {
            grid: [u32::try_from(ctas).unwrap_or(u32::MAX), 1, 1],
            threads,
            shared_bytes,
        }
    }
}

/// A value that a template reads.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Constant {
    Bool(bool),
    Int(u64),
    /// Text already formatted as CUDA, e.g. `1e-12f`.
    Text(String),
}

impl From<bool> for Constant {
    fn from(v: bool) -> Self {
        Constant::Bool(v)
    }
}
impl From<u64> for Constant {
    fn from(v: u64) -> Self {
        Constant::Int(v)
    }
}
impl From<u32> for Constant {
    fn from(v: u32) -> Self {
        Constant::Int(v.into())
    }
}
impl From<String> for Constant {
    fn from(v: String) -> Self {
        Constant::Text(v)
    }
}
impl From<&str> for Constant {
    fn from(v: &str) -> Self {
        Constant::Text(v.to_owned())
    }
}

/// Values that a template is rendered with, ordered by name, so that rendering is deterministic.
pub type Constants = BTreeMap<&'static str, Constant>;

/// Shortest literal that reads back as the same f32, e.g. `1e-12f`.
pub fn f32_literal(value: f32) -> String {
    let text = format!("{value:?}");
    if text.contains(['.', 'e']) {
        format!("{text}f")
    } else {
        format!("{text}.0f")
    }
}

/// A tensor in host memory, for references and tests.
#[derive(Clone, Debug, PartialEq)]
pub enum HostTensor {
    /// f32, f16 or bf16 elements, widened.
    Real(Vec<f32>),
    /// i32 or i64 elements, widened.
    Index(Vec<i64>),
}

impl HostTensor {
    /// The real elements. A kernel's params fix which of its arguments are real.
    pub fn real(&self) -> &[f32] {
        match self {
            HostTensor::Real(v) => v,
            HostTensor::Index(_) => panic!("the parameter list says that this argument is real"),
        }
    }

    /// The whole-number elements.
    pub fn index(&self) -> &[i64] {
        match self {
            HostTensor::Index(v) => v,
            HostTensor::Real(_) => panic!("the parameter list says that this argument is an index"),
        }
    }
}

/// Bound on the difference of a result from its reference: `|got − want| ≤ absolute + relative·|want|`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    pub absolute: f32,
    pub relative: f32,
    /// The error analysis behind the numbers.
    pub reason: &'static str,
}

/// One batch that a kernel is checked on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// Name in reports: `tiny`, `ragged`, `model`.
    pub name: &'static str,
    pub lens: Vec<u32>,
    /// Tokens of each sequence that lie in a KV cache.
    pub cached: Vec<u32>,
    /// Tokens of the source of each sequence, for kernels that attend to one; none otherwise.
    pub sources: Vec<u32>,
}

impl Case {
    /// Sequences of which nothing is cached.
    pub fn new(name: &'static str, lens: &[u32]) -> Self {
        Self {
            name,
            lens: lens.to_vec(),
            cached: vec![0; lens.len()],
            sources: Vec::new(),
        }
    }

    /// Batches for kernels that use a KV cache: fresh sequences, steps of one token, and parts of sequences among steps.
    pub fn cached() -> Vec<Case> {
        let of = |name, lens: &[u32], cached: &[u32]| Case {
            cached: cached.to_vec(),
            ..Case::new(name, lens)
        };
        vec![
            of("one_token", &[1], &[0]),
            of("fresh", &[2, 1, 33, 64], &[0, 0, 0, 0]),
            of("step", &[1, 1, 1, 1, 1], &[31, 32, 63, 1, 500]),
            of("mixed", &[1, 40, 1, 7, 3], &[100, 33, 0, 250, 64]),
        ]
    }

    /// Batches for kernels that attend to sources in a KV cache: steps of one token, whole sequences, and both.
    pub fn with_sources() -> Vec<Case> {
        let of = |name, lens: &[u32], cached: &[u32], sources: &[u32]| Case {
            cached: cached.to_vec(),
            sources: sources.to_vec(),
            ..Case::new(name, lens)
        };
        vec![
            of("one_token", &[1], &[0], &[1]),
            of("fresh", &[2, 1, 33, 64], &[0, 0, 0, 0], &[33, 1, 7, 90]),
            of(
                "step",
                &[1, 1, 1, 1, 1],
                &[31, 32, 0, 1, 500],
                &[31, 32, 64, 3, 260],
            ),
            of(
                "mixed",
                &[1, 40, 1, 7, 3],
                &[100, 33, 0, 250, 64],
                &[5, 65, 127, 2, 31],
            ),
        ]
    }

    /// Batches for any kernel: one token, ragged, and one of a model's size.
    pub fn standard() -> Vec<Case> {
        vec![
            Case::new("one_token", &[1]),
            Case::new("tiny", &[2, 1, 3]),
            Case::new("ragged", &[17, 18, 52, 63, 77]),
            Case::new(
                "model",
                &[
                    128, 48, 65, 26, 89, 61, 96, 61, 89, 115, 86, 29, 95, 62, 65, 114,
                ],
            ),
        ]
    }
}

/// The description of a kernel. All of it is pure and needs no device.
pub trait Kernel {
    /// Symbol of the `__global__` function; spells the specialisation in words, e.g.
    /// `bias_residual_layernorm_f16_w768`. Equal kernels, and only they, have equal symbols.
    fn symbol(&self) -> String;

    /// Name of the function computed, whatever the tiling: kernels with equal definitions have equal parameters, cases
    /// and references.
    fn definition(&self) -> String {
        self.symbol()
    }

    /// Stem of the template: `bias_residual_layernorm` is `templates/bias_residual_layernorm.cu.tera`.
    fn template(&self) -> &'static str;

    /// Constants for the template. `symbol`, `signature` and `threads` are added by `codegen`.
    fn constants(&self) -> Constants;

    /// Every argument, in the order of the signature.
    fn params(&self) -> Vec<Param>;

    /// The instructions that a card must support.
    fn instructions(&self) -> Instructions {
        Instructions::Ampere
    }

    /// The parameters that are passed as tensor maps.
    fn tensor_maps(&self) -> Vec<TensorMap> {
        Vec::new()
    }

    /// Launch for a batch on a card. `extents.rows` is set by the step that launches.
    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch;

    /// The cost model's estimate of a launch over `rows` rows, in cycles of [`Machine::clock_mhz`], infinite if the
    /// card cannot run it; `None` for kernels that are not chosen by cost.
    fn cycles(&self, _rows: u64, _machine: &Machine) -> Option<f64> {
        None
    }

    /// Upper bound on rows; `None` if there is none.
    fn most_rows(&self) -> Option<u64> {
        None
    }

    /// Upper bound on threads of a CTA, for `__launch_bounds__`.
    fn threads(&self) -> u32;

    /// The definition: takes the parameters of role `Read`, in the order of the signature, and returns those of role
    /// `Write`, in order, before rounding to their storage type, with NaN for elements that the kernel does not write.
    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor>;

    /// Batches for checks of the kernel.
    fn cases(&self) -> Vec<Case> {
        Case::standard()
    }

    /// `extents.rows` in a check: tokens, unless the kernel runs over something else.
    fn check_rows(&self, extents: &Extents) -> u64 {
        extents.tokens
    }

    /// Bound on the difference between device and reference.
    fn tolerance(&self) -> Tolerance;
}
