//! CPU implementation of every [`KernelSpec`], in f32 on the packed layout.
//!
//! [`run`] validates its arguments and then computes. Wrong arguments cause errors, never panics. Examples are slices of the wrong length,
//! ids outside their table, and sequence starts that do not match the batch. Values are computed and stored in f32, regardless of the
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
use gemmule_cpu::attention::MAX_QUERIES;

pub use gemmule_cpu::linear::{MatmulPrecision, PackedWeight};

use crate::kernels::{KernelSpec, gemm::GemmPrepareAttention};
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
    /// The codes of a KV cache in E4M3.
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
    #[error("{op}: `{param}`, its input {index} counted from 0, was not given")]
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
        /// Expected number in words.
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
        "{op}: `{param}[{index}]` is {id}, which with offset {offset} picks no row of a table of {rows}; expected 0 to {rows} − 1"
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
        "{op}: `valid_lens[{index}]` is {found}; expected 1 to {len}, the tokens of the sequence"
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
    #[error("{op} reads the cache that it adds to; on the CPU two kernels do that in turn")]
    InTurn { op: &'static str },
    #[error("{op} brings batches to a device; on the CPU a batch is packed when it is made")]
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

/// Runs one kernel.
///
/// `reads` are the kernel's parameters of role `Read`, in the order that the kernel's type documents. `writes` are the
/// [`Kernel::n_writes`](crate::kernels::Kernel::n_writes) tensors that the kernel writes. Their previous contents are ignored. All elements
/// are written, except columns that the view of an attention result skips, and elements between the rows of ragged scores. `extents.rows`
/// is the number of rows of row-wise kernels and GEMMs.
///
/// # Errors
///
/// Returns an [`OpError`], without computing anything, if the arguments do not match the kernel and the extents.
pub fn run(
    spec: &KernelSpec,
    extents: &Extents,
    reads: &[Read<'_>],
    writes: &mut [&mut [f32]],
) -> Result<(), OpError> {
    let op = spec.as_kernel().template();
    let found = writes.len();
    let wrong = |expected| OpError::Writes {
        op,
        expected,
        found,
    };
    if let KernelSpec::MhaLongScores(k) = spec {
        let [scores, partials] = writes else {
            return Err(wrong("two tensors"));
        };
        return long_attention::scores(k, Args::new(op, extents, reads, scores), partials);
    }
    if let KernelSpec::GemmResidualRowStats(k) = spec {
        let [scaled, row_stats] = writes else {
            return Err(wrong("two tensors"));
        };
        let args = Args::new(op, extents, reads, scaled);
        return gemm::gemm_residual_row_stats(k, args, row_stats);
    }
    if let KernelSpec::DeferredLayerNormGemm(k) = spec {
        let [normal, out] = writes else {
            return Err(wrong("two tensors"));
        };
        return gemm::deferred_layer_norm_gemm(k, Args::new(op, extents, reads, out), normal);
    }
    if let KernelSpec::GemmStream(k) = spec {
        let (out, more) = match writes {
            [out] => (out, None),
            [out, scaled, row_stats] => (out, Some((&mut **scaled, &mut **row_stats))),
            _ => return Err(wrong("one tensor, or three before a norm")),
        };
        return gemm::gemm_stream(k, Args::new(op, extents, reads, out), more);
    }
    if let KernelSpec::PrepareAttention(k) = spec {
        let [queries, keys] = writes else {
            return Err(wrong("two tensors"));
        };
        let args = Args::new(op, extents, reads, &mut []);
        return cached::prepare_attention(k, args, queries, Stored::Real(keys));
    }
    if let KernelSpec::AppendCache(k) = spec {
        let [cache] = writes else {
            return Err(wrong("one tensor"));
        };
        let args = Args::new(op, extents, reads, &mut []);
        return cached::append_cache(k, args, Stored::Real(cache));
    }
    if let KernelSpec::GemmPrepareAttention(k) = spec {
        return gemm_prepare_attention(k, extents, reads, writes);
    }
    if let KernelSpec::GemmResidualNorm(k) = spec {
        return gemm::gemm_residual_norm(k, extents, reads, writes);
    }
    if let KernelSpec::NormToE4m3(k) = spec {
        return fp8::norm_to_e4m3(k, extents, reads, writes);
    }
    if matches!(spec, KernelSpec::MhaDecodeAppend(_)) {
        return Err(OpError::InTurn { op });
    }
    let [out] = writes else {
        return Err(wrong("one tensor"));
    };
    if let KernelSpec::MhaToE4m3(k) = spec {
        return fp8::mha_to_e4m3(k, extents, reads, out);
    }
    let args = Args::new(op, extents, reads, out);
    match spec {
        KernelSpec::Gemm(k) => gemm::gemm(&k.problem, args),
        KernelSpec::GemmWgmma(k) => gemm::gemm(&k.problem, args),
        KernelSpec::GemmSplitK(k) => gemm::gemm(&k.problem, args),
        KernelSpec::ToE4m3(k) => fp8::to_e4m3(k, args),
        KernelSpec::AddBias(k) => rows::add_bias(k, args),
        KernelSpec::Combine(k) => rows::combine(k, args),
        KernelSpec::RmsNorm(k) => rows::rms_norm(k, args),
        KernelSpec::Rotary(k) => rotary::rotary(k, args),
        KernelSpec::Activate(k) => rows::activate(k, args),
        KernelSpec::Gate(k) => rows::gate(k, args),
        KernelSpec::Scale(k) => rows::scale(k, args),
        KernelSpec::SoftCap(k) => rows::soft_cap(k, args),
        KernelSpec::SliceColumns(k) => rows::slice_columns(k, args),
        KernelSpec::SplitHeads(k) => rows::split_heads(k, args),
        KernelSpec::MergeHeads(k) => rows::merge_heads(k, args),
        KernelSpec::LayerNorm(k) => rows::layer_norm(k, args),
        KernelSpec::BiasResidualLayerNorm(k) => rows::bias_residual_layer_norm(k, args),
        KernelSpec::Embedding(k) => rows::embedding(k, args),
        KernelSpec::EmbeddingLayerNorm(k) => rows::embedding_layer_norm(k, args),
        KernelSpec::Concat(k) => rows::concat(k, args),
        KernelSpec::TokenOfSequence(k) => pooling::token_of_sequence(k, args),
        KernelSpec::MeanPool(k) => pooling::mean_pool(k, args),
        KernelSpec::MaxPool(k) => pooling::max_pool(k, args),
        KernelSpec::WeightedPool(k) => pooling::weighted_pool(k, args),
        KernelSpec::L2Normalize(k) => pooling::l2_normalize(k, args),
        KernelSpec::Draw(k) => rows::draw(k, args),
        KernelSpec::LogProbability(k) => rows::log_probability(k, args),
        KernelSpec::MeanPoolNormalize(k) => pooling::mean_pool_normalize(k, args),
        KernelSpec::AttentionScores(k) => attention::scores(k, args),
        KernelSpec::AttentionSoftmax(k) => attention::softmax(k, args),
        KernelSpec::SoftmaxByDistance(k) => attention::softmax_by_distance(k, args),
        KernelSpec::RelativeScores(k) => attention::relative_scores(k, args),
        KernelSpec::AttentionContext(k) => attention::context(k, args),
        KernelSpec::MhaShort(k) => fused_attention::mha_short(k, args),
        KernelSpec::MhaOnline(k) => fused_attention::mha_online(k, args),
        KernelSpec::MhaSplitKeys(k) => fused_attention::mha_online(&k.plain, args),
        KernelSpec::MhaCached(k) => cached::mha_cached(k, MAX_QUERIES, args),
        KernelSpec::MhaDecode(k) => cached::mha_cached(&k.plain, MAX_QUERIES, args),
        KernelSpec::MhaPrefill(k) => cached::mha_cached(&k.plain, MAX_QUERIES, args),
        KernelSpec::MhaWgmma(k) => fused_attention::mha_online(&k.plain(), args),
        KernelSpec::MhaLongScores(_)
        | KernelSpec::AppendCache(_)
        | KernelSpec::GemmResidualRowStats(_)
        | KernelSpec::DeferredLayerNormGemm(_)
        | KernelSpec::GemmStream(_)
        | KernelSpec::GemmPrepareAttention(_)
        | KernelSpec::GemmResidualNorm(_)
        | KernelSpec::MhaDecodeAppend(_)
        | KernelSpec::NormToE4m3(_)
        | KernelSpec::MhaToE4m3(_)
        | KernelSpec::PrepareAttention(_) => Err(wrong("two tensors")),
        KernelSpec::MhaLongReduce(k) => long_attention::reduce(k, args),
        KernelSpec::MhaLongContext(k) => long_attention::context(k, args),
        KernelSpec::Upload(_)
        | KernelSpec::Scatter(_)
        | KernelSpec::PackScan(_)
        | KernelSpec::PackTokens(_)
        | KernelSpec::ChooseToken(_)
        | KernelSpec::Candidates(_)
        | KernelSpec::BeamStep(_)
        | KernelSpec::Advance(_)
        | KernelSpec::MaxSim(_) => Err(OpError::Packing { op }),
    }
}

/// Runs a kernel that appends to a KV cache in E4M3. `cache` contains the codes of the cache, and `writes` the other tensors that the
/// kernel writes.
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

/// Runs a kernel like [`run`], but for an invariant program. Attention to a cache then processes queries one by one, because the other
/// sequences of a batch affect the number of queries that a sequence has in the batch. All other kernels compute a row in an order that
/// depends only on the row's sequence.
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

/// Runs the GEMM, and then the kernel that prepares attention from the rows of the GEMM's result.
fn gemm_prepare_attention(
    spec: &GemmPrepareAttention,
    extents: &Extents,
    reads: &[Read<'_>],
    writes: &mut [&mut [f32]],
) -> Result<(), OpError> {
    let [out, prepared @ ..] = writes else {
        return Err(OpError::Writes {
            op: "gemm_prepare_attention",
            expected: "three tensors",
            found: 0,
        });
    };
    let (of_gemm, of_prepare) = reads.split_at(spec.of_gemm().min(reads.len()));
    run(&spec.gemm().into(), extents, of_gemm, &mut [&mut **out])?;
    let rows = [Read::Real(out)];
    let reads: Vec<Read<'_>> = rows.iter().chain(of_prepare).copied().collect();
    run(&spec.prepare.clone().into(), extents, &reads, prepared)
}
