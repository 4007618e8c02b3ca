//! Kernels, with one file for each kernel or group of similar kernels. A file contains the parameters, launch geometry, CPU reference and
//! cases of its kernels.
//!
//! A kernel is plain data: a struct such as [`BiasResidualLayerNorm`] whose fields determine its source
//! completely. [`Kernel::params`] is the only list of parameters: the generated signature, the launch and the tests are derived from this
//! list. [`Kernel::reference`] is the definition in f32/f64 against which the CUDA kernel and the fast CPU code are checked.

/// Implements the methods of [`Kernel`] that return the stem of the template, the storage type and the class:
/// `facts! { template: "rms_norm", dtype: self.dtype, class: LayerNorm }`.
macro_rules! facts {
    (template: $template:literal $(, $($rest:tt)*)?) => {
        fn template(&self) -> &'static str {
            $template
        }
        $(facts! { $($rest)* })?
    };
    (dtype: self $(.$field:ident)+ $(, $($rest:tt)*)?) => {
        fn dtype(&self) -> Option<crate::tensor::DType> {
            Some(self $(.$field)+)
        }
        $(facts! { $($rest)* })?
    };
    (class: $class:ident) => {
        fn class(&self) -> crate::kernels::Class {
            crate::kernels::Class::$class
        }
    };
}

pub mod attention;
pub mod beam_search;
pub mod cache;
mod case;
pub mod chain;
mod class;
pub mod decoding;
pub mod draw;
pub mod e4m3;
pub mod elementwise;
pub mod embedding;
pub mod gemm;
pub mod layernorm;
mod limits;
pub mod log_probability;
pub mod max_sim;
pub mod pack;
pub mod pooling;
pub mod prepare_attention;
pub mod rms_norm;
pub mod rms_norm_sum;
pub mod rotary;
mod rows;
pub mod trial;
pub mod upload;
pub mod weighted_pool;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use crate::machine::Instructions;
pub use case::Case;
pub use class::Class;
pub use limits::MAX_ELEMENTS;

use crate::{
    machine::Machine,
    ops::BatchInput,
    tensor::{DType, Element, Extents, Shape, Size},
};
use {
    attention::*, beam_search::*, cache::*, decoding::*, draw::*, e4m3::*, elementwise::*,
    embedding::*, gemm::*, layernorm::*, log_probability::*, max_sim::*, pack::*, pooling::*,
    prepare_attention::*, rms_norm::*, rms_norm_sum::*, rotary::*, upload::*, weighted_pool::*,
};

/// Calls the macro `$callback` with the names of all kernels. [`KernelSpec`] and the CPU executor's dispatch are generated from this list.
macro_rules! with_kernels {
    ($callback:ident) => {
        $callback! {
            Gemm, GemmWgmma, GemmSplitK, GemmResidualNorm, GemmResidualRowStats,
            DeferredLayerNormGemm, GemmPrepareAttention, GemmStream, AddBias, Combine, Activate, Scale, SliceColumns, SplitHeads,
            MergeHeads, LayerNorm, BiasResidualLayerNorm, Embedding, EmbeddingLayerNorm, TokenOfSequence, MeanPool, L2Normalize,
            MeanPoolNormalize, MaxPool, Concat, AttentionScores, AttentionSoftmax, SoftmaxByDistance, AttentionContext, MhaShort, MhaOnline,
            MhaSplitKeys, MhaWgmma, MhaLongScores, MhaLongReduce, MhaLongContext, MhaCached, MhaDecode, MhaDecodeAppend, MhaPrefill,
            AppendCache,
            PrepareAttention, Gate, Draw, LogProbability, RmsNorm, RmsNormSum, Rotary, PackScan, PackTokens, Upload, Scatter, ChooseToken, Candidates, BeamStep, Advance,
            RelativeScores, ToE4m3, NormToE4m3, MhaToE4m3, WeightedPool, SoftCap, MaxSim, UnpackWeight, QuantizeRows, QuantizeGroups, GateToE4m3,
        }
    };
}
pub(crate) use with_kernels;

macro_rules! kernels {
    ($($name:ident),* $(,)?) => {
        /// Any kernel that a program may launch, as plain data that an artifact can store.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        pub enum KernelSpec {
            $($name($name),)*
        }

        impl KernelSpec {
            /// Returns the kernel as a trait object.
            pub fn as_kernel(&self) -> &dyn Kernel {
                match self {
                    $(Self::$name(kernel) => kernel,)*
                }
            }
        }

        $(impl From<$name> for KernelSpec {
            fn from(kernel: $name) -> Self {
                Self::$name(kernel)
            }
        })*
    };
}

