//! Validation of programs that were read from a file.
//!
//! Executors trust a program: they index, multiply and launch with its values. A program from
//! [`lower`](super::lower()) is valid by construction. Any other program is checked here first.

mod tensors;

use std::collections::HashSet;

use self::tensors::{check_shape, check_size, weight_dims};
use super::{Program, Step, Storage, TensorIndex, lower::meta_layout};

use crate::{
    kernels::{Kernel, KernelSpec, Role, attention::Keys, embedding::Table},
    ops::MAX_WIDTH,
    select::{Batches, Interval},
    tensor::{DType, Element, Shape, Symbol},
};

/// Max number of ranges of a dispatch. A lowered program has about thirty. All pairs of ranges are compared, which takes quadratic time.
const MAX_DISPATCH: usize = 1024;

impl Program {
    /// Checks everything that an executor relies on:
    ///
    /// - Kernels accept all sizes, and indices are in range.
    /// - The tensors of a step match its kernels' types and sizes.
    /// - For every batch, each tensor is written once before it is read.
    /// - Each weight is read by some step, so that no memory is wasted.
    ///
    /// # Errors
    /// Returns an error if a check fails: a description of the first problem.
    pub fn validate(&self) -> Result<(), String> {
        for (i, kernel) in self.kernels.iter().enumerate() {
            check_kernel(kernel.as_kernel(), self.dtype)
                .map_err(|problem| format!("its kernel {i} is invalid: {problem}"))?;
        }
        for tensor in &self.tensors {
            check_shape(&tensor.shape).map_err(|problem| format!("`{}` {problem}", tensor.name))?;
        }
        self.places()?;
        let mut written: Vec<Vec<Batches>> = vec![Vec::new(); self.tensors.len()];
        for (at, step) in self.steps.iter().enumerate() {
            self.step(at as u32, step, &mut written)
                .map_err(|problem| format!("the step `{}` {problem}", step.name))?;
        }
        self.one_kernel_a_step()?;
        let idle = |(i, t): &(usize, &super::Tensor)| {
            matches!(t.place, Storage::Planned { .. }) && written[*i].is_empty()
        };
        if let Some((_, tensor)) = self.tensors.iter().enumerate().find(idle) {
            return Err(format!("no step computes `{}`", tensor.name));
        }
        let operands = self.steps.iter().flat_map(|step| &step.operands);
        let read: HashSet<TensorIndex> = operands.copied().collect();
        let unread = |(i, t): &(usize, &super::Tensor)| {
            matches!(t.place, Storage::Weight(_)) && !read.contains(i)
        };
        if let Some((_, weight)) = self.tensors.iter().enumerate().find(unread) {
            return Err(format!("no step reads the weight `{}`", weight.name));
        }
        for (name, tensor) in &self.outputs {
            if !Batches::ALL.is_covered_by(&written[*tensor]) {
                return Err(format!(
                    "the output `{name}` is not computed for every batch"
                ));
            }
        }
        Ok(())
    }

    /// Checks that each step of an invariant program has a single kernel for all batches, and that no kernel's order of sums depends on the
    /// position of a row in the batch.
    fn one_kernel_a_step(&self) -> Result<(), String> {
        if !self.invariant {
            return Ok(());
        }
        let is_one = |step: &Step| matches!(step.dispatch.covered()[..], [Batches::ALL]);
        let varies = |step: &&Step| step.max_longest.is_none() && !is_one(step);
        if let Some(step) = self.steps.iter().find(varies) {
            return Err(format!(
                "it is invariant, but which kernel computes `{}` depends on the batch",
                step.name
            ));
        }
        let by_address = |kernel: &&KernelSpec| matches!(kernel, KernelSpec::AttentionSoftmax(_));
        match self.kernels.iter().find(by_address) {
            Some(kernel) => Err(format!(
                "it is invariant, but `{}` sums in an order that depends on the position of the rows",
                kernel.as_kernel().symbol()
            )),
            None => Ok(()),
        }
    }

