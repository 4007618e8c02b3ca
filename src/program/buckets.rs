//! Buckets of batch shapes. Batches of similar sizes are rounded up to the same shape, so that they
//! share a memory plan and a CUDA graph.

use super::{Program, Step};
use crate::{
    kernels::Role,
    select::{Batches, Interval},
    tensor::{Extents, Shape, Size, Symbol},
};

/// The sizes that the batches of a program are rounded up to.
///
/// The extra tokens of a bucket belong to no sequence, and its extra sequences are empty. A bucket never crosses a size at which a step
/// switches to another kernel. It therefore launches the same kernels as its batches, and the rows of a batch are bitwise equal to those of
/// a run without buckets. A batch is not rounded in these cases:
///
/// - the size of a tensor or of a launch depends on something other than the numbers of tokens and sequences (stored scores, for example),
/// - the leading dimension of an output is something other than the number of tokens, the number of sequences or a constant,
/// - another dimension of an output is not a constant,
/// - a sequence is too long for every kernel.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Buckets {
    /// Numbers of tokens, in ascending order, at which a bucket must end. `batch` and `longest` hold such limits for the number of
    /// sequences and for the tokens of the longest sequence.
    tokens: Vec<u64>,
    batch: Vec<u64>,
    longest: Vec<u64>,
    /// Numbers of keys per sequence at which a bucket must end, each with the range of tokens where it applies.
    keys: Vec<(Interval, u64)>,
    /// Batches that are not rounded.
    exact: Vec<Batches>,
}

impl Buckets {
    /// Disables rounding.
    pub fn none() -> Self {
        Self {
            exact: vec![Batches::ALL],
            ..Self::default()
        }
    }

    pub fn of(program: &Program) -> Self {
        let mut buckets = Self::default();
        for step in &program.steps {
            buckets.add(program, step);
        }
        let mut outputs = program.outputs.iter().map(|&(_, t)| &program.tensors[t]);
        if !outputs.all(|output| has_rows_in_front(&output.shape)) {
            buckets.exact = vec![Batches::ALL];
        }
        for limits in [
            &mut buckets.tokens,
            &mut buckets.batch,
            &mut buckets.longest,
        ] {
            limits.sort_unstable();
            limits.dedup();
        }
        buckets.keys.sort_unstable_by_key(|&(_, limit)| limit);
        buckets.keys.dedup();
        buckets
    }

    fn add(&mut self, program: &Program, step: &Step) {
        let rows = match step.rows.as_symbol() {
            Some(Symbol::Batch) => &mut self.batch,
            _ => &mut self.tokens,
        };
        for part in step.dispatch.covered() {
            rows.extend(ends(part.rows));
            self.longest.extend(ends(part.longest));
            let rows = match step.is_over_tokens() {
                true => part.rows,
                false => Interval::ALL,
            };
            self.keys.extend(ends(part.keys).map(|end| (rows, end)));
        }
        // A batch with a sequence that is too long is not rounded, because the error must contain the actual length.
        if let Some(most) = step.max_longest {
            self.own(Batches::by_longest(Interval::new(most, None)));
        }
        if !depends_on_tokens_and_sequences(program, step) {
            step.batches().into_iter().for_each(|part| self.own(part));
        }
    }

    /// Excludes these batches from rounding.
    fn own(&mut self, batches: Batches) {
        self.tokens.extend(ends(batches.rows));
        self.longest.extend(ends(batches.longest));
        let keys = ends(batches.keys).map(|end| (batches.rows, end));
        self.keys.extend(keys);
        if !self.exact.contains(&batches) {
            self.exact.push(batches);
        }
    }

    /// Returns the bucket of a batch. Its extents are at least those of the batch. The operation is idempotent: the bucket of a bucket is
    /// itself. The `longest`, `pairs`, `slots` and `cached_keys` of a bucket only determine which kernels are launched.
    pub fn of_batch(&self, batch: &Extents) -> Extents {
        let over_tokens = batch.with_rows(batch.tokens);
        if self.exact.iter().any(|part| part.contains(&over_tokens)) {
            return *batch;
        }
        let tokens = rounded_tokens(batch.tokens).min(next(&self.tokens, batch.tokens));
        // A kernel may read the first row even of an empty sequence, so an extra sequence needs an extra token.
        let sequences = match tokens > batch.tokens {
            true => rounded_sequences(batch.batch).min(next(&self.batch, batch.batch)),
            false => batch.batch,
        };
        let keys = self.max_keys(batch.tokens, batch.max_keys());
        let longest = next(&self.longest, batch.longest).min(keys);
        // All fields are listed explicitly, because batches share a plan and a graph only if all fields of their buckets are equal.
        Extents {
            tokens,
            batch: sequences,
            longest,
            pairs: tokens * longest,
            slots: match batch.blocks {
                // Without a cache, each token is a key.
                0 => tokens,
                _ => batch.slots,
            },
            blocks: batch.blocks,
            cached_keys: keys,
            source_slots: batch.source_slots,
            source_pairs: batch.source_pairs,
            part: batch.part,
            rows: tokens,
        }
    }

