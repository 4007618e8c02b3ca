//! Prefill attention: many new tokens attend to their sequences' keys in a KV cache.

use serde::{Deserialize, Serialize};

use super::{AttentionError, Keys, MhaCached, MhaOnline, MhaTile, MhaWgmma, wgmma::Origin};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, TensorMap,
        Tolerance,
        cache::{BLOCK, Pool},
    },
    machine::Machine,
    ops::{AttentionProblem, HeadView, PositionBias, default_scale},
    tensor::{DType, Extents, Size},
};

/// Attention to a KV cache, with activations in f16 or bf16. A CTA computes tiles of queries, for which it gathers keys and values by slot.
/// The kernel is based on [`MhaOnline`], or on [`MhaWgmma`] for Hopper.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaPrefill {
    /// The plain kernel for the same attention. It defines the result.
    pub plain: MhaCached,
    /// Persistent tile of the Hopper kernel; `None` for the kernel that runs on any GPU.
    pub tile: Option<MhaTile>,
}

impl MhaPrefill {
    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), AttentionError> {
        self.plain.check()?;
        match self.plain.dtype {
            DType::F16 | DType::BF16 => (),
            dtype => return Err(AttentionError::PrefillStorage { dtype }),
        }
        match self.tile {
            Some(tile) => {
                let tiles = MhaTile::gathering(self.plain.head);
                MhaWgmma::check_tile(&self.attending(), tile, tiles)
            }
            None => Ok(()),
        }
    }

    /// Returns the attention problem with keys and values in the layout of a cache block.
    fn attending(&self) -> AttentionProblem {
        let MhaCached {
            heads,
            kv_heads,
            head,
            scale,
            by,
            q,
            ..
        } = self.plain;
        // The keys of a head are contiguous within a cache block, and so are its values.
        let cached = HeadView::TokenMajor {
            offset: 0,
            stride: kv_heads * head,
        };
        AttentionProblem {
            heads,
            kv_heads,
            head,
            scale,
            causal: self.plain.keys == Keys::Own,
            by,
            q,
            k: cached,
            v: cached,
        }
    }

    /// Returns the online kernel whose tiling this kernel uses. It is causal even with [`Keys::Source`]: without a causal mask, the tiling
    /// would have more queries per warp, and the registers that hold the slots of keys would spill.
    fn online(&self) -> MhaOnline {
        MhaOnline {
            of: AttentionProblem {
                causal: true,
                ..self.attending()
            },
            dtype: self.plain.dtype,
        }
    }
}

impl Kernel for MhaPrefill {
    facts! { dtype: self.plain.dtype, class: Attention }

    fn symbol(&self) -> String {
        let plain = self.plain.symbol();
        let plain = plain
            .strip_prefix("mha_cached")
            .or(plain.strip_prefix("mha"));
        let plain = plain.unwrap_or_default();
        match self.tile {
            Some(tile) => format!("mha_prefill{plain}_{}", tile.name()),
            None => format!("mha_prefill{plain}"),
        }
    }