    /// Checks the storage of every tensor and output.
    fn places(&self) -> Result<(), String> {
        if self.first_ids().count() > 1 {
            return Err("it reads previous ids with several ids before the first token".to_owned());
        }
        let n_steps = self.steps.len();
        for tensor in &self.tensors {
            let name = &tensor.name;
            match &tensor.place {
                Storage::Planned { first, last } => {
                    if first > last || *last as usize >= n_steps {
                        return Err(format!(
                            "`{name}` lives from step {first} to {last} of {n_steps}"
                        ));
                    }
                }
                Storage::Cached(cache) => {
                    let Some(cache) = self.caches.get(*cache as usize) else {
                        return Err(format!(
                            "`{name}` refers to a cache that the program does not have"
                        ));
                    };
                    if cache.part as usize >= self.parts.len().max(1) {
                        return Err(format!(
                            "`{name}` refers to a part that the program does not have"
                        ));
                    }
                    let sizes = [cache.heads, cache.head];
                    let shape = Shape::new([Symbol::Blocks.into(), self.block_elements().into()]);
                    let fits = sizes.iter().all(|n| (1..=MAX_WIDTH).contains(n));
                    let element: Element = self.cache_format().into();
                    let pool = self.pool();
                    let is_stored = tensor.element == element
                        && (cache.format, cache.scaled) == (pool.format, pool.scaled);
                    if !fits || !is_stored || tensor.shape != shape {
                        return Err(format!("`{name}` does not have the layout of a cache"));
                    }
                }
                Storage::Weight(expr) => {
                    // The format is checked in `step`, against the parameters of the kernels that read the weight.
                    match tensor.element {
                        Element::Value(_) | Element::Scaled(_) | Element::E4m3 => {}
                        Element::I8 | Element::I32 | Element::I64 => {
                            return Err(format!(
                                "the weight `{name}` is stored as {}",
                                tensor.element
                            ));
                        }
                    }
                    let dims = weight_dims(expr)
                        .map_err(|problem| format!("the weight `{name}` {problem}"))?;
                    if Shape::fixed(&dims) != tensor.shape {
                        return Err(format!(
                            "the weight `{name}` does not have the shape of its parts"
                        ));
                    }
                }
                Storage::Batch(meta) => {
                    let (_, shape) = meta_layout(*meta);
                    if tensor.element != meta.element() || tensor.shape != shape {
                        return Err(format!("`{name}` does not have the layout of {meta:?}"));
                    }
                }
            }
        }
        for (name, tensor) in &self.outputs {
            let place = self.tensors.get(*tensor).map(|t| &t.place);
            let Some(Storage::Planned { last, .. }) = place else {
                return Err(format!(
                    "the output `{name}` is not a tensor that a step computes"
                ));
            };
            if *last as usize + 1 != n_steps {
                return Err(format!(
                    "the output `{name}` is not alive after the last step"
                ));
            }
        }
        Ok(())
    }

    fn step(&self, at: u32, step: &Step, written: &mut [Vec<Batches>]) -> Result<(), String> {
        check_size(&step.rows).map_err(|problem| format!("runs over rows that {problem}"))?;
        let n_parts = step.dispatch.entries().len();
        if !(1..=MAX_DISPATCH).contains(&n_parts) {
            return Err(format!(
                "has kernels for {n_parts} ranges of batches; 1 to {MAX_DISPATCH} are possible"
            ));
        }
        let covered = step.dispatch.covered();
        if let Some(empty) = covered.iter().find(|part| part.is_empty()) {
            return Err(format!(
                "has a kernel for an empty range of batches ({empty})"
            ));
        }
        if let Some((a, b)) = step.dispatch.overlap() {
            return Err(format!("has two kernels for the same batch ({a}; {b})"));
        }
        // Coverage is checked in terms of tokens, which all steps have in common. A step whose rows are not tokens must therefore support
        // any number of rows.
        let by_rows = covered.iter().any(|part| part.rows != Interval::ALL);
        if by_rows && !step.is_over_tokens() && !Batches::ALL.is_covered_by(&covered) {
            return Err(format!("has no kernel for some numbers of {}", step.rows));
        }
        let n_parts = self.parts.len().max(1);
        if step.part as usize >= n_parts {
            return Err(format!("belongs to part {} of {n_parts}", step.part));
        }
        let n_tensors = self.tensors.len();
        if let Some(&operand) = step.operands.iter().find(|&&o| o >= n_tensors) {
            return Err(format!("binds tensor {operand} of {n_tensors}"));
        }
        let mut n_writes = None;
        for entry in step.dispatch.entries() {
            let Some(kernel) = self.kernels.get(entry.choice) else {
                return Err(format!(
                    "launches kernel {} of {}",
                    entry.choice,
                    self.kernels.len()
                ));
            };
            check_limit(step, entry.batches, kernel)?;
            self.bindings(at, step, kernel, written)?;
            if *n_writes.get_or_insert(kernel.as_kernel().n_writes())
                != kernel.as_kernel().n_writes()
            {
                return Err("has kernels that write different tensors".to_owned());
            }
        }
        // All kernels of a step have equal parameters, and the written tensors are the last operands.
        let n_reads = step.operands.len().saturating_sub(n_writes.unwrap_or(0));
        let (reads, writes) = step.operands.split_at(n_reads);
        let own = step.batches();
        for &operand in reads {
            let tensor = &self.tensors[operand];
            let is_computed = match tensor.place {
                Storage::Batch(_) | Storage::Weight(_) => true,
                Storage::Planned { .. } | Storage::Cached(_) => {
                    own.iter().all(|part| part.is_covered_by(&written[operand]))
                }
            };
            let mut kernels = step.dispatch.entries().iter().map(|e| e.choice);
            let adds_itself = |kernel| self.adds_itself(step, &self.kernels[kernel], operand);
            if !is_computed && !kernels.all(adds_itself) {
                return Err(format!(
                    "reads `{}`, which is not computed for all its batches",
                    tensor.name
                ));
            }
        }
        for out in writes.iter().flat_map(|&out| self.written(step, out)) {
            let again = |before: &Batches| own.iter().any(|part| part.meets(*before));
            if written[out].iter().any(again) {
                return Err(format!(
                    "computes `{}`, which is already computed for the same batch",
                    self.tensors[out].name
                ));
            }
            written[out].extend(&own);
            // A batch with a sequence of more than `max_longest` tokens is refused before any step runs, so for such a batch the tensor
            // counts as written.
            let beyond = step.max_longest.map(|most| Interval::new(most, None));
            written[out].extend(beyond.map(Batches::by_longest));
        }
        Ok(())
    }

