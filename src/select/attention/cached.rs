//! Dispatch of attention to a KV cache. Decode steps (one new token per sequence) are dispatched by the number of sequences and, on Hopper,
//! also by the number of keys. In all other batches, at least one sequence has a piece: several new tokens, for example a prompt or a part
//! of it. These batches are dispatched by the length of the longest piece and, on Hopper, also by the numbers of tokens and keys.

use super::{Batches, Dispatch, Entry, Interval};
use crate::{
    kernels::{
        Instructions, KernelSpec,
        attention::{DecodeCtas, Keys, MhaCached, MhaDecode, MhaDecodeAppend, MhaPrefill, MhaTile},
    },
    machine::Machine,
    ops::HeadView,
};

/// Range of the max number of new tokens per sequence in a decode step: one token.
const STEPS: Interval = Interval::new(0, Some(1));
/// Range of the max number of new tokens per sequence in batches that are not decode steps: more than one token. Several new tokens of a
/// sequence are a piece.
const PIECES: Interval = Interval::new(1, None);

/// A problem of attention to a KV cache, given as the kernel that supports every shape and card.
#[derive(Clone, Debug, PartialEq)]
pub struct CachedAttention(pub MhaCached);

impl CachedAttention {
    /// Max number of new tokens per sequence for which the tiled kernel for any GPU is used on Hopper. Such short pieces fill the
    /// tiles of that kernel better than those of the Hopper kernel.
    const SHORT: u64 = 192;
    /// Tiles of 64 queries are used if there are at most `SMALL_QUARTERS / 4` such tiles per SM on average. For more queries,
    /// [`Self::long`] uses larger tiles.
    const SMALL_QUARTERS: u64 = 9;
    /// An SM may have several tiles of 64 queries only if the longest sequence has at least this number of key tiles. These key tiles have
    /// the size that belongs to the next larger query tile.
    const LONG: u64 = 4;

    /// Returns a dispatch by the longest sequence. Decode steps use a decode kernel, whose CTAs depend on the numbers of sequences and
    /// keys. Batches with several new tokens per sequence use kernels with tiles of queries. If only one of the two kinds of kernel
    /// supports the problem, it is used for all batches. If neither does, the plain kernel ([`MhaCached`]) is used.
    pub fn by_length(&self, machine: &Machine) -> Dispatch<KernelSpec> {
        let steps = self.steps(machine);
        let tiles = self.tiles(None);
        match (steps.is_empty(), tiles.check().is_ok()) {
            (true, false) => Dispatch::always(self.0.clone().into()),
            (true, true) => Dispatch::always(tiles.into()),
            (false, false) => steps,
            (false, true) => {
                let of_one = steps.entries().iter().map(|entry| Entry {
                    batches: Batches {
                        longest: STEPS,
                        ..entry.batches
                    },
                    choice: entry.choice.clone(),
                });
                let long = self.long(machine);
                let short = match long.is_empty() {
                    true => PIECES,
                    false => Interval::new(1, Some(Self::SHORT)),
                };
                let short = Entry {
                    batches: Batches::by_longest(short),
                    choice: tiles.into(),
                };
                Dispatch::of(of_one.chain([short]).chain(long).collect())
            }
        }
    }

    /// Returns two dispatches: one for decode steps, and one for several new tokens per sequence. The kernels for decode steps also append
    /// the key and the value of each token (columns of `x`) to the cache. The other kernels only attend, and a separate launch appends.
    /// Returns `None` if some decode step has no kernel that both appends and attends.
    pub fn appending(&self, machine: &Machine, x: HeadView) -> Option<[Dispatch<KernelSpec>; 2]> {
        let (mut steps, mut pieces) = (Vec::new(), Vec::new());
        for entry in self.by_length(machine).entries() {
            let part = |longest: Interval| Batches {
                longest: entry.batches.longest.within(longest),
                ..entry.batches
            };
            let (one, longer) = (part(STEPS), part(PIECES));
            if !one.is_empty() {
                let KernelSpec::MhaDecode(decode) = &entry.choice else {
                    return None;
                };
                let decode = decode.clone();
                let choice = MhaDecodeAppend { decode, x };
                choice.check().ok()?;
                steps.push(Entry {
                    batches: one,
                    choice: choice.into(),
                });
            }
            if !longer.is_empty() {
                pieces.push(Entry {
                    batches: longer,
                    choice: entry.choice.clone(),
                });
            }
        }
        Some([steps, pieces].map(Dispatch::of))
    }