    /// Returns the max number of keys per sequence for which a batch of `tokens` tokens launches the same kernels as for `keys` keys.
    pub fn max_keys(&self, tokens: u64, keys: u64) -> u64 {
        let bound = |&&(rows, end): &&(Interval, u64)| end >= keys && rows.contains(tokens);
        let next = self.keys.iter().find(bound);
        next.map_or(keys.max(Extents::MAX_TOKENS), |&(_, end)| end)
    }
}

/// Returns the ends of an interval. A bucket that does not cross them is entirely inside or entirely outside the interval.
fn ends(interval: Interval) -> impl Iterator<Item = u64> {
    let above = (interval.above > 0).then_some(interval.above);
    above.into_iter().chain(interval.up_to)
}

/// Rounds small numbers of tokens up to multiples of 8, the row granularity of the GEMMs for few rows. Rounds larger numbers up to
/// multiples of a power of two. This power is at most 1/32 of the number of tokens, and at most 128, the number of rows of a GEMM tile.
/// Unused rows of a tile cost nothing.
fn rounded_tokens(tokens: u64) -> u64 {
    const MIN_STEP: u64 = 8;
    const MAX_STEP: u64 = 128;
    let step = power_of_two_up_to(tokens / 32).clamp(MIN_STEP, MAX_STEP);
    tokens.next_multiple_of(step)
}

/// Rounds the number of sequences up by at most a quarter. The added sequences are empty, and each costs only a few CTAs that exit
/// immediately.
fn rounded_sequences(sequences: u64) -> u64 {
    sequences.next_multiple_of(power_of_two_up_to(sequences / 4))
}

/// Returns the largest power of two up to `n`, and 1 for 0.
fn power_of_two_up_to(n: u64) -> u64 {
    1 << n.max(1).ilog2()
}

/// Returns the first of the ascending limits that is at least `size`, or `u64::MAX` if there is none.
fn next(limits: &[u64], size: u64) -> u64 {
    let at = limits.partition_point(|&limit| limit < size);
    limits.get(at).copied().unwrap_or(u64::MAX)
}

/// Returns whether the sizes of a step's launch and tensors depend only on the numbers of tokens
/// and sequences.
fn depends_on_tokens_and_sequences(program: &Program, step: &Step) -> bool {
    let simple = |size: &Size| {
        let others = [
            Symbol::Longest,
            Symbol::Pairs,
            Symbol::KeyTiles,
            Symbol::Slots,
            Symbol::Blocks,
            Symbol::SourceSlots,
            Symbol::SourcePairs,
        ];
        !others.into_iter().any(|symbol| size.depends_on(symbol))
    };
    let counts = step.kernels().into_iter().all(|kernel| {
        let params = program.kernels[kernel].as_kernel().params();
        params.iter().all(|param| match &param.role {
            Role::Count(size) => simple(size),
            Role::Read { .. } | Role::Write { .. } => true,
        })
    });
    let mut tensors = step.operands.iter().map(|&o| &program.tensors[o]);
    let rows = matches!(step.rows.as_symbol(), Some(Symbol::Tokens | Symbol::Batch));
    rows && counts && tensors.all(|tensor| tensor.shape.0.iter().all(simple))
}

/// Returns whether the leading dimension of a tensor is the number of tokens, the number of sequences or a constant, and all other
/// dimensions are constants. In a bucket, the rows of the batch then come before the rows of extra tokens or sequences.
fn has_rows_in_front(shape: &Shape) -> bool {
    let Some((rows, rest)) = shape.0.split_first() else {
        return true;
    };
    let counted = matches!(rows.as_symbol(), Some(Symbol::Tokens | Symbol::Batch));
    (counted || rows.as_constant().is_some()) && rest.iter().all(|d| d.as_constant().is_some())
}

#[cfg(test)]
mod tests;