    /// Checks that a step's tensors have the type and size of its kernel's parameters.
    fn bindings(
        &self,
        at: u32,
        step: &Step,
        kernel: &KernelSpec,
        written: &[Vec<Batches>],
    ) -> Result<(), String> {
        let params = kernel.as_kernel().params();
        let tensors = params.iter().filter(|p| !matches!(p.role, Role::Count(_)));
        let n_params = tensors.clone().count();
        if n_params != step.operands.len() {
            return Err(format!(
                "binds {} tensors to `{}`, which takes {n_params}",
                step.operands.len(),
                kernel.as_kernel().symbol()
            ));
        }
        for (param, &operand) in tensors.zip(&step.operands) {
            let tensor = &self.tensors[operand];
            let (element, shape, writes) = match &param.role {
                Role::Read { element, shape, .. } => (*element, shape, false),
                Role::Write { element, shape } => (*element, shape, true),
                Role::Count(_) => continue,
            };
            let needed = step.bind(&shape.elements());
            if tensor.element != element || tensor.shape.elements() != needed {
                return Err(format!(
                    "binds `{}`, {} {}, to `{}`, {element} of {needed} elements",
                    tensor.name, tensor.element, tensor.shape, param.name
                ));
            }
            match tensor.place {
                // For each batch, exactly one step writes a tensor. The tensor's life starts at its first writer, and all readers come
                // later. Thus no step reads its own output, and nothing is read before it is written.
                Storage::Planned { first, last }
                    if last < at
                        || (writes && written[operand].is_empty() && first != at)
                        || (!writes && first >= at) =>
                {
                    return Err(format!("binds `{}` outside its lifetime", tensor.name));
                }
                // Parts run separately, and the values of a part are not kept for other parts.
                Storage::Planned { first, .. }
                    if self.steps.get(first as usize).map(|s| s.part) != Some(step.part) =>
                {
                    return Err(format!(
                        "binds `{}`, which belongs to another part",
                        tensor.name
                    ));
                }
                Storage::Cached(cache) if !self.is_of_cache(kernel, cache, step.part) => {
                    return Err(format!(
                        "binds the cache `{}`, which does not have the layout of `{}`",
                        tensor.name,
                        kernel.as_kernel().symbol()
                    ));
                }
                Storage::Batch(_) | Storage::Weight(_) if writes => {
                    return Err(format!("writes `{}`, which is read-only", tensor.name));
                }
                _ => {}
            }
        }
        for (operand, table) in kernel.as_kernel().tables() {
            let ids = &self.tensors[step.operands[operand]];
            if ids.place != Storage::Batch(table.ids) {
                return Err(format!(
                    "looks up `{}` in a table for {:?}",
                    ids.name, table.ids
                ));
            }
        }
        Ok(())
    }

    /// Returns whether a kernel of the part `part` can read or write this cache. The cache must have the kernel's layout and belong to this
    /// part. Only attention to a source reads a cache of another part instead.
    fn is_of_cache(&self, kernel: &KernelSpec, cache: u32, part: u32) -> bool {
        let own = self.caches.get(cache as usize).map(|cache| cache.part) == Some(part);
        let reads = match kernel {
            KernelSpec::MhaCached(k) => k,
            KernelSpec::MhaDecode(k) => &k.plain,
            KernelSpec::MhaPrefill(k) => &k.plain,
            KernelSpec::MhaDecodeAppend(k) => {
                let reads = &k.decode.plain;
                let is_one = self.n_caches(cache, reads.kv_heads, reads.head) == Some(1);
                return own && (is_one || self.n_appended(kernel, cache).is_some());
            }
            _ => return own && self.n_appended(kernel, cache).is_some(),
        };
        let is_read = own == (reads.keys == Keys::Own);
        is_read && self.n_caches(cache, reads.kv_heads, reads.head) == Some(1)
    }