    /// Returns one kernel for every batch, with a fixed number of splits. The order of operations in a row therefore does not depend on the
    /// batch.
    pub fn invariant(&self, machine: &Machine) -> Dispatch<KernelSpec> {
        let ctas = match machine.instructions {
            Instructions::Hopper => DecodeCtas::MEDIUM.split(MhaDecode::MOST_SPLITS),
            Instructions::Ampere | Instructions::Ada => DecodeCtas::SMALL,
        };
        Dispatch::always(match self.has_steps() {
            true => self.step(ctas).into(),
            false => self.0.clone().into(),
        })
    }

    /// Returns the dispatch of decode steps; empty if the decode kernel does not support the problem. Cards other than Hopper always use
    /// small CTAs. Hopper uses:
    ///
    /// - small CTAs if there is more than one CTA per SM,
    /// - otherwise, if there are too few keys to split, medium CTAs; large CTAs replace them if they have more warps and each warp of a
    ///   medium CTA would have more than two tiles of keys,
    /// - otherwise, clusters of eight CTAs, which split the keys, if the clusters of all tokens are resident at the same time,
    /// - otherwise, pairs of large CTAs if the pairs of all tokens are resident at the same time and have enough keys to split,
    /// - otherwise, large CTAs.
    fn steps(&self, machine: &Machine) -> Dispatch<KernelSpec> {
        let small = self.step(DecodeCtas::SMALL);
        if !self.has_steps() {
            return Dispatch::of(Vec::new());
        }
        if machine.instructions != Instructions::Hopper {
            return Dispatch::always(small.into());
        }
        let (medium, large) = (self.step(DecodeCtas::MEDIUM), self.step(DecodeCtas::LARGE));
        let cluster = self.step(DecodeCtas::MEDIUM.split(MhaDecode::MOST_SPLITS));
        let pair = self.step(DecodeCtas::LARGE.split(2));
        let of_token = u64::from(small.ctas_of_token());
        // An SM holds two CTAs of a cluster of eight, but only one CTA of a pair.
        let few = 2 * machine.clusters_at_once(cluster.ctas.splits) / of_token;
        let pairs = few.max(machine.clusters_at_once(pair.ctas.splits) / of_token);
        let most = pairs.max(u64::from(machine.sms) / of_token);
        let part = |rows: (u64, Option<u64>), keys: Interval, choice: MhaDecode| Entry {
            batches: Batches {
                rows: Interval::new(rows.0, rows.1),
                keys,
                ..Batches::ALL
            },
            choice: KernelSpec::from(choice),
        };
        // With a window, a token attends to at most the window's keys and its own key.
        let max_keys = self.0.by.window.map_or(u64::MAX, |w| u64::from(w) + 1);
        // Returns two ranges of numbers of keys: up to `limit`, and above it. The second range is empty if no token attends to more than
        // `limit` keys.
        let around = |limit: u64| {
            let below = (max_keys > limit).then_some(limit);
            let above = Interval::new(below.unwrap_or(u64::MAX), None);
            (Interval::new(0, below), above)
        };
        // The keys are split if the second CTA of a cluster has at least half as many keys as the first. With fewer keys, launching the
        // cluster takes longer than a single CTA needs for the keys.
        let (short, longer) = around(cluster.min_keys_of_cta() * 3 / 2);
        let (single, paired) = around(pair.min_keys_of_cta() * 3 / 2);
        let single = single.within(longer);
        let (few_keys, more_keys) = around(match large.keys_at_once() > medium.keys_at_once() {
            true => 2 * medium.keys_at_once(),
            false => u64::MAX,
        });
        let parts = vec![
            part((0, Some(most)), few_keys.within(short), medium),
            part((0, Some(most)), more_keys.within(short), large.clone()),
            part((0, Some(few)), longer, cluster),
            part((few, Some(pairs)), single, large.clone()),
            part((few, Some(pairs)), paired, pair),
            part((pairs, Some(most)), longer, large),
            part((most, None), Interval::ALL, small),
        ];
        let parts = parts.into_iter();
        Dispatch::of(parts.filter(|part| !part.batches.is_empty()).collect())
    }

