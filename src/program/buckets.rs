//! Buckets of batch shapes: batches of similar sizes are rounded up to one shape, so that they share a
//! memory plan and a CUDA graph.

use super::{Program, Step};
use crate::{
    kernels::Role,
    select::{Batches, Interval},
    tensor::{Extents, Shape, Size, Symbol},
};

/// The sizes that the batches of a program are rounded up to.
///
/// A bucket's additional tokens belong to no sequence, and its additional sequences have no tokens. A bucket never
/// crosses a bound of a step's dispatch, so that it launches the kernels of its batches, and their rows have the same
/// bits as without buckets. A shape is its own bucket where the size of a tensor or a launch depends on more than the
/// numbers of tokens and sequences (stored scores), where the leading dimension of a result is neither tokens nor sequences,
/// and where a sequence is too long for every kernel.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Buckets {
    /// Bounds that a bucket does not cross, ascending.
    tokens: Vec<u64>,
    batch: Vec<u64>,
    longest: Vec<u64>,
    /// With the numbers of tokens for which they are bounds.
    keys: Vec<(Interval, u64)>,
    /// Batches that are their own buckets.
    exact: Vec<Batches>,
}

impl Buckets {
    /// Makes every shape its own bucket.
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
        // The error for a sequence that is too long must name the batch's own length.
        if let Some(most) = step.most_longest {
            self.own(Batches::by_longest(Interval::new(most, None)));
        }
        if !depends_on_tokens_and_sequences(program, step) {
            step.batches().into_iter().for_each(|part| self.own(part));
        }
    }

    /// Makes each of these batches its own bucket.
    fn own(&mut self, batches: Batches) {
        self.tokens.extend(ends(batches.rows));
        self.longest.extend(ends(batches.longest));
        let keys = ends(batches.keys).map(|end| (batches.rows, end));
        self.keys.extend(keys);
        if !self.exact.contains(&batches) {
            self.exact.push(batches);
        }
    }

    /// The bucket of a batch. None of its extents is smaller than the batch's, and it is its own bucket. Where it differs
    /// from the batch, its `longest`, `pairs`, `slots` and `cached_keys` decide only which kernels are launched.
    pub fn of_batch(&self, batch: &Extents) -> Extents {
        let over_tokens = batch.with_rows(batch.tokens);
        if self.exact.iter().any(|part| part.contains(&over_tokens)) {
            return *batch;
        }
        let tokens = rounded_tokens(batch.tokens).min(next(&self.tokens, batch.tokens));
        // A kernel may read the row where a sequence begins: an added sequence begins at an added token.
        let sequences = match tokens > batch.tokens {
            true => rounded_sequences(batch.batch).min(next(&self.batch, batch.batch)),
            false => batch.batch,
        };
        let keys = self.most_keys(batch.tokens, batch.most_keys());
        let longest = next(&self.longest, batch.longest).min(keys);
        // All fields are named, since one that differs between batches of a bucket would keep them from
        // sharing a plan and a graph.
        Extents {
            tokens,
            batch: sequences,
            longest,
            pairs: tokens * longest,
            slots: match batch.blocks {
                // Nothing is cached, and the keys are those of the tokens.
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

    /// The most keys of a sequence for which so many tokens launch the same kernels as for `keys` of them.
    pub fn most_keys(&self, tokens: u64, keys: u64) -> u64 {
        let bound = |&&(rows, end): &&(Interval, u64)| end >= keys && rows.contains(tokens);
        let next = self.keys.iter().find(bound);
        next.map_or(keys.max(Extents::MAX_TOKENS), |&(_, end)| end)
    }
}

/// The bounds that a bucket must not cross, so that it lies inside or outside the interval.
fn ends(interval: Interval) -> impl Iterator<Item = u64> {
    let above = (interval.above > 0).then_some(interval.above);
    above.into_iter().chain(interval.up_to)
}

/// Rounds few tokens to multiples of 8, the row granularity of GEMMs for small M; more tokens in steps of at most 1/32 of
/// them, up to the rows of a GEMM's tile, whose unused rows cost nothing.
fn rounded_tokens(tokens: u64) -> u64 {
    const FEWEST: u64 = 8;
    const MOST: u64 = 128;
    let step = power_of_two_up_to(tokens / 32).clamp(FEWEST, MOST);
    tokens.next_multiple_of(step)
}

/// Rounds sequences in steps of at most a quarter: a sequence without tokens costs a few CTAs that exit at once.
fn rounded_sequences(sequences: u64) -> u64 {
    sequences.next_multiple_of(power_of_two_up_to(sequences / 4))
}

/// The largest power of two that is not above `n`, and 1 for 0.
fn power_of_two_up_to(n: u64) -> u64 {
    1 << n.max(1).ilog2()
}

/// The first of the ascending limits that is not below `size`.
fn next(limits: &[u64], size: u64) -> u64 {
    let at = limits.partition_point(|&limit| limit < size);
    limits.get(at).copied().unwrap_or(u64::MAX)
}

/// Whether the sizes of a step's launch and tensors depend on the numbers of tokens and sequences alone.
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

/// Whether the leading dimension of a tensor is tokens, sequences or a constant, so that rows of the batch come first.
fn has_rows_in_front(shape: &Shape) -> bool {
    let Some((rows, rest)) = shape.0.split_first() else {
        return true;
    };
    let counted = matches!(rows.as_symbol(), Some(Symbol::Tokens | Symbol::Batch));
    (counted || rows.as_constant().is_some()) && rest.iter().all(|d| d.as_constant().is_some())
}

#[cfg(test)]
mod tests;
