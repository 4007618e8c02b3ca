//! Access to the arguments of a kernel, which are taken in order and checked against the kernel and the batch.

use gemmule_cpu::linear::Weight;

use super::{OpError, Read};
use crate::ops::HeadView;
use crate::tensor::{Extents, e4m3};

/// Arguments of one launch. The methods take them in order.
pub(super) struct Args<'r, 'w> {
    op: &'static str,
    pub extents: &'r Extents,
    reads: &'r [Read<'r>],
    taken: usize,
    out: &'w mut [f32],
}

impl<'r, 'w> Args<'r, 'w> {
    pub fn new(
        op: &'static str,
        extents: &'r Extents,
        reads: &'r [Read<'r>],
        out: &'w mut [f32],
    ) -> Self {
        Self {
            op,
            extents,
            reads,
            taken: 0,
            out,
        }
    }

    pub fn op(&self) -> &'static str {
        self.op
    }

    fn next(&mut self, param: &'static str) -> Result<Read<'r>, OpError> {
        let index = self.taken;
        self.taken += 1;
        self.reads.get(index).copied().ok_or(OpError::MissingRead {
            op: self.op,
            param,
            index,
        })
    }

    fn wrong_type(&self, param: &'static str, expected: &'static str, found: Read<'_>) -> OpError {
        OpError::ElementType {
            op: self.op,
            param,
            expected,
            found: found.kind(),
        }
    }

    /// Checks that `found`, the number of elements of the tensor `param`, equals the number of elements of `shape`.
    pub fn check_shape(
        &self,
        param: &'static str,
        shape: &[u64],
        found: usize,
    ) -> Result<(), OpError> {
        self.check_len(param, elements(shape), found)
    }

    fn check_len(&self, param: &'static str, expected: u64, found: usize) -> Result<(), OpError> {
        if found as u64 == expected {
            return Ok(());
        }
        Err(OpError::Length {
            op: self.op,
            param,
            expected,
            found: found as u64,
        })
    }

    /// Takes the next argument: a tensor of reals with the shape `shape`.
    pub fn real(&mut self, param: &'static str, shape: &[u64]) -> Result<&'r [f32], OpError> {
        match self.next(param)? {
            Read::Real(x) => {
                self.check_len(param, elements(shape), x.len())?;
                Ok(x)
            }
            other => Err(self.wrong_type(param, "f32", other)),
        }
    }

    /// Takes the next argument: the weight `[n, k]` of a linear layer.
    pub fn weight(&mut self, param: &'static str, shape: &[u64; 2]) -> Result<Weight<'r>, OpError> {
        match self.next(param)? {
            Read::Real(x) => {
                self.check_len(param, elements(shape), x.len())?;
                Ok(Weight::Rows(x))
            }
            Read::Packed(packed) if packed.shape() == *shape => Ok(Weight::Packed(packed)),
            Read::Packed(packed) => Err(OpError::PackedShape {
                op: self.op,
                param,
                expected: *shape,
                found: packed.shape(),
            }),
            other => Err(self.wrong_type(param, "f32", other)),
        }
    }

    /// Takes the next argument: `n` values of type i32.
    pub fn i32s(&mut self, param: &'static str, n: u64) -> Result<&'r [i32], OpError> {
        match self.next(param)? {
            Read::I32(x) => {
                self.check_len(param, n, x.len())?;
                Ok(x)
            }
            other => Err(self.wrong_type(param, "i32", other)),
        }
    }

    /// Takes the next argument: the part of the pool (the memory of all caches) from one cache's first element to the end of the pool.
    pub fn pool(&mut self, param: &'static str) -> Result<Cached<'r>, OpError> {
        match self.next(param)? {
            Read::Real(x) => Ok(Cached::Real(x)),
            Read::E4m3(codes) => Ok(Cached::E4m3(codes)),
            other => Err(self.wrong_type(param, "f32 or e4m3", other)),
        }
    }

    /// Takes the next argument, `cu_lens`: the index of the first token of each sequence. Checks that the sequences contain all tokens.
    pub fn sequences(&mut self) -> Result<Vec<Sequence>, OpError> {
        let sequences = self.pooled_sequences()?;
        let (op, tokens) = (self.op, self.extents.tokens);
        let end = sequences.last().map_or(0, |last| last.start + last.len);
        match end as u64 == tokens {
            true => Ok(sequences),
            false => Err(OpError::CuLens {
                op,
                index: sequences.len(),
                found: end as i32,
                expected: tokens.to_string(),
                tokens,
            }),
        }
    }

    /// Takes the next argument, `cu_lens`: the start of each sequence among the tokens to pool, which may be fewer than all tokens.
    pub fn pooled_sequences(&mut self) -> Result<Vec<Sequence>, OpError> {
        let (op, tokens) = (self.op, self.extents.tokens);
        let starts = self.i32s("cu_lens", self.extents.batch.saturating_add(1))?;
        let wrong = |index: usize, expected: String| OpError::CuLens {
            op,
            index,
            found: starts[index],
            expected,
            tokens,
        };
        if starts[0] != 0 {
            return Err(wrong(0, "0".to_owned()));
        }
        let mut sequences = Vec::with_capacity(starts.len() - 1);
        for (index, pair) in starts.windows(2).enumerate() {
            if pair[1] <= pair[0] {
                return Err(wrong(index + 1, format!("more than {}", pair[0])));
            }
            // Starts increase from 0, so neither start is negative, and their difference is positive.
            sequences.push(Sequence {
                start: pair[0] as usize,
                len: (pair[1] - pair[0]) as usize,
                valid: (pair[1] - pair[0]) as usize,
                pairs: 0,
            });
        }
        let last = starts.len() - 1;
        if starts[last] as u64 > tokens {
            return Err(wrong(last, format!("at most {tokens}")));
        }
        Ok(sequences)
    }

    /// Takes the next argument, `cu_lens`, and returns the index of the first token of each sequence: all entries but the last.
    pub fn first_tokens(&mut self) -> Result<&'r [i32], OpError> {
        let (op, tokens) = (self.op, self.extents.tokens);
        let starts = self.i32s("cu_lens", self.extents.batch.saturating_add(1))?;
        let (_, starts) = starts.split_last().unwrap_or((&0, &[]));
        let is_outside = |&start: &i32| u64::try_from(start).map_or(true, |start| start >= tokens);
        match starts.iter().position(is_outside) {
            None => Ok(starts),
            Some(index) => Err(OpError::CuLens {
                op,
                index,
                found: starts[index],
                expected: format!("a token below {tokens}"),
                tokens,
            }),
        }
    }

    /// Takes the next two arguments, `cu_lens` and `pair_offsets`: for each sequence, the index of its first token, and the index of its
    /// first (query, key) pair among the pairs of a head.
    pub fn sequences_with_pairs(&mut self) -> Result<Vec<Sequence>, OpError> {
        let op = self.op;
        let mut sequences = self.sequences()?;
        let offsets = match self.next("pair_offsets")? {
            Read::I64(x) => x,
            other => return Err(self.wrong_type("pair_offsets", "i64", other)),
        };
        self.check_len("pair_offsets", sequences.len() as u64 + 1, offsets.len())?;
        let mut expected = 0_i64;
        for (index, &found) in offsets.iter().enumerate() {
            if found != expected {
                return Err(OpError::PairOffsets {
                    op,
                    index,
                    found,
                    expected,
                });
            }
            if let Some(sequence) = sequences.get_mut(index) {
                sequence.pairs = expected as usize;
                // The sum of all lengths is less than 2³¹, so the sum of their squares is less than 2⁶².
                expected += (sequence.len * sequence.len) as i64;
            }
        }
        if expected as u64 != self.extents.pairs {
            return Err(OpError::PairOffsets {
                op,
                index: sequences.len(),
                found: expected,
                expected: i64::try_from(self.extents.pairs).unwrap_or(i64::MAX),
            });
        }
        Ok(sequences)
    }

    /// Takes the next argument, the number of leading tokens of each sequence that queries attend to, and sets `valid` of each sequence.
    pub fn valid_lens(&mut self, sequences: &mut [Sequence]) -> Result<(), OpError> {
        let op = self.op;
        let lens = self.i32s("valid_lens", sequences.len() as u64)?;
        for (index, (sequence, &found)) in sequences.iter_mut().zip(lens).enumerate() {
            match usize::try_from(found) {
                Ok(valid) if (1..=sequence.len).contains(&valid) => sequence.valid = valid,
                _ => {
                    return Err(OpError::ValidLens {
                        op,
                        index,
                        found,
                        len: sequence.len,
                    });
                }
            }
        }
        Ok(())
    }

    /// Returns the layout of `heads` heads with `head` columns each in a tensor, or an error if they do not fit a row of a token-major
    /// tensor.
    pub fn heads(
        &self,
        what: &'static str,
        view: HeadView,
        heads: u32,
        head: u32,
    ) -> Result<Heads, OpError> {
        let tokens = self.extents.tokens;
        let (heads, head) = (u64::from(heads), u64::from(head));
        Ok(match view {
            HeadView::HeadMajor => Heads {
                offset: 0,
                head_stride: tokens.saturating_mul(head) as usize,
                token_stride: head as usize,
                elements: elements(&[heads, tokens, head]),
            },
            HeadView::TokenMajor { offset, stride } => {
                let end = (heads * head).saturating_add(u64::from(offset));
                if end > u64::from(stride) {
                    return Err(OpError::Columns {
                        op: self.op,
                        what,
                        end,
                        stride: u64::from(stride),
                    });
                }
                Heads {
                    offset: offset as usize,
                    head_stride: head as usize,
                    token_stride: stride as usize,
                    elements: elements(&[tokens, u64::from(stride)]),
                }
            }
        })
    }

    /// Checks that all arguments have been taken.
    pub fn all_taken(&self) -> Result<(), OpError> {
        match self.taken == self.reads.len() {
            true => Ok(()),
            false => Err(OpError::SurplusReads {
                op: self.op,
                expected: self.taken,
                found: self.reads.len(),
            }),
        }
    }

    /// Returns the tensor to write, or an error if it does not have the shape `shape` or if not all arguments have been taken.
    pub fn out(self, shape: &[u64]) -> Result<&'w mut [f32], OpError> {
        self.all_taken()?;
        self.check_len("out", elements(shape), self.out.len())?;
        Ok(self.out)
    }
}

/// Elements of a cache that a kernel reads.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cached<'a> {
    Real(&'a [f32]),
    E4m3(&'a [u8]),
}

impl Cached<'_> {
    pub fn len(self) -> usize {
        match self {
            Self::Real(values) => values.len(),
            Self::E4m3(codes) => codes.len(),
        }
    }

    /// Appends a range of elements to `to`, decoded to f32.
    pub fn extend(self, to: &mut Vec<f32>, range: std::ops::Range<usize>) {
        match self {
            Self::Real(values) => to.extend_from_slice(&values[range]),
            Self::E4m3(codes) => to.extend(codes[range].iter().map(|&code| e4m3::decode(code))),
        }
    }
}

/// Number of elements of a shape. If the product overflows, it saturates, so that no slice has this length.
pub(super) fn elements(shape: &[u64]) -> u64 {
    shape.iter().fold(1, |n, &d| n.saturating_mul(d))
}

/// One sequence of the batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence {
    /// Index of the first token in the batch.
    pub start: usize,
    /// Number of tokens, at least one.
    pub len: usize,
    /// Number of leading tokens that queries attend to, from 1 to `len`.
    pub valid: usize,
    /// Index of the first (query, key) pair of the sequence among the pairs of a head; 0 if the kernel has no pairs.
    pub pairs: usize,
}

/// A validated [`HeadView`]: element `c` of head `h` of token `t` is at `offset + h·head_stride + t·token_stride + c`, which is
/// less than `elements`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    offset: usize,
    head_stride: usize,
    pub token_stride: usize,
    pub elements: u64,
}

impl Heads {
    /// Returns the index of the first element of head `h` of token `t`.
    pub fn at(&self, h: usize, t: usize) -> usize {
        self.offset + h * self.head_stride + t * self.token_stride
    }
}

/// Allocates `len` zeros for an intermediate value of the operation `op`.
pub(super) fn zeros(op: &'static str, len: usize) -> Result<Vec<f32>, OpError> {
    let mut values = Vec::new();
    values
        .try_reserve_exact(len)
        .map_err(|_| OpError::OutOfMemory {
            op,
            bytes: (len * size_of::<f32>()) as u64,
        })?;
    values.resize(len, 0.0);
    Ok(values)
}