    /// Returns the dispatch entries for batches whose longest piece has more than [`Self::SHORT`] tokens. The number of tiles per SM
    /// selects the kernel. Returns no entries on cards other than Hopper, or if the Hopper kernel does not support the problem.
    ///
    /// A tile of 64 queries takes less time per key tile than a larger tile, but more time per query. It shortens launches in which the
    /// tile with the max number of keys determines the time. Tiles of 64 queries are always used if there is at most one per SM. They are
    /// also used for up to `SMALL_QUARTERS / 4` tiles per SM if the tiles differ in their numbers of keys and the longest sequence has at
    /// least [`Self::LONG`] key tiles. The measurements are in docs/history/attention.md, section 86.
    fn long(&self, machine: &Machine) -> Vec<Entry<KernelSpec>> {
        let MhaCached {
            heads, head, pool, ..
        } = self.0;
        let kernels = MhaTile::gathering(head).iter().copied();
        let kernels = kernels.filter(|&tile| self.tiles(Some(tile)).check().is_ok());
        let kernels: Vec<MhaTile> = match machine.instructions {
            // Each tile converts its keys from E4M3, so tiles of 64 queries would convert the keys more often than larger tiles.
            Instructions::Hopper if pool.is_e4m3() && head < 256 => {
                kernels.filter(|tile| tile.rows > 64).collect()
            }
            Instructions::Hopper => kernels.collect(),
            Instructions::Ampere | Instructions::Ada => Vec::new(),
        };
        let part = |rows: (u64, Option<u64>), keys: Interval, tile: MhaTile| Entry {
            batches: Batches {
                rows: Interval::new(rows.0, rows.1),
                longest: Interval::new(Self::SHORT, None),
                keys,
            },
            choice: KernelSpec::from(self.tiles(Some(tile))),
        };
        // Max number of tokens with at most `quarters / 4` tiles per SM.
        let tokens_of = |tile: MhaTile, quarters: u64| {
            quarters * u64::from(machine.sms) * u64::from(tile.rows) / (4 * u64::from(heads))
        };
        let (mut parts, mut above) = (Vec::new(), 0);
        for (nth, &tile) in kernels.iter().enumerate().rev() {
            let Some(&larger) = nth.checked_sub(1).and_then(|nth| kernels.get(nth)) else {
                parts.push(part((above, None), Interval::ALL, tile));
                continue;
            };
            if tile.rows > 64 {
                let max_rows = tokens_of(larger, 4 * MhaTile::ROUNDS);
                parts.push(part((above, Some(max_rows)), Interval::ALL, tile));
                above = above.max(max_rows);
                continue;
            }
            let few_keys = Self::LONG * u64::from(larger.keys) - 1;
            let at_once = tokens_of(tile, 4);
            // With a window, or in cross-attention (`Keys::Source`), most tiles have the same number of keys. A second tile on an SM
            // would then double the time, so each SM gets at most one tile.
            let max_rows = match (self.0.keys, self.0.by.window) {
                (Keys::Own, None) => tokens_of(tile, Self::SMALL_QUARTERS),
                (Keys::Own, Some(_)) | (Keys::Source, _) => at_once,
            };
            parts.push(part((0, Some(at_once)), Interval::ALL, tile));
            parts.push(part(
                (at_once, Some(max_rows)),
                Interval::new(few_keys, None),
                tile,
            ));
            parts.push(part(
                (at_once, Some(max_rows)),
                Interval::new(0, Some(few_keys)),
                larger,
            ));
            above = max_rows;
        }
        parts.retain(|part| !part.batches.is_empty());
        parts
    }

    fn tiles(&self, tile: Option<MhaTile>) -> MhaPrefill {
        let plain = self.0.clone();
        MhaPrefill { plain, tile }
    }

    /// Returns whether the decode kernel supports the problem, with CTAs of any size.
    fn has_steps(&self) -> bool {
        self.step(DecodeCtas::SMALL).check().is_ok()
    }

    fn step(&self, ctas: DecodeCtas) -> MhaDecode {
        let plain = self.0.clone();
        MhaDecode { plain, ctas }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::tests::{shown, tile},
        *,
    };
    use crate::{
        kernels::cache::Pool,
        machine::testing,
        tensor::{DType, Format},
    };

    fn cached(head: u32, dtype: DType) -> CachedAttention {
        CachedAttention(MhaCached {
            keys: Keys::Own,
            by: Default::default(),
            heads: 12,
            kv_heads: 4,
            head,
            scale: 0.125,
            q: HeadView::TokenMajor {
                offset: 0,
                stride: 20 * head,
            },
            pool: Pool::of_layer(4, head, dtype),
            dtype,
        })
    }

