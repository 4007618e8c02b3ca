//! CPU implementation of every [`KernelSpec`], in f32 on the packed layout.
//!
//! [`run`] validates its arguments and then computes. Wrong arguments, such as slices of the wrong length, ids outside their table, or
//! sequence starts that do not match the batch, cause errors, never panics. Values are computed and stored in f32, regardless of the
//! kernel's storage type. Work is distributed over the rayon pool of the caller. A small amount of work stays on the calling thread.

mod args;
mod attention;
mod cached;
mod fp8;
mod fused_attention;
mod gemm;
mod long_attention;
mod pooling;
mod rotary;
mod rows;
#[cfg(test)]
mod tests;

use args::Args;
use cached::Stored;

pub use gemmule_cpu::linear::{MatmulPrecision, PackedWeight};

use crate::kernels::{
    KernelSpec,
    attention::MhaDecodeAppend,
    beam_search::{BeamStep, Candidates},
    decoding::*,
    max_sim::MaxSim,
    pack::*,
    upload::*,
    with_kernels,
};
use crate::tensor::Extents;

/// A tensor in host memory that a kernel reads.
#[derive(Clone, Copy, Debug)]
pub enum Read<'a> {
    /// Activations and weights.
    Real(&'a [f32]),
    /// Weight of a linear layer.
    Packed(&'a PackedWeight),
    /// Ids and sequence starts.
    I32(&'a [i32]),
    /// Pair offsets.
    I64(&'a [i64]),
    /// Elements of a KV cache, encoded in E4M3.
    E4m3(&'a [u8]),
}

impl Read<'_> {
    fn kind(&self) -> &'static str {
        match self {
            Read::Real(_) => "f32",
            Read::Packed(_) => "a packed weight",
            Read::I32(_) => "i32",
            Read::I64(_) => "i64",
            Read::E4m3(_) => "e4m3",
        }
    }
}

/// Error of kernel arguments. Every message names the kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    #[error("{op}: `{param}` (input {index}, counted from 0) was not given")]
    MissingRead {
        op: &'static str,
        param: &'static str,
        index: usize,
    },
    #[error("{op} reads {expected} tensors; {found} were given")]
    SurplusReads {
        op: &'static str,
        expected: usize,
        found: usize,
    },
    #[error("{op} writes {expected}; {found} were given")]
    Writes {
        op: &'static str,
        /// Description of the expected tensors, e.g. `one tensor`.
        expected: &'static str,
        found: usize,
    },
    #[error("{op}: `{param}` holds {found} elements; expected {expected}")]
    ElementType {
        op: &'static str,
        param: &'static str,
        expected: &'static str,
        found: &'static str,
    },
    #[error(
        "{op}: the {bytes} bytes of host memory for its intermediate values could not be allocated; send fewer tokens at once"
    )]
    OutOfMemory { op: &'static str, bytes: u64 },
    #[error("{op}: `{param}` was packed as {found:?}; expected {expected:?}")]
    PackedShape {
        op: &'static str,
        param: &'static str,
        expected: [u64; 2],
        found: [u64; 2],
    },
    #[error("{op}: `{param}` has {found} elements; expected {expected}")]
    Length {
        op: &'static str,
        param: &'static str,
        expected: u64,
        found: u64,
    },
    #[error(
        "{op}: `{param}[{index}]` is {id}; expected at least 0, and with the offset {offset} less than {rows}, the rows of the table"
    )]
    Id {
        op: &'static str,
        param: &'static str,
        index: usize,
        id: i32,
        offset: u32,
        rows: u32,
    },
    #[error(
        "{op}: `cu_lens[{index}]` is {found}; expected {expected}: starts go up from 0 to the number of tokens, {tokens}, and no sequence is empty"
    )]
    CuLens {
        op: &'static str,
        index: usize,
        found: i32,
        /// Expected value in words, e.g. `more than 7`.
        expected: String,
        tokens: u64,
    },
    #[error(
        "{op}: `pair_offsets[{index}]` is {found}; expected {expected}, the sum of the squared lengths before"
    )]
    PairOffsets {
        op: &'static str,
        index: usize,
        found: i64,
        expected: i64,
    },
    #[error(
        "{op}: `valid_lens[{index}]` is {found}; expected 1 to {len}, the length of the sequence"
    )]
    ValidLens {
        op: &'static str,
        index: usize,
        found: i32,
        len: usize,
    },
    #[error("{op}: {what} end at column {end} of rows of {stride}; expected at most {stride}")]
    Columns {
        op: &'static str,
        /// Description of the columns, e.g. `the heads of `q``.
        what: &'static str,
        end: u64,
        stride: u64,
    },
    #[error("{op}: `{param}[{index}]` is {found}; expected {expected}")]
    Slot {
        op: &'static str,
        param: &'static str,
        index: usize,
        found: i32,
        /// Expected value in words.
        expected: String,
    },
    #[error(
        "{op} appends to a KV cache and reads it; on the CPU, run the two kernels of its `in_turn` instead"
    )]
    InTurn { op: &'static str },
    #[error("{op} runs only on CUDA devices; the CPU executor does this work without a kernel")]
    Packing { op: &'static str },
    #[error(
        "{op}: sequence {sequence} has {len} tokens; this kernel supports at most {max_len}; mha_online supports any length"
    )]
    TooLong {
        op: &'static str,
        sequence: usize,
        len: usize,
        max_len: u32,
    },
}

/// CPU implementation of a kernel.
trait CpuForm {
    fn run(&self, call: Call<'_, '_, '_>) -> Result<(), OpError>;
}

/// The arguments of one launch.
struct Call<'r, 'w, 'v> {
    op: &'static str,
    extents: &'r Extents,
    reads: &'r [Read<'r>],
    writes: &'w mut [&'v mut [f32]],
}

