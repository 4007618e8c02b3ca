//! Kernels that few steps of their kind launch: the first layer's or the last one's for few tokens.

use super::Lowering;
use crate::program::{Limit, Variant};

/// A step in so many that launch other variants is too few for a kernel to be compiled for it.
const RARE: usize = 10;

impl Lowering<'_> {
    /// Of variants that follow each other and are rare, the last serves for all, which it is no wrong kernel for: more
    /// rows are what it takes. Not where kernels were picked.
    pub(super) fn share_rare_kernels(&mut self) {
        if self.has_picked.get() {
            return;
        }
        let program = &mut self.program;
        // Steps that compute the same value for different batches are next to each other, and count as one.
        let mut uses = vec![0; program.kernels.len()];
        for of_value in program.steps.chunk_by(|a, b| a.name == b.name) {
            let variants = of_value.iter().flat_map(|step| &step.variants);
            let mut kernels: Vec<usize> = variants.map(|variant| variant.kernel).collect();
            kernels.sort_unstable();
            kernels.dedup();
            kernels.into_iter().for_each(|kernel| uses[kernel] += 1);
        }
        let mut used = vec![false; program.kernels.len()];
        for step in &mut program.steps {
            let most = step.variants.iter().map(|v| uses[v.kernel]).max();
            let is_rare = |v: &Variant| {
                let by_rows = matches!(v.limit, Some(Limit::Rows(_)));
                by_rows && Some(uses[v.kernel] * RARE) <= most
            };
            let rare: Vec<bool> = step.variants.iter().map(is_rare).collect();
            let mut at = 0;
            step.variants.retain(|_| {
                at += 1;
                !(rare[at - 1] && rare.get(at) == Some(&true))
            });
            for variant in &step.variants {
                used[variant.kernel] = true;
            }
        }
        // Where each kernel that is left comes among them.
        let places = used.iter().scan(0, |next, &used| {
            *next += usize::from(used);
            Some(*next - usize::from(used))
        });
        let places: Vec<usize> = places.collect();
        for variant in program.steps.iter_mut().flat_map(|s| &mut s.variants) {
            variant.kernel = places[variant.kernel];
        }
        let mut used = used.into_iter();
        program.kernels.retain(|_| used.next() == Some(true));
    }
}