    #[test]
    fn steps_split_the_keys_of_few_sequences_and_longer_pieces_use_tiles_of_queries() {
        let hopper = testing::hopper();
        // Each sequence has one CTA or one cluster for each of its four key heads. The max numbers of sequences are `most` with one CTA per
        // SM, `pairs` with clusters of two and one CTA per SM, and `few` with clusters of eight and two CTAs per SM.
        let most = u64::from(hopper.sms) / 4;
        let (pairs, few) = (
            hopper.clusters_at_once(2) / 4,
            2 * hopper.clusters_at_once(8) / 4,
        );
        let dispatch = cached(64, DType::F16).by_length(&hopper);
        assert_eq!(
            shown(&dispatch),
            [
                format!("rows up to {most}, longest up to 1, keys up to 256: mha_decode"),
                format!("rows up to {most}, longest up to 1, keys 257 to 768: mha_decode"),
                format!("rows up to {few}, longest up to 1, keys above 768: mha_decode"),
                format!(
                    "rows {} to {pairs}, longest up to 1, keys 769 to 1536: mha_decode",
                    few + 1
                ),
                format!(
                    "rows {} to {pairs}, longest up to 1, keys above 1536: mha_decode",
                    few + 1
                ),
                format!(
                    "rows {} to {most}, longest up to 1, keys above 768: mha_decode",
                    pairs + 1
                ),
                format!("rows above {most}, longest up to 1: mha_decode"),
                "longest 2 to 192: mha_prefill".to_owned(),
            ]
            .into_iter()
            .chain(long_of_64(None))
            .collect::<Vec<_>>()
        );
        assert_eq!(dispatch.overlap(), None);
        assert!(Batches::ALL.is_covered_by(&dispatch.covered()));
        let mut windowed = cached(64, DType::F16);
        windowed.0.by.window = Some(300);
        let dispatch = windowed.by_length(&hopper);
        let pieces = &shown(&dispatch)[3..];
        assert_eq!(pieces[0], "longest 2 to 192: mha_prefill");
        assert_eq!(pieces[1..], long_of_64(Some(300)));
        let steps = &shown(&dispatch)[..3];
        assert_eq!(
            steps,
            [
                format!("rows up to {most}, longest up to 1, keys up to 256: mha_decode"),
                format!("rows up to {most}, longest up to 1, keys above 256: mha_decode"),
                format!("rows above {most}, longest up to 1: mha_decode"),
            ]
        );
        assert!(Batches::ALL.is_covered_by(&dispatch.covered()));
        let usual = cached(64, DType::F16).by_length(&testing::usual());
        assert_eq!(
            shown(&usual),
            [
                "longest up to 1: mha_decode",
                "longest above 1: mha_prefill"
            ]
        );
        assert!(Batches::ALL.is_covered_by(&usual.covered()));
    }

    #[test]
    fn steps_append_to_the_cache_themselves_if_their_kernel_can() {
        let x = |head: u32| HeadView::TokenMajor {
            offset: 12 * head,
            stride: 20 * head,
        };
        let hopper = testing::hopper();
        let [steps, pieces] = cached(64, DType::F16)
            .appending(&hopper, x(64))
            .expect("both");
        let all = shown(&steps);
        assert_eq!(all.len(), 7);
        assert!(
            all.iter()
                .all(|line| line.contains("longest up to 1") && line.ends_with(": mha_decode"))
        );
        let pieces_of_64 = shown(&pieces);
        assert_eq!(pieces_of_64[0], "longest 2 to 192: mha_prefill");
        assert_eq!(pieces_of_64[1..], long_of_64(None));
        let covered = [steps.covered(), pieces.covered()].concat();
        assert!(Batches::ALL.is_covered_by(&covered));
        // In f32, one kernel serves any batch. A kernel that also appends to the cache exists only for decode steps.
        let usual = testing::usual();
        let [steps, pieces] = cached(64, DType::F32)
            .appending(&usual, x(64))
            .expect("both");
        assert_eq!(shown(&steps), ["longest up to 1: mha_decode"]);
        assert_eq!(shown(&pieces), ["longest above 1: mha_decode"]);
        assert!(cached(16, DType::F16).appending(&usual, x(16)).is_none());
        let unaligned = HeadView::TokenMajor {
            offset: 12 * 64 + 4,
            stride: 20 * 64 + 8,
        };
        assert!(
            cached(64, DType::F16)
                .appending(&usual, unaligned)
                .is_none()
        );
    }