with_kernels!(kernels);

impl KernelSpec {
    /// Kernels that run before a program's kernels: the upload of the batch's data, and the two kernels that pack a padded batch.
    pub fn runtime() -> [KernelSpec; 3] {
        [Upload.into(), PackScan.into(), PackTokens.into()]
    }

    /// Returns the kernels that run after each decode step of a program with logits `[batch, vocabulary]`. In this order, they select
    /// tokens, find the candidates of beams, select beams, and write the batch data of the next step. The last kernel stores changes that
    /// the host makes to rows between steps.
    pub fn decoding(vocabulary: u32, dtype: DType) -> [KernelSpec; 5] {
        [
            ChooseToken { vocabulary, dtype }.into(),
            Candidates { vocabulary, dtype }.into(),
            BeamStep.into(),
            Advance.into(),
            Scatter.into(),
        ]
    }
}

/// Instances of every kernel in every storage type, at odd and at common sizes.
pub fn representative() -> Vec<KernelSpec> {
    [
        gemm::representative(),
        elementwise::representative(),
        layernorm::representative(),
        embedding::representative(),
        pooling::representative(),
        log_probability::representative(),
        max_sim::representative(),
        rms_norm::representative(),
        rms_norm_sum::representative(),
        rotary::representative(),
        attention::representative(),
        cache::representative(),
        decoding::representative(),
        draw::representative(),
        e4m3::representative(),
        beam_search::representative(),
        prepare_attention::representative(),
        weighted_pool::representative(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// A parameter of a kernel: its name, and its role, which determines the argument.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// Name in the generated signature.
    pub name: &'static str,
    pub role: Role,
}

impl Param {
    /// Whether the parameter is a packed matrix: values of few bits, and their scales. If it is passed as a tensor map, the map describes
    /// only the values. The next parameter is then the address of the matrix, from which the kernel reads the scales.
    pub fn is_packed(&self) -> bool {
        match &self.role {
            Role::Read { element, .. } | Role::Write { element, .. } => match element {
                Element::Scaled(_) => true,
                Element::Value(_) | Element::E4m3 | Element::I8 | Element::I32 | Element::I64 => {
                    false
                }
            },
            Role::Count(_) => false,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Role {
    /// `const T* name`, a tensor of this shape. Tests fill it according to `fill`.
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
    /// Normally distributed values.
    Normal { mean: f32, deviation: f32 },
    /// Products of `unit` and uniformly distributed integers from `-largest` to `largest`.
    Multiples { largest: u32, unit: f32 },
    /// Integers in `0..limit`.
    Below(u32),
    /// Data that is part of a batch or describes it, such as token ids or the offsets of sequences.
    BatchInput(BatchInput),
    /// A row of normally distributed logits per sequence. Every third row is rounded to produce ties.
    Logits { vocabulary: u32 },
    /// A [`DeviceSamplingParams`] for each sequence.
    Choices { vocabulary: u32 },
    /// Number of tokens of each sequence so far, excluding the token that a decode step is about to select.
    Known,
    /// Codes of [`Chosen`] for each sequence: token ids and other outcomes.
    Chosen { vocabulary: u32 },
    /// State of a beam search.
    Beams(beam_search::BeamData),
    /// Indices of the tokens of each sequence, in reverse order within the sequence. Every third sequence lacks its first token. The rest
    /// of the tensor is zero.
    TakenRows,
    /// `[batch + 1]`: the position in [`Fill::TakenRows`] of each sequence's first index. The last entry is the total number of indices.
    TakenOffsets,
}

impl Fill {
    /// Activations: mean 0, deviation 1.
    pub const ACTIVATION: Fill = Fill::Normal {
        mean: 0.0,
        deviation: 1.0,
    };
    /// Elements of a weight matrix. They are small, so that a GEMM's results have the magnitude of its input.
    pub const WEIGHT: Fill = Fill::Normal {
        mean: 0.0,
        deviation: 0.05,
    };
}

/// A matrix that a kernel copies with TMA. Its parameter is a tensor map instead of a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Name of the parameter: a tensor `[rows, columns]` with elements of 8 or 16 bits. The length of a row is a multiple of 16 bytes. For
    /// a packed tensor, the map describes the values as the matrix of bytes of [`rows_of_blocks`](crate::tensor::Scaled::rows_of_blocks).
    pub param: &'static str,
    pub box_rows: u32,
    /// Columns per box. Rows of 128 or 64 bytes in shared memory are swizzled, with a span of 128 or 64 bytes. Rows of another multiple of
    /// 16 bytes are not swizzled.
    pub box_columns: u32,
    pub order: RowOrder,
    /// Whether the next parameter, `{param}_last`, is a second map of the matrix, for the last box of rows. Its box has only the rows up to
    /// the end of the matrix. This avoids zero-filled rows: TMA takes about twice as long to fill a row with zeros as to copy it.
    pub has_last_box: bool,
    /// Whether the launch reads a large matrix only once. The map then has an L2 promotion of 128 bytes instead of 256, so L2 fetches no
    /// more than a copy needs.
    pub streams: bool,
}

/// Order of a box's rows in shared memory. *Coordinates* are those that a kernel passes to a TMA copy of the box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// The order of the rows in the matrix.
    Plain,
    /// In each group of [`RowOrder::GROUP`] rows, row 8q + 2j + e is stored at index 8j + 2q + e (q, j < 4, e < 2). With these rows as the
    /// N extent of an MMA, a lane's accumulators are 8 neighboring columns. The matrix and the box have a multiple of `GROUP` rows.
    /// Coordinates are a column, three zeros, and the index of the group.
    Quads,
    /// The order of the rows in the matrix. One copy stores the given number of horizontally adjacent boxes, one after another. The matrix
    /// has a multiple of `box_columns` columns. Coordinates are a zero, a row, and the index of the first box.
    Boxes(u32),
    /// In each block of [`RowOrder::BLOCK`] rows, row 32w + 4g + 2i + h is stored at index 64i + 16w + 8h + g (w < 4, g < 8; i, h < 2).
    /// With these rows as the M extent of MMAs, a lane's accumulators are 4 neighboring rows. The matrix has a multiple of
    /// [`RowOrder::GROUP`] rows, and a box has [`RowOrder::BLOCK`] rows. Coordinates are a column, two zeros, the index of the group, and a
    /// zero.
    Fours,
    /// Each group of 16 rows consists of eight rows of the matrix's first half and the corresponding eight rows of the second half. The
    /// matrix and the box have a multiple of 16 rows. Coordinates are a column, two zeros, and the index of the group of eight rows.
    Halves,
    /// Two adjacent rows of the matrix (a *pair*) are one row in shared memory. In each group of eight pairs, pair 4b + q is stored at
    /// index 2q + b (q < 4, b < 2). One MMA has the first rows of the pairs as its N extent, and another the second rows. A lane's
    /// accumulators of both MMAs then have the same columns as in the order [`RowOrder::Plain`]. The matrix and the box have a multiple of
    /// 16 rows, and the box has all columns. Coordinates are three zeros and the index of the group of eight pairs.
    Pairs,
    /// Pairs as in [`RowOrder::Pairs`]. In each group of 16 pairs, pair 4q + 2j + b is stored at index 8j + 2q + b (q < 4; j, b < 2). A
    /// lane's accumulators have the same 8 columns as in the order of [`RowOrder::Quads`]. The matrix and the box have a multiple of
    /// [`RowOrder::GROUP`] rows. Coordinates are those of `Quads`, with column 0.
    PairsOfQuads,
    /// Pairs as in [`RowOrder::Pairs`]. In each group of 16 pairs, pair 2g + h is stored at index 8h + g (g < 8, h < 2). One MMA has the
    /// first rows of 64 pairs as its M extent, and another the second rows. A lane's accumulators of both MMAs then have the same 4 rows as
    /// in the order of [`RowOrder::Fours`]. The matrix has a multiple of [`RowOrder::GROUP`] rows, and a box has [`RowOrder::BLOCK`] rows.
    /// Coordinates are those of `Fours`, with column 0.
    PairsOfFours,
}

impl RowOrder {
    /// Number of rows of a group, within which [`RowOrder::Quads`] permutes the rows.
    pub const GROUP: u32 = 32;
    /// Number of rows of a group of eight pairs, within which [`RowOrder::Pairs`] permutes the rows.
    pub const EIGHT_PAIRS: u32 = 16;
    /// Number of rows of a box in the order [`RowOrder::Fours`].
    pub const BLOCK: u32 = 128;
}

/// Grid, threads and shared memory of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    pub grid: [u32; 3],
    /// Threads of a CTA. CTAs are one-dimensional.
    pub threads: u32,
    /// Dynamic shared memory of a CTA, in bytes.
    pub shared_bytes: u32,
}

impl Launch {
    /// Returns a launch with a one-dimensional grid. If `ctas` exceeds 32 bits, it saturates to a value that the driver rejects.
    pub(crate) fn of_ctas(ctas: u64, threads: u32, shared_bytes: u32) -> Self {
        Self {
            grid: [u32::try_from(ctas).unwrap_or(u32::MAX), 1, 1],
            threads,
            shared_bytes,
        }
    }
}

/// A value that a template is rendered with.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Constant {
    Bool(bool),
    Int(u64),
    /// Text that is already formatted as CUDA, e.g. `1e-12f`.
    Text(String),
}

macro_rules! constants {
    ($($From:ty => |$value:ident| $constant:expr;)*) => {$(
        impl From<$From> for Constant {
            fn from($value: $From) -> Self {
                $constant
            }
        }
    )*};
}

constants! {
    bool => |v| Constant::Bool(v);
    u64 => |v| Constant::Int(v);
    u32 => |v| Constant::Int(v.into());
    String => |v| Constant::Text(v);
    &str => |v| Constant::Text(v.to_owned());
}

/// Template constants, ordered by name so that rendering is deterministic.
pub type Constants = BTreeMap<&'static str, Constant>;

/// Returns the shortest literal that reads back as the same f32, e.g. `1e-12f`.
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
    /// f32, f16 or bf16 elements, all stored as f32.
    Real(Vec<f32>),
    /// i32 or i64 elements, widened.
    Index(Vec<i64>),
}

