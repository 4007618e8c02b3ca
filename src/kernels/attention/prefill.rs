//! Attention of new tokens to the keys of their sequence in a KV cache, many of them at once.

use serde::{Deserialize, Serialize};

use super::{
    Attending, AttentionError, ByDistance, HeadView, Keys, MhaCached, MhaOnline, view::usual_scale,
};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance, cache::BLOCK,
    },
    machine::Machine,
    tensor::{DType, Extents},
};

/// Attention to a KV cache by tiles of queries, in f16 or bf16: [`MhaOnline`] with its keys and values gathered by their slots.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaPrefill {
    /// The same attention by the plain kernel, which is its definition.
    pub plain: MhaCached,
}

impl MhaPrefill {
    /// Whether the kernel can be generated as described.
    pub fn check(&self) -> Result<(), AttentionError> {
        self.plain.check()?;
        match self.plain.dtype {
            DType::F16 | DType::BF16 => Ok(()),
            dtype => Err(AttentionError::PrefillStorage { dtype }),
        }
    }

    /// The tiling is that of causal attention to the batch's own keys, also where keys are a source's: with more queries to a
    /// warp their slots would spill.
    fn online(&self) -> MhaOnline {
        let MhaCached {
            heads,
            kv_heads,
            head,
            scale,
            by,
            q,
            ..
        } = self.plain;
        // Where a cache has a head's rows: in blocks, whose rows follow each other.
        let cached = HeadView::TokenMajor {
            offset: 0,
            stride: kv_heads * head,
        };
        MhaOnline {
            of: Attending {
                heads,
                kv_heads,
                head,
                scale,
                causal: true,
                by,
                q,
                k: cached,
                v: cached,
            },
            dtype: self.plain.dtype,
        }
    }
}

impl Kernel for MhaPrefill {
    fn symbol(&self) -> String {
        let plain = self.plain.symbol();
        let plain = plain
            .strip_prefix("mha_cached")
            .or(plain.strip_prefix("mha"));
        let plain = plain.unwrap_or_default();
        format!("mha_prefill{plain}")
    }

    fn template(&self) -> &'static str {
        "mha_prefill"
    }

    fn constants(&self) -> Constants {
        let mut constants = self.online().constants();
        constants.retain(|name, _| !name.starts_with("k_") && !name.starts_with("v_"));
        constants.extend(Constants::from([
            ("causal", (self.plain.keys == Keys::Own).into()),
            ("k_aligned", true.into()),
            ("v_aligned", true.into()),
            ("group", (self.plain.heads / self.plain.kv_heads).into()),
            ("block", BLOCK.into()),
            ("stride", self.plain.stride.into()),
        ]));
        constants
    }

    fn params(&self) -> Vec<Param> {
        self.plain.params()
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        self.online().launch(extents, machine)
    }

    fn threads(&self) -> u32 {
        self.online().threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.plain.reference(extents, reads)
    }

    /// Besides the plain kernel's, lengths and pasts around the edges of tiles.
    fn cases(&self) -> Vec<Case> {
        let of = |name, lens: &[u32], cached: &[u32]| Case {
            cached: cached.to_vec(),
            ..Case::new(name, lens)
        };
        let mut cases = self.plain.cases();
        if self.plain.keys == Keys::Source {
            cases.push(Case {
                sources: vec![1, 63, 64, 65, 128, 500],
                ..Case::new("edges", &[65, 17, 64, 1, 130, 16])
            });
            return cases;
        }
        cases.push(of(
            "edges",
            &[15, 16, 17, 63, 64, 65, 1, 128],
            &[1, 0, 63, 64, 65, 31, 129, 127],
        ));
        cases.push(of("long", &[200, 1, 70], &[1000, 300, 0]));
        cases
    }

    fn tolerance(&self) -> Tolerance {
        super::operands::tolerance(self.plain.dtype)
    }
}

/// Every tiling, with and without groups, and heads whose rows are filled up for MMAs.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut all = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for (heads, kv_heads, head) in [
            (12, 12, 64),
            (16, 8, 128),
            (6, 1, 40),
            (6, 3, 96),
            (4, 2, 80),
            (3, 3, 256),
        ] {
            let plain = MhaCached {
                heads,
                kv_heads,
                head,
                scale: usual_scale(head),
                q: HeadView::TokenMajor {
                    offset: 0,
                    stride: (heads + 2 * kv_heads) * head,
                },
                keys: Keys::Own,
                by: ByDistance::default(),
                // Keys and values of one layer.
                stride: u64::from(2 * kv_heads * head * BLOCK),
                dtype,
            };
            if [64, 80].contains(&head) {
                let all_by = plain.by_distance();
                all.extend(all_by.map(|plain| MhaPrefill { plain }.into()));
            }
            if kv_heads == heads {
                let plain = MhaCached {
                    keys: Keys::Source,
                    ..plain.clone()
                };
                all.push(MhaPrefill { plain }.into());
            }
            all.push(MhaPrefill { plain }.into());
        }
    }
    all
}
