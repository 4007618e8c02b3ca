use super::{super::position_bias, MhaTile, MhaWgmma};
use crate::{
    kernels::KernelSpec,
    ops::{AttentionProblem, HeadView, PositionBias, default_scale},
    tensor::DType,
};

/// Instances with every tile of every head size in both storage types, with Q, K, V merged in one tensor and in separate tensors.
pub(in crate::kernels::attention) fn representative() -> Vec<KernelSpec> {
    let mut all = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for (heads, kv_heads, head, causal) in [
            (12, 12, 32, false),
            (12, 12, 64, false),
            (5, 5, 96, false),
            (2, 2, 128, false),
            (3, 3, 256, false),
            (3, 1, 32, true),
            (4, 2, 64, true),
            (5, 5, 96, true),
            (6, 2, 128, true),
            (4, 1, 256, true),
        ] {
            let stride = (heads + 2 * kv_heads) * head;
            let column = |offset| HeadView::TokenMajor { offset, stride };
            let of = AttentionProblem {
                heads,
                kv_heads,
                head,
                scale: default_scale(head),
                causal,
                by: PositionBias::default(),
                q: column(0),
                k: column(heads * head),
                v: column((heads + kv_heads) * head),
            };
            // A window that hides whole key tiles from a warpgroup, and a window that is longer than a key tile.
            let window = match dtype {
                DType::BF16 => 37,
                DType::F16 | DType::F32 => 300,
            };
            for window in [None, Some(window)] {
                let by = PositionBias { window, ..of.by };
                let of = AttentionProblem { by, ..of };
                let tiles = MhaTile::candidates(head).iter();
                all.extend(tiles.map(|&tile| KernelSpec::from(MhaWgmma { of, dtype, tile })));
            }
        }
        // The examples without causal masking: a bias, a window, a window with a bias, and a window with a cap.
        for (heads, head) in [(12, 64), (2, 128), (3, 256), (12, 32), (5, 96)] {
            let column = |i| HeadView::TokenMajor {
                offset: i * heads * head,
                stride: 3 * heads * head,
            };
            let full =
                AttentionProblem::full(heads, head, default_scale(head), [0, 1, 2].map(column));
            for (_, by) in position_bias::examples()
                .into_iter()
                .filter(|(causal, _)| !causal)
            {
                // For these head sizes, kernels differ from those for other sizes only in their tiles, so the example with a window and a
                // bias is sufficient.
                if (head % 64 != 0 || head == 256) && by.window.is_some() != by.bias.is_some() {
                    continue;
                }
                let of = AttentionProblem { by, ..full };
                let tile = MhaTile::for_adjusted_scores(head);
                all.extend(tile.map(|tile| KernelSpec::from(MhaWgmma { of, dtype, tile })));
            }
        }
        let (heads, head) = (3, 64);
        let plain = HeadView::TokenMajor {
            offset: 0,
            stride: heads * head,
        };
        all.push(KernelSpec::from(MhaWgmma {
            of: AttentionProblem::full(heads, head, 1.0, [plain; 3]),
            dtype,
            tile: MhaTile::candidates(head)[0],
        }));
    }
    all
}