impl HostTensor {
    /// Returns the real elements. Panics if the elements are integers. The caller knows the type of an argument from [`Kernel::params`].
    pub fn real(&self) -> &[f32] {
        match self {
            HostTensor::Real(v) => v,
            HostTensor::Index(_) => panic!("the parameter list says that this argument is real"),
        }
    }

    /// Returns the integer elements. Panics if the elements are real.
    pub fn index(&self) -> &[i64] {
        match self {
            HostTensor::Index(v) => v,
            HostTensor::Real(_) => panic!("the parameter list says that this argument is an index"),
        }
    }
}

/// Bound on the difference between a result and its reference: `|got − want| ≤ absolute + relative·|want|`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    pub absolute: f32,
    pub relative: f32,
    /// Error analysis that justifies the bounds.
    pub reason: &'static str,
}

/// The description of a kernel. It is pure and needs no device.
pub trait Kernel {
    /// Symbol of the `__global__` function. The symbol contains all parameters of the specialization, e.g.
    /// `bias_residual_layernorm_f16_w768`. Two kernels have the same symbol if and only if they are equal.
    fn symbol(&self) -> String;

    /// Name of the function that the kernel computes, regardless of tiling. Kernels with equal definitions have equal
    /// parameters, cases and references.
    fn definition(&self) -> String {
        self.symbol()
    }