    /// Returns whether a kernel appends the batch's rows to the cache that it reads.
    fn adds_itself(&self, step: &Step, kernel: &KernelSpec, cache: usize) -> bool {
        let first = step
            .operands
            .len()
            .wrapping_sub(kernel.as_kernel().n_writes());
        let added = step.operands.get(first);
        matches!(kernel, KernelSpec::MhaDecodeAppend(_))
            && added.is_some_and(|&added| self.written(step, added).contains(&cache))
    }

    /// Returns the number of consecutive caches, starting with `cache`, that a kernel appends to. Returns `None` if the kernel does not
    /// append to caches of this layout.
    fn n_appended(&self, kernel: &KernelSpec, cache: u32) -> Option<u32> {
        match kernel {
            KernelSpec::AppendCache(k) => {
                let own = self.caches.get(cache as usize)?;
                let n = self.n_caches(cache, k.heads, k.head)?;
                (own.one_position == k.of_sequence).then_some(n)
            }
            KernelSpec::PrepareAttention(k) if k.pool.is_some() => {
                self.n_caches(cache, k.kv_heads.checked_mul(2)?, k.head)
            }
            KernelSpec::MhaDecodeAppend(k) => {
                let append = k.append();
                let own = self.caches.get(cache as usize)?;
                let n = self.n_caches(cache, append.heads, append.head)?;
                (!own.one_position).then_some(n)
            }
            _ => None,
        }
    }

    /// Returns the number of consecutive caches, starting with `first`, that together have `heads` heads of size `head`. Adjacent caches in
    /// a block have the layout of one larger cache.
    fn n_caches(&self, first: u32, heads: u32, head: u32) -> Option<u32> {
        let mut found = 0;
        let rest = self.caches.get(first as usize..)?;
        for (n, cache) in (1..).zip(rest) {
            found += u64::from(cache.heads);
            if cache.head != head || found > u64::from(heads) {
                return None;
            }
            if found == u64::from(heads) {
                return Some(n);
            }
        }
        None
    }

    /// Returns the tensors that a step writes if `out` is one of its results: `out` itself, or, if `out` is a cache, all caches that the
    /// kernel appends to.
    fn written(&self, step: &Step, out: usize) -> Vec<usize> {
        let Storage::Cached(first) = self.tensors[out].place else {
            return vec![out];
        };
        let kernels = step.dispatch.entries().iter();
        let kernels = kernels.filter_map(|entry| self.kernels.get(entry.choice));
        let n = kernels.filter_map(|kernel| self.n_appended(kernel, first));
        let caches = first..first.saturating_add(n.max().unwrap_or(1));
        let is_one =
            |place: &Storage| matches!(place, Storage::Cached(cache) if caches.contains(cache));
        let tensors = self.tensors.iter().enumerate();
        let tensors = tensors.filter(|(_, tensor)| is_one(&tensor.place));
        tensors.map(|(index, _)| index).collect()
    }

    /// Returns the tables that are indexed by ids of the batch.
    pub(crate) fn tables(&self) -> impl Iterator<Item = Table> {
        let tables = self.kernels.iter().flat_map(|k| k.as_kernel().tables());
        tables.map(|(_, table)| table)
    }
}

/// Checks that a kernel can be generated and launched, and that it computes in the stored type.
pub(crate) fn check_kernel(kernel: &dyn Kernel, stored: DType) -> Result<(), String> {
    kernel.validate()?;
    match kernel.dtype() {
        Some(dtype) if dtype != stored => {
            Err(format!("it computes in {dtype}, the program in {stored}"))
        }
        Some(_) | None => Ok(()),
    }
}

/// Checks that a kernel is launched only for sequences within its limit.
fn check_limit(step: &Step, batches: Batches, kernel: &KernelSpec) -> Result<(), String> {
    let Some(max_len) = kernel.as_kernel().max_len() else {
        return Ok(());
    };
    let is_within = |interval: Interval| interval.up_to.is_some_and(|most| most <= max_len.into());
    let is_limited = step.max_longest.is_some_and(|most| most <= max_len.into());
    // A sequence has at most as many tokens as the batch.
    let by_tokens = step.is_over_tokens() && is_within(batches.rows);
    match is_limited || by_tokens || is_within(batches.longest) {
        true => Ok(()),
        false => Err(format!(
            "launches a kernel for sequences longer than its limit of {max_len} tokens"
        )),
    }
}
