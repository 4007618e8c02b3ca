//! Distribution of rows of logits over CTAs, and the results that the kernels write for groups of tokens.

use super::DeviceSamplingParams;
use crate::{
    kernels::{
        Constants, Launch, Param,
        rows::{rows_by, storage, vector_width, write},
    },
    machine::Machine,
    search::greedy,
    tensor::{DType, Element, Symbol},
};

/// Max number of token groups per row.
pub(in crate::kernels) const MAX_GROUPS: u32 = 1024;
/// Max number of CTAs per row: a row has at most 1024 token groups, and a CTA has at least the 32 groups of one warp.
const MAX_CTAS: u64 = 32;
/// Max number of candidate tokens that the sampling kernel keeps in shared memory. More candidates need further passes over the row.
pub(in crate::kernels) const MOST_CANDIDATES: u32 = 1024;

/// Rows of logits, each read by one or more CTAs. A pack is the elements of one vector access. Each lane of a warp reads one *group* of
/// tokens, which consists of every 32nd pack.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct LogitRows {
    pub(in crate::kernels) vocabulary: u32,
    pub(in crate::kernels) dtype: DType,
}

impl LogitRows {
    /// Logits per access.
    fn vector(self) -> u32 {
        vector_width(self.dtype, &[self.vocabulary])
    }

    /// Number of packs of a group.
    fn packs(self) -> u32 {
        self.vocabulary.div_ceil(MAX_GROUPS * self.vector())
    }

    /// Number of pieces of a row. A piece consists of the groups of one warp.
    fn pieces(self) -> u32 {
        self.vocabulary.div_ceil(32 * self.packs() * self.vector())
    }

    pub(in crate::kernels) fn constants(self) -> Constants {
        Constants::from([
            ("storage", storage(self.dtype)),
            ("vocabulary", self.vocabulary.into()),
            ("vector", self.vector().into()),
            ("packs", self.packs().into()),
            ("most_groups", MAX_GROUPS.into()),
            ("most_candidates", MOST_CANDIDATES.into()),
            ("width", DeviceSamplingParams::WIDTH.into()),
        ])
    }

    /// Returns a launch of at most `ctas_per_sm` CTAs per SM, but at least one CTA per row.
    pub(in crate::kernels) fn launch(
        self,
        rows: u64,
        threads: u32,
        ctas_per_sm: u64,
        machine: &Machine,
    ) -> Launch {
        let rows = rows.max(1);
        let of_row = (ctas_per_sm * u64::from(machine.sms) / rows).clamp(1, MAX_CTAS) as u32;
        Launch {
            grid: [of_row.min(self.pieces()), rows as u32, 1],
            threads,
            // Two bitmaps with a bit for each token of the vocabulary.
            shared_bytes: 2 * 4 * self.vocabulary.div_ceil(32),
        }
    }

    /// Returns up to three results for each group of a row:
    ///
    /// - the best token after the rules,
    /// - if `temperature` is given, the sum of `exp((logit − best) / temperature)` over the allowed tokens, where `best` is the logit of
    ///   the best token,
    /// - if `logs` is true, the max logit before the rules, and the sum of the exponentials of the logits relative to this max.
    pub(in crate::kernels) fn groups(
        self,
        logits: &[f32],
        ruled: &[f32],
        temperature: Option<f32>,
        logs: bool,
    ) -> Groups {
        let mut all = Groups::none();
        let (n, packs) = (self.vector() as usize, self.packs() as usize);
        for group in 0..32 * self.pieces() as usize {
            let first = |pack: usize| (group / 32 * packs + pack) * 32 * n + group % 32 * n;
            let ids = (0..packs).flat_map(|pack| first(pack)..first(pack) + n);
            let ids: Vec<usize> = ids.filter(|&id| id < logits.len()).collect();
            if ids.is_empty() {
                all.best[group] = 0;
                continue;
            }
            let of = |row: &[f32]| -> Vec<f32> { ids.iter().map(|&id| row[id]).collect() };
            let (ruled, raw) = (&of(ruled), &of(logits));
            let at = greedy(ruled) as usize;
            let top = ruled[at];
            let id = ids[at] as u32;
            all.best[group] = (u64::from(key_of(top)) << 32 | u64::from(!id)) as i64;
            if let Some(temperature) = temperature {
                let scaled = |x: f32| x / temperature;
                let exps = ruled.iter().filter(|x| **x > f32::NEG_INFINITY);
                let exps = exps.map(|&x| f64::from(scaled(x) - scaled(top)).exp());
                all.sum[group] = exps.sum::<f64>() as f32;
            }
            if logs {
                let top = raw.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let exps = raw.iter().map(|&x| f64::from(x - top).exp());
                all.raw[2 * group] = top;
                all.raw[2 * group + 1] = exps.sum::<f64>() as f32;
            }
        }
        all
    }
}

/// Results for the groups of a row. Elements that the kernel does not write are −1 (integers) or NaN (floats).
pub(in crate::kernels) struct Groups {
    pub(in crate::kernels) best: Vec<i64>,
    pub(in crate::kernels) sum: Vec<f32>,
    pub(in crate::kernels) raw: Vec<f32>,
}

impl Groups {
    pub(in crate::kernels) fn none() -> Self {
        let n = MAX_GROUPS as usize;
        Self {
            best: vec![-1; n],
            sum: vec![f32::NAN; n],
            raw: vec![f32::NAN; 2 * n],
        }
    }
}

/// Converts `x` to an integer. The integers of two floats have the same order as the floats. −0 and 0 have the same integer.
fn key_of(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    bits ^ (((bits as i32) >> 31) as u32 | 0x8000_0000)
}

pub(in crate::kernels) fn best_of_group() -> Param {
    write(
        "best_of_group",
        Element::I64,
        rows_by(Symbol::Batch, MAX_GROUPS),
    )
}

pub(in crate::kernels) fn sum_of_group() -> Param {
    write(
        "sum_of_group",
        DType::F32,
        rows_by(Symbol::Batch, MAX_GROUPS),
    )
}

pub(in crate::kernels) fn raw_of_group() -> Param {
    write(
        "raw_of_group",
        DType::F32,
        rows_by(Symbol::Batch, 2 * MAX_GROUPS),
    )
}