    /// Stem of the template: `bias_residual_layernorm` is `templates/bias_residual_layernorm.cu.tera`.
    fn template(&self) -> &'static str;

    /// Constants for the template. `codegen` adds `symbol`, `signature` and `threads`.
    fn constants(&self) -> Constants;

    /// All parameters, in the order of the signature.
    fn params(&self) -> Vec<Param>;

    /// Number of tensors that the kernel writes. In every kernel that a program may launch, these tensors are the last parameters before
    /// the counts.
    fn n_writes(&self) -> usize {
        let params = self.params();
        let writes = params
            .iter()
            .filter(|p| matches!(p.role, Role::Write { .. }));
        writes.count()
    }

    /// Instructions that a GPU must support to run the kernel.
    fn instructions(&self) -> Instructions {
        Instructions::Ampere
    }

    /// Storage type that the kernel computes in; `None` if the kernel does not depend on the program's storage type.
    fn dtype(&self) -> Option<DType> {
        None
    }

    /// Class to which the kernel's time is attributed.
    fn class(&self) -> Class {
        Class::Other
    }

    /// Number of outputs and of inputs of the linear layer that the kernel applies to each row; `None` if the kernel includes no linear
    /// layer.
    fn weight(&self) -> Option<[u32; 2]> {
        None
    }

