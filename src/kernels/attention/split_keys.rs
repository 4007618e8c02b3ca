//! Attention for few tokens: the warps of a CTA split the keys of a small query tile.

use serde::{Deserialize, Serialize};

use super::{AttentionError, MhaOnline, common::edge_cases, storage, view::scale_log2};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance, f32_literal,
        limits,
    },
    machine::Machine,
    ops::{AttentionProblem, HeadView, default_scale},
    tensor::{DType, Extents, Size},
};

/// Fused attention of sequences of at most [`MhaSplitKeys::MAX_LEN`] tokens, in f16 or bf16, for batches of few tokens. The operands are
/// those of [`super::MhaShort`], as columns of `[tokens, stride]` tensors.
///
/// The keys are split among the warps of a CTA, as FlashDecoding splits them among CTAs. Each warp computes softmax and output over its
/// keys, relative to the row maximum of these keys. The partial outputs are then rescaled to the common row maximum and added.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaSplitKeys {
    /// The kernel for the same attention and sequences of any length. It defines the result.
    pub plain: MhaOnline,
}

/// Number of queries per CTA. The number of keys per warp is the same.
const ROWS: u32 = 16;
const WARPS: u32 = 4;

impl MhaSplitKeys {
    /// Max sequence length. It is limited because all keys are in registers at once. In measurements, a variant for twice the length, with
    /// two key steps per warp, was slower than the WGMMA kernel.
    pub const MAX_LEN: u32 = WARPS * ROWS;

    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), AttentionError> {
        let MhaOnline { of, dtype } = self.plain;
        let head = of.head;
        self.plain.check()?;
        if !of.is_full() {
            return Err(AttentionError::Full {
                kernel: "split-keys",
            });
        }
        if !matches!(head, 32 | 64) {
            return Err(AttentionError::SplitHead { head });
        }
        if !dtype.has_mma() {
            return Err(AttentionError::SplitStorage { dtype });
        }
        let mut views = of.operands().into_iter();
        match views.find(|(_, view, _)| *view == HeadView::HeadMajor) {
            Some((operand, _, _)) => Err(AttentionError::SplitView { operand }),
            None => Ok(()),
        }
    }
}

impl Kernel for MhaSplitKeys {
    facts! { template: "mha_split_keys", dtype: self.plain.dtype, class: Attention }

    fn symbol(&self) -> String {
        let operands = self.plain.operands();
        let (heads, suffix) = (operands.heads(), operands.suffix());
        format!("mha_split_keys_{}_{heads}{suffix}", self.plain.dtype)
    }

    fn constants(&self) -> Constants {
        let AttentionProblem {
            heads,
            head,
            scale,
            by,
            q,
            k,
            v,
            ..
        } = self.plain.of;
        let dtype = self.plain.dtype;
        Constants::from([
            ("storage", storage(dtype).into()),
            ("heads", heads.into()),
            ("head", head.into()),
            ("cached", false.into()),
            ("sinks", by.sinks.into()),
            ("scale_log2", f32_literal(scale_log2(scale)).into()),
            ("out_stride", (heads * head).into()),
            ("q_column", q.column().into()),
            ("k_column", k.column().into()),
            ("v_column", v.column().into()),
            ("q_stride", q.stride(head).into()),
            ("k_stride", k.stride(head).into()),
            ("v_stride", v.stride(head).into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        self.plain.params()
    }

    fn flop(&self) -> Size {
        self.plain.flop()
    }

    fn max_len(&self) -> Option<u32> {
        Some(Self::MAX_LEN)
    }

    fn validate(&self) -> Result<(), String> {
        limits::attention(&self.plain.of)?;
        self.check().map_err(|e| e.to_string())
    }

    /// Returns a launch with one CTA per tile index and head. Tile indices are as in `Tiling::launch`. The head index varies fastest.
    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let tiles = extents.tokens / u64::from(ROWS) + extents.batch;
        Launch::of_ctas(
            tiles.saturating_mul(self.plain.of.heads.into()),
            self.threads(),
            0,
        )
    }

    fn threads(&self) -> u32 {
        WARPS * 32
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.plain.reference(extents, reads)
    }

    /// Returns the edge cases, and single sequences with lengths around the boundaries of MMAs and warps. The kernel is mainly used for
    /// single sequences. Lengths that the kernel does not support are removed.
    fn cases(&self) -> Vec<Case> {
        let mut cases = edge_cases();
        for length in [5, 8, 16, 17, 33, 40, 48, 63, 64] {
            cases.push(Case::new("one", &[length]));
        }
        cases.push(Case::new("longest", &[64, 1, 63, 17, 64]));
        for case in &mut cases {
            case.lens.retain(|&n| n > 0 && n <= Self::MAX_LEN);
        }
        cases.retain(|case| !case.lens.is_empty());
        cases
    }

    fn tolerance(&self) -> Tolerance {
        self.plain.tolerance()
    }
}

/// Instances with both head sizes in both storage types, with Q, K, V merged in one tensor and in separate tensors.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut all = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for (heads, head, merged) in [
            (12, 64, true),
            (12, 32, true),
            (3, 64, false),
            (5, 32, false),
        ] {
            let column = |i| match merged {
                true => HeadView::TokenMajor {
                    offset: i * heads * head,
                    stride: 3 * heads * head,
                },
                false => HeadView::TokenMajor {
                    offset: 0,
                    stride: heads * head,
                },
            };
            let scale = if merged { default_scale(head) } else { 1.0 };
            let of = AttentionProblem::full(heads, head, scale, [0, 1, 2].map(column));
            let plain = MhaOnline { of, dtype };
            all.push(KernelSpec::from(MhaSplitKeys { plain }));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(head: u32) -> MhaSplitKeys {
        let column = |i: u32| HeadView::TokenMajor {
            offset: i * 12 * head,
            stride: 36 * head,
        };
        let plain = MhaOnline {
            of: AttentionProblem::full(12, head, default_scale(head), [0, 1, 2].map(column)),
            dtype: DType::F16,
        };
        MhaSplitKeys { plain }
    }

    #[test]
    fn a_grid_has_one_cta_per_head_and_16_queries() {
        let blocks = |lens: &[u32]| {
            let extents = Extents::of(lens).expect("a batch");
            kernel(64)
                .launch(&extents, &crate::machine::testing::hopper())
                .grid
        };
        assert_eq!(blocks(&[1]), [12, 1, 1]);
        assert_eq!(blocks(&[64]), [12 * 5, 1, 1]);
        assert_eq!(blocks(&[17, 15, 1]), [12 * (2 + 3), 1, 1]);
    }

    #[test]
    fn no_case_has_a_sequence_longer_than_the_max() {
        let cases = kernel(32).cases();
        let longest = cases.iter().flat_map(|case| &case.lens).max();
        assert_eq!(longest, Some(&MhaSplitKeys::MAX_LEN));
    }

    #[test]
    fn unsupported_kernels_are_rejected_with_a_reason() {
        assert_eq!(kernel(64).check(), Ok(()));
        assert_eq!(
            kernel(96).check(),
            Err(AttentionError::SplitHead { head: 96 })
        );
        let dtype = DType::F32;
        let mut full = kernel(32);
        full.plain.dtype = dtype;
        assert_eq!(full.check(), Err(AttentionError::SplitStorage { dtype }));
        let mut apart = kernel(32);
        apart.plain.of.k = HeadView::HeadMajor;
        let operand = "k";
        assert_eq!(apart.check(), Err(AttentionError::SplitView { operand }));
    }
}