impl<'r, 'w, 'v> Call<'r, 'w, 'v> {
    /// Takes the `N` tensors that the kernel writes. Returns an error if another number was given.
    fn outputs<const N: usize>(&mut self) -> Result<&'w mut [&'v mut [f32]; N], OpError> {
        let writes = std::mem::take(&mut self.writes);
        let expected = match N {
            1 => "one tensor",
            _ => "two tensors",
        };
        let wrong = self.wrong_outputs(expected, writes.len());
        writes.try_into().map_err(|_| wrong)
    }

    fn wrong_outputs(&self, expected: &'static str, found: usize) -> OpError {
        let op = self.op;
        OpError::Writes {
            op,
            expected,
            found,
        }
    }

    /// Returns the tensors that the kernel reads, and `out`, which it writes.
    fn args<'o>(&self, out: &'o mut [f32]) -> Args<'r, 'o> {
        Args::new(self.op, self.extents, self.reads, out)
    }
}

/// Implements [`CpuForm`] for kernels that write one tensor, with a function for each kernel.
macro_rules! forms {
    ($($Kernel:ident => $form:expr;)*) => {$(
        impl $crate::runtime::cpu::ops::CpuForm for $Kernel {
            fn run(
                &self,
                mut call: $crate::runtime::cpu::ops::Call<'_, '_, '_>,
            ) -> Result<(), OpError> {
                let [out] = call.outputs()?;
                let form: fn(&Self, Args<'_, '_>) -> Result<(), OpError> = $form;
                form(self, call.args(out))
            }
        }
    )*};
}
use forms;

/// Implements [`CpuForm`] for kernels that run only on devices: they return an error.
macro_rules! only_on_devices {
    ($($Kernel:ident => $Error:ident;)*) => {$(
        impl CpuForm for $Kernel {
            fn run(&self, Call { op, .. }: Call<'_, '_, '_>) -> Result<(), OpError> {
                Err(OpError::$Error { op })
            }
        }
    )*};
}

only_on_devices! {
    Upload => Packing;
    Scatter => Packing;
    PackScan => Packing;
    PackTokens => Packing;
    ChooseToken => Packing;
    Candidates => Packing;
    BeamStep => Packing;
    Advance => Packing;
    MaxSim => Packing;
    MhaDecodeAppend => InTurn;
}

/// Runs one kernel.
///
/// `reads` are the kernel's parameters of role `Read`, in the order that the kernel's type documents. `writes` are the
/// [`Kernel::n_writes`](crate::kernels::Kernel::n_writes) tensors that the kernel writes. Their previous contents are ignored. All elements
/// are written, except columns that the view of an attention result skips, and elements between the rows of ragged scores. `extents.rows`
/// is the number of rows of row-wise kernels and GEMMs.
///
/// # Errors
///
/// Returns an [`OpError`] if the arguments do not match the kernel and the extents. A fused kernel may have written some of the tensors by
/// then.
pub fn run(
    spec: &KernelSpec,
    extents: &Extents,
    reads: &[Read<'_>],
    writes: &mut [&mut [f32]],
) -> Result<(), OpError> {
    let call = Call {
        op: spec.as_kernel().template(),
        extents,
        reads,
        writes,
    };
    macro_rules! run_form {
        ($($name:ident),* $(,)?) => {
            match spec {
                $(KernelSpec::$name(kernel) => CpuForm::run(kernel, call),)*
            }
        };
    }
    with_kernels!(run_form)
}

/// Runs a kernel that appends to a KV cache in E4M3. `cache` contains the encoded elements of the cache, and `writes` the other tensors
/// that the kernel writes.
///
/// # Errors
///
/// Returns an [`OpError`] if the arguments do not match the kernel and the extents, or if the kernel does not write a cache.
pub fn run_appending(
    spec: &KernelSpec,
    extents: &Extents,
    reads: &[Read<'_>],
    writes: &mut [&mut [f32]],
    cache: &mut [u8],
) -> Result<(), OpError> {
    let op = spec.as_kernel().template();
    let args = Args::new(op, extents, reads, &mut []);
    match (spec, writes) {
        (KernelSpec::AppendCache(k), []) => cached::append_cache(k, args, Stored::E4m3(cache)),
        (KernelSpec::PrepareAttention(k), [queries]) => {
            cached::prepare_attention(k, args, queries, Stored::E4m3(cache))
        }
        (_, writes) => Err(OpError::Writes {
            op,
            expected: "its tensors and no KV cache in E4M3",
            found: writes.len() + 1,
        }),
    }
}

/// Runs a kernel like [`run`], but for an invariant program. Attention to a cache then processes queries one by one, because the number of
/// queries that a sequence has in a batch depends on the other sequences. All other kernels compute a row in an order that depends only on
/// the row's sequence.
///
/// # Errors
///
/// Returns the errors of [`run`].
pub fn run_invariant(
    spec: &KernelSpec,
    extents: &Extents,
    reads: &[Read<'_>],
    writes: &mut [&mut [f32]],
) -> Result<(), OpError> {
    let plain = match spec {
        KernelSpec::MhaCached(k) => k,
        KernelSpec::MhaDecode(k) => &k.plain,
        KernelSpec::MhaPrefill(k) => &k.plain,
        _ => return run(spec, extents, reads, writes),
    };
    let (op, found) = (spec.as_kernel().template(), writes.len());
    let [out] = writes else {
        let expected = "one tensor";
        return Err(OpError::Writes {
            op,
            expected,
            found,
        });
    };
    cached::mha_cached(plain, 1, Args::new(op, extents, reads, out))
}