    /// Index of the weight of the linear layer among the tensors that the kernel reads.
    fn weight_operand(&self) -> Option<usize> {
        self.weight()?;
        let params = self.params();
        let mut reads = params
            .iter()
            .filter(|p| matches!(p.role, Role::Read { .. }));
        reads.position(|p| p.name == "weight")
    }

    /// Number of floating-point operations of the matrix products in one launch, two per multiply-add, as in ByteTransformer's table II; 0
    /// for memory-bound kernels.
    fn flop(&self) -> Size {
        self.weight().map_or(Size::constant(0), class::product_flop)
    }

    /// Max length of a sequence; `None` if unlimited.
    fn max_len(&self) -> Option<u32> {
        None
    }

    /// Tables that the kernel indexes by ids of the batch, each with the index of the parameter that holds the ids.
    fn tables(&self) -> Vec<(usize, embedding::Table)> {
        Vec::new()
    }

    /// Checks that a program from a file may contain this kernel with its current field values.
    ///
    /// # Errors
    /// Returns the reason if the program may not contain the kernel. The default implementation always returns an error. Kernels that only
    /// the runtime launches use this default, because no program may contain them.
    fn validate(&self) -> Result<(), String> {
        Err(format!(
            "a program cannot contain `{}`, which belongs to the runtime",
            self.template()
        ))
    }

    /// Reason why only the CPU executor can run the kernel; `None` if the kernel has CUDA source.
    fn cpu_only(&self) -> Option<String> {
        None
    }

    /// Parameters that are passed as tensor maps.
    fn tensor_maps(&self) -> Vec<TensorMap> {
        Vec::new()
    }

    /// Launch for a batch on a GPU. The step of the program that launches the kernel sets `extents.rows`.
    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch;

    /// The cost model's estimate for a launch over `rows` rows, in cycles of [`Machine::clock_mhz`]. It is infinite if the GPU cannot run
    /// the kernel, and `None` for kernels that are not selected by cost.
    fn cycles(&self, _rows: u64, _machine: &Machine) -> Option<f64> {
        None
    }

    /// Max number of rows of a launch; `None` if unlimited.
    fn max_rows(&self) -> Option<u64> {
        None
    }

    /// Max number of threads of a CTA, for `__launch_bounds__`.
    fn threads(&self) -> u32;

    /// The kernel's definition. Takes the `Read` parameters in the order of the signature and returns the `Write` parameters
    /// in order, before rounding to their storage type. Elements that the kernel does not write are NaN.
    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor>;

    /// Returns the inputs of a check that are computed from other inputs, with their indices among the `Read` parameters. `reads` contains
    /// the random inputs.
    fn derived_inputs(&self, _reads: &[&HostTensor]) -> Vec<(usize, HostTensor)> {
        Vec::new()
    }

    /// Batches with which the kernel is checked.
    fn cases(&self) -> Vec<Case> {
        Case::standard()
    }

    /// Value of `extents.rows` in a check: the number of tokens, unless the rows of the kernel are not tokens.
    fn check_rows(&self, extents: &Extents) -> u64 {
        extents.tokens
    }

    /// Bound on the difference between device and reference.
    fn tolerance(&self) -> Tolerance;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_tensors_are_the_last_parameters() {
        for kernel in representative().into_iter().chain(KernelSpec::runtime()) {
            let kernel = kernel.as_kernel();
            let params = kernel.params();
            let tensors = params.iter().filter(|p| !matches!(p.role, Role::Count(_)));
            let writes = tensors.map(|p| matches!(p.role, Role::Write { .. }));
            assert!(writes.is_sorted(), "{}", kernel.symbol());
        }
    }

    #[test]
    fn the_weight_of_a_linear_layer_is_an_operand_of_its_shape() {
        for kernel in representative() {
            let kernel = kernel.as_kernel();
            let params = kernel.params();
            let mut reads = params.iter().filter_map(|p| match &p.role {
                Role::Read { shape, .. } => Some(shape),
                Role::Write { .. } | Role::Count(_) => None,
            });
            let weight = kernel.weight_operand();
            assert_eq!(
                weight.is_some(),
                kernel.weight().is_some(),
                "{}",
                kernel.symbol()
            );
            if let (Some(at), Some([n, k])) = (weight, kernel.weight()) {
                let shape = reads.nth(at).expect("the index is in range");
                assert_eq!(
                    *shape,
                    Shape::fixed(&[n.into(), k.into()]),
                    "{}",
                    kernel.symbol()
                );
            }
        }
    }
}