    fn template(&self) -> &'static str {
        match self.tile {
            Some(_) => "mha_wgmma_persistent",
            None => "mha_prefill",
        }
    }

    fn instructions(&self) -> Instructions {
        match self.tile {
            Some(_) => Instructions::Hopper,
            None => Instructions::Ampere,
        }
    }

    fn constants(&self) -> Constants {
        if let Some(tile) = self.tile {
            let mut constants = tile.constants(&self.attending(), self.plain.dtype, Origin::Cache);
            constants.extend([
                ("block", BLOCK.into()),
                ("stride", self.plain.pool.stride.into()),
                ("e4m3", self.plain.pool.is_e4m3().into()),
                ("scaled", self.plain.pool.scaled.into()),
            ]);
            if self.plain.pool.scaled {
                constants.insert("score_scale", "scale_log2".into());
            }
            return constants;
        }
        let mut constants = self.online().constants();
        constants.retain(|name, _| !name.starts_with("k_") && !name.starts_with("v_"));
        constants.extend(Constants::from([
            ("causal", (self.plain.keys == Keys::Own).into()),
            ("k_aligned", true.into()),
            ("v_aligned", true.into()),
            ("group", (self.plain.heads / self.plain.kv_heads).into()),
            ("block", BLOCK.into()),
            ("stride", self.plain.pool.stride.into()),
            ("e4m3", self.plain.pool.is_e4m3().into()),
            ("scaled", self.plain.pool.scaled.into()),
        ]));
        constants
    }

    fn params(&self) -> Vec<Param> {
        self.plain.params()
    }

    fn tensor_maps(&self) -> Vec<TensorMap> {
        let map = |_| MhaTile::query_map(self.plain.head);
        self.tile.map(map).into_iter().collect()
    }

    fn flop(&self) -> Size {
        self.plain.flop()
    }

    fn validate(&self) -> Result<(), String> {
        self.plain.check_sizes()?;
        self.check().map_err(|e| e.to_string())
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        match self.tile {
            Some(tile) => tile.launch(&self.attending(), extents, machine),
            None => self.online().launch(extents, machine),
        }
    }

    fn threads(&self) -> u32 {
        match self.tile {
            Some(tile) => tile.threads(),
            None => self.online().threads(),
        }
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.plain.reference(extents, reads)
    }

    /// Returns the cases of the plain kernel, and cases with lengths and cached lengths around tile boundaries.
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

/// Returns the kernels that compute the attention of `plain`: the prefill kernel for any GPU, and a prefill kernel for Hopper with each
/// tile.
fn of_tiles(plain: MhaCached) -> impl Iterator<Item = KernelSpec> {
    let tiles = MhaTile::gathering(plain.head).iter().copied().map(Some);
    let with = move |tile| MhaPrefill {
        plain: plain.clone(),
        tile,
    };
    [None]
        .into_iter()
        .chain(tiles)
        .map(with)
        .map(KernelSpec::from)
}

/// Instances of every tiling, with and without key heads that several query heads share, and with head sizes that are padded for MMAs.
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
                scale: default_scale(head),
                q: HeadView::TokenMajor {
                    offset: 0,
                    stride: (heads + 2 * kv_heads) * head,
                },
                keys: Keys::Own,
                by: PositionBias::default(),
                pool: Pool::of_layer(kv_heads, head, dtype),
                dtype,
            };
            if [64, 80].contains(&head) {
                let all_by = plain.by_distance();
                all.extend(all_by.map(|plain| MhaPrefill { plain, tile: None }.into()));
            }
            if head == 256 {
                let capped = plain.by_distance().filter(|plain| plain.by.cap.is_some());
                all.extend(capped.map(|plain| MhaPrefill { plain, tile: None }.into()));
            }
            let (e4m3, scaled) = (plain.in_e4m3(), plain.scaled());
            if head == 80 {
                let capped = scaled.by_distance().filter(|plain| plain.by.cap.is_some());
                let all_by = e4m3.by_distance().chain(capped);
                all.extend(all_by.map(|plain| MhaPrefill { plain, tile: None }.into()));
            }
            // A window that is shorter than a tile, and a window that is longer.
            let window = Some(if dtype == DType::F16 { 300 } else { 37 });
            let by = PositionBias { window, ..plain.by };
            all.extend(MhaTile::gathering(head).iter().map(|&tile| {
                let plain = MhaCached {
                    by,
                    ..plain.clone()
                };
                let tile = Some(tile);
                MhaPrefill { plain, tile }.into()
            }));
            if kv_heads == heads {
                let source = |plain: &MhaCached| MhaCached {
                    keys: Keys::Source,
                    ..plain.clone()
                };
                all.extend(of_tiles(source(&plain)));
                all.extend(of_tiles(source(&e4m3)));
                all.extend(of_tiles(source(&scaled)));
            }
            all.extend(of_tiles(e4m3));
            all.extend(of_tiles(scaled));
            all.extend(of_tiles(plain));
        }
    }
    all
}