    #[test]
    fn a_cache_in_e4m3_is_read_by_the_kernels_that_convert_it() {
        let stored = |head, dtype| {
            let mut problem = cached(head, dtype);
            problem.0.pool.format = Format::E4m3;
            problem
        };
        let hopper = testing::hopper();
        let all = shown(&stored(64, DType::F16).by_length(&hopper));
        assert!(all[..7].iter().all(|line| line.ends_with(": mha_decode")));
        let long = "longest above 192: mha_wgmma_persistent";
        assert_eq!(all[7..], ["longest 2 to 192: mha_prefill", long]);
        // With a cache in f16, a batch of only 200 tokens would use tiles of 64 queries for all head sizes.
        for (head, rows) in [(64, 192), (128, 128), (256, 64)] {
            let pieces = stored(head, DType::F16).by_length(&hopper);
            assert_eq!(tile(&pieces, 200, 200).rows, rows, "heads of {head}");
            assert!(Batches::ALL.is_covered_by(&pieces.covered()));
        }
        let x = HeadView::TokenMajor {
            offset: 12 * 64,
            stride: 20 * 64,
        };
        let [steps, pieces] = stored(64, DType::BF16)
            .appending(&testing::usual(), x)
            .expect("both");
        assert_eq!(shown(&steps), ["longest up to 1: mha_decode"]);
        assert_eq!(shown(&pieces), ["longest above 1: mha_prefill"]);
        let f32 = stored(64, DType::F32).by_length(&hopper);
        assert_eq!(shown(&f32), ["any batch: mha_cached"]);
    }

    #[test]
    fn unsupported_problems_use_another_kernel_for_caches() {
        let usual = testing::usual();
        let f32 = cached(64, DType::F32).by_length(&usual);
        assert_eq!(shown(&f32), ["any batch: mha_decode"]);
        let small = cached(16, DType::F16).by_length(&usual);
        assert_eq!(shown(&small), ["any batch: mha_prefill"]);
        let smaller = cached(16, DType::F32);
        for dispatch in [smaller.by_length(&usual), smaller.invariant(&usual)] {
            assert_eq!(shown(&dispatch), ["any batch: mha_cached"]);
        }
    }

    #[test]
    fn an_invariant_program_splits_the_keys_of_every_batch_equally() {
        for machine in [testing::usual(), testing::hopper()] {
            let one = cached(64, DType::F16).invariant(&machine);
            assert_eq!(shown(&one), ["any batch: mha_decode"]);
        }
    }

    /// Ranges of the Hopper kernel for 12 heads of 64.
    fn long_of_64(window: Option<u32>) -> Vec<String> {
        let sms = testing::hopper().sms;
        // Numbers of tokens with one tile of 64 queries per SM, and with 9 / 4 tiles per SM.
        let (at_once, max_rows) = (sms * 64 / 12, 9 * sms * 64 / (4 * 12));
        let of = |rows: String, keys: &str| {
            format!("rows {rows}, longest above 192{keys}: mha_wgmma_persistent")
        };
        match window {
            Some(_) => vec![
                of(format!("up to {at_once}"), ""),
                of(format!("above {at_once}"), ""),
            ],
            None => vec![
                of(format!("up to {at_once}"), ""),
                of(format!("{} to {max_rows}", at_once + 1), ", keys above 383"),
                of(format!("{} to {max_rows}", at_once + 1), ", keys up to 383"),
                of(format!("above {max_rows}"), ""),
            ],
        }
    }

    #[test]
    fn pieces_with_few_tiles_per_sm_use_finer_tiles() {
        let hopper = testing::hopper();
        let sms = u64::from(hopper.sms);
        // Number of tokens with one tile of 64 queries per SM, for 12 heads.
        let at_once = sms * 64 / 12;
        let max_rows = 9 * sms * 64 / (4 * 12);
        for (head, larger, key_tiles) in
            [(64, 192, 4 * 96), (128, 128, 4 * 128), (256, 128, 4 * 48)]
        {
            let pieces = cached(head, DType::F16).by_length(&hopper);
            assert_eq!(tile(&pieces, at_once, 193).rows, 64);
            assert_eq!(tile(&pieces, max_rows, key_tiles.max(193)).rows, 64);
            assert_eq!(u64::from(tile(&pieces, max_rows + 1, 1000).rows), larger);
            if key_tiles > 193 {
                let few_keys = tile(&pieces, at_once + 1, key_tiles - 1);
                assert_eq!(u64::from(few_keys.rows), larger);
            }
            assert_eq!(pieces.overlap(), None);
            assert!(Batches::ALL.is_covered_by(&pieces.covered()));
        }

        // The limit is four tiles of 192 rows per SM.
        let few = 4 * sms * 192 / 12;
        let pieces = cached(128, DType::F16).by_length(&hopper);
        assert_eq!(tile(&pieces, few, 512).rows, 128);
        assert_eq!(tile(&pieces, few + 1, 512).rows, 192);

        // With a window, all tiles of 64 queries run at once.
        let mut windowed = cached(64, DType::F16);
        windowed.0.by.window = Some(1000);
        let pieces = windowed.by_length(&hopper);
        assert_eq!(tile(&pieces, at_once, 512).rows, 64);
        assert_eq!(tile(&pieces, at_once + 1, 512).rows, 192);
    }
}
