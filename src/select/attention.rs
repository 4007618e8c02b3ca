//! Dispatch of fused attention by the longest sequence.

use super::{Batches, Dispatch, Entry, Interval};
use crate::{
    kernels::{
        Instructions, KernelSpec,
        attention::{
            Attending, AttentionError, DecodeCtas, HeadView, MhaCached, MhaDecode, MhaDecodeAppend,
            MhaLongContext, MhaLongReduce, MhaLongScores, MhaOnline, MhaPrefill, MhaShort,
            MhaSplitKeys, MhaTile, MhaWgmma,
        },
        chain::Chain,
    },
    machine::Machine,
};

/// Maximum lengths of the short kernel besides the largest possible: a smaller maximum has fewer keys to load and to mask.
const SHORT_LENGTHS: [u32; 2] = [64, 128];

/// A fused attention problem, whichever kernel computes it, given by the kernel that serves every length and card.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention(pub MhaOnline);

impl Attention {
    /// Dispatches by the longest sequence, which has at most `longest` tokens. On Hopper, batches of few tokens have a kernel
    /// of their own.
    pub fn by_length(&self, machine: &Machine, longest: Option<u64>) -> Dispatch<KernelSpec> {
        let MhaOnline { of, dtype } = self.0;
        if !of.by.is_none()
            && let Ok(by_distance) = self.wgmma(machine)
        {
            return by_distance;
        }
        let tiles = MhaWgmma::tiles(&of, dtype, machine.instructions);
        let ranges: Vec<(Option<u64>, KernelSpec)> = match tiles {
            [] if !of.is_full() => vec![(None, self.0.clone().into())],
            [] => {
                let most = MhaShort::max_len_for(of.head, dtype);
                let lengths = SHORT_LENGTHS.into_iter().filter(|&length| length < most);
                let lengths = lengths.chain((most > 0).then_some(most));
                let short = lengths.map(|length| (Some(length.into()), self.short(length).into()));
                short.chain([(None, self.0.clone().into())]).collect()
            }
            _ => self.tiles_by_length(),
        };
        let dispatch = Dispatch::by_longest(
            within(ranges, longest)
                .into_iter()
                .map(|(up_to, k)| (up_to, Some(k))),
        );
        let dispatch = by_rounds(&dispatch, machine, of.heads);
        match self.for_few_tokens(machine) {
            Some(few) => with_few_tokens(dispatch, few),
            None => dispatch,
        }
    }

    /// One kernel for every length: the one for the longest.
    pub fn invariant(&self, machine: &Machine) -> Dispatch<KernelSpec> {
        let all = self.by_length(machine, None);
        let last = all.choices().last().cloned();
        Dispatch::always(last.unwrap_or_else(|| self.0.clone().into()))
    }

    /// The kernel with all keys of a sequence in shared memory, for sequences of at most `max_len` tokens.
    pub fn short(&self, max_len: u32) -> MhaShort {
        MhaShort::of(&self.0, max_len)
    }

    /// Kernels by warpgroup MMA, for any length, on Hopper.
    pub fn wgmma(&self, machine: &Machine) -> Result<Dispatch<KernelSpec>, AttentionError> {
        if machine.instructions != Instructions::Hopper {
            return Err(AttentionError::WarpgroupInstructions);
        }
        self.0.check()?;
        if !MhaWgmma::serves(&self.0.of) {
            return Err(AttentionError::WarpgroupMask);
        }
        let ranges = self.tiles_by_length();
        if ranges.is_empty() {
            return Err(AttentionError::WarpgroupHead {
                head: self.0.of.head,
            });
        }
        for (_, kernel) in &ranges {
            if let KernelSpec::MhaWgmma(kernel) = kernel {
                kernel.check()?;
            }
        }
        Ok(Dispatch::by_longest(
            ranges.into_iter().map(|(up_to, k)| (up_to, Some(k))),
        ))
    }

    /// Two grouped GEMMs with the softmax split between them. Each launch reads what the one before wrote, matched by the
    /// names of parameters.
    pub fn grouped(&self) -> Result<Chain, AttentionError> {
        let MhaOnline { of, dtype } = self.0;
        if !of.is_full() {
            return Err(AttentionError::Full { kernel: "grouped" });
        }
        let Attending {
            heads,
            head,
            scale,
            q,
            k,
            v,
            ..
        } = of;
        let scores = MhaLongScores {
            heads,
            head,
            scale,
            q,
            k,
            dtype,
        };
        let context = MhaLongContext {
            heads,
            head,
            v,
            dtype,
        };
        scores.check()?;
        context.check()?;
        let chain = Chain::of(scores).then(MhaLongReduce { heads }, &[]);
        Ok(chain.then(context, &[]))
    }

    fn tiles_by_length(&self) -> Vec<(Option<u64>, KernelSpec)> {
        let head = self.0.of.head;
        let tiles = match self.0.of.by.is_none() {
            true => MhaTile::by_length(head),
            false => MhaTile::for_distances(head)
                .map(|tile| (None, tile))
                .into_iter()
                .collect(),
        };
        tiles
            .into_iter()
            .map(|(up_to, tile)| (up_to, MhaWgmma::of(&self.0, tile).into()))
            .collect()
    }

    /// The kernel for batches of few tokens, where it was measured to be the fastest.
    fn for_few_tokens(&self, machine: &Machine) -> Option<MhaSplitKeys> {
        let few = MhaSplitKeys {
            plain: self.0.clone(),
        };
        let serves = machine.instructions == Instructions::Hopper && few.check().is_ok();
        serves.then_some(few)
    }
}

/// Batches in which every sequence has one token, and those with longer pieces.
const STEPS: Interval = Interval::new(0, Some(1));
const PIECES: Interval = Interval::new(1, None);

/// Attention to a KV cache, whichever kernel computes it, given by the kernel that serves every shape and card.
#[derive(Clone, Debug, PartialEq)]
pub struct CachedAttention(pub MhaCached);

impl CachedAttention {
    /// Keys of a sequence up to which a cluster of CTAs has no gain from the split: hardly more than one of them has any, and all of
    /// a cluster take longer to launch.
    const UNSPLIT: u64 = 512;

    /// New tokens of a sequence up to which its queries leave a tile of the kernel for Hopper emptier than one of the other's.
    const SHORT: u64 = 192;

    /// Steps of one token a sequence have a kernel that splits keys by the number of sequences, and longer pieces kernels by tiles
    /// of queries. Where the latter do not serve, the former computes any batch; where neither does, the plain one.
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
                let longer = |interval, choice: MhaPrefill| Entry {
                    batches: Batches::by_longest(interval),
                    choice: choice.into(),
                };
                let pieces = match self.long(machine) {
                    Some(long) => vec![
                        longer(Interval::new(1, Some(Self::SHORT)), tiles),
                        longer(Interval::new(Self::SHORT, None), long),
                    ],
                    None => vec![longer(PIECES, tiles)],
                };
                let all = Dispatch::of(of_one.chain(pieces).collect());
                by_rounds(&all, machine, self.0.heads)
            }
        }
    }

    /// The same, where the kernel of steps adds a token's key and value, columns of `x`, to the cache as well: the dispatch of steps,
    /// and that of longer pieces, before which another launch does. `None` where no kernel does both.
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

    /// One kernel for every batch, with one number of splits, so that a row is computed in one order whatever the batch.
    pub fn invariant(&self, machine: &Machine) -> Dispatch<KernelSpec> {
        let ctas = match machine.instructions {
            Instructions::Hopper => DecodeCtas::Cluster(MhaDecode::MOST_SPLITS),
            Instructions::Ampere => DecodeCtas::Small,
        };
        let kernel = self.step(ctas).map(KernelSpec::from);
        Dispatch::always(kernel.unwrap_or_else(|| self.0.clone().into()))
    }

    /// By the number of tokens, and on Hopper by keys; empty where the kernel does not serve. Clusters split the keys of few sequences,
    /// two CTAs for each SM. Large CTAs draw as much of the memory's bandwidth without a merge where there is at most one for each SM,
    /// and more tokens fill the SMs with small ones.
    fn steps(&self, machine: &Machine) -> Dispatch<KernelSpec> {
        use DecodeCtas::{Cluster, Large, Medium, Small};
        let all = [Small, Medium, Large, Cluster(MhaDecode::MOST_SPLITS)];
        let [Some(small), Some(medium), Some(large), Some(cluster)] = all.map(|c| self.step(c))
        else {
            return Dispatch::of(Vec::new());
        };
        if machine.instructions != Instructions::Hopper {
            return Dispatch::always(small.into());
        }
        let sms = u64::from(machine.sms);
        let of_token = u64::from(small.ctas_of_token());
        let few = 2 * sms / (of_token * u64::from(cluster.splits()));
        let most = sms / of_token;
        let part = |rows: (u64, Option<u64>), keys: Interval, choice: MhaDecode| Entry {
            batches: Batches {
                rows: Interval::new(rows.0, rows.1),
                keys,
                ..Batches::ALL
            },
            choice: KernelSpec::from(choice),
        };
        // Within a window no token attends to more keys.
        let most_keys = self.0.by.window.map_or(u64::MAX, u64::from);
        let unsplit = (most_keys >= Self::UNSPLIT).then_some(Self::UNSPLIT);
        let short = Interval::new(0, unsplit);
        let longer = Interval::new(unsplit.unwrap_or(u64::MAX), None);
        let parts = vec![
            part((0, Some(most)), short, medium),
            part((0, Some(few)), longer, cluster),
            part((few, Some(most)), longer, large),
            part((most, None), Interval::ALL, small),
        ];
        let parts = parts.into_iter();
        Dispatch::of(parts.filter(|part| !part.batches.is_empty()).collect())
    }

    /// The kernel for Hopper, where it serves.
    fn long(&self, machine: &Machine) -> Option<MhaPrefill> {
        let tile = *MhaTile::gathering(self.0.head).first()?;
        let long = self.tiles(Some(tile));
        let serves = machine.instructions == Instructions::Hopper && long.check().is_ok();
        serves.then_some(long)
    }

    fn tiles(&self, tile: Option<MhaTile>) -> MhaPrefill {
        let plain = self.0.clone();
        MhaPrefill { plain, tile }
    }

    fn step(&self, ctas: DecodeCtas) -> Option<MhaDecode> {
        let plain = self.0.clone();
        Some(MhaDecode { plain, ctas }).filter(|kernel| kernel.check().is_ok())
    }
}

/// Tiles of an SM up to which it takes the finer one, where there is one.
const ROUNDS: u64 = 4;

/// Divides the batches of a coarse tile: where they give each SM few of them, a finer one computes them.
fn by_rounds(
    dispatch: &Dispatch<KernelSpec>,
    machine: &Machine,
    heads: u32,
) -> Dispatch<KernelSpec> {
    let finer = |kernel: &KernelSpec| -> Option<(u32, KernelSpec)> {
        match kernel {
            KernelSpec::MhaWgmma(k) => {
                let tile = k.tile.finer(k.of.head)?;
                Some((k.tile.rows, MhaWgmma { tile, ..k.clone() }.into()))
            }
            KernelSpec::MhaPrefill(k) => {
                let (plain, coarse) = (k.plain.clone(), k.tile?);
                let tile = Some(coarse.finer(plain.head)?);
                Some((coarse.rows, MhaPrefill { plain, tile }.into()))
            }
            _ => None,
        }
    };
    let parts = dispatch.entries().iter().flat_map(|entry| {
        let Some((rows, choice)) = finer(&entry.choice) else {
            return vec![entry.clone()];
        };
        let most = ROUNDS * u64::from(machine.sms) * u64::from(rows) / u64::from(heads);
        let of = |rows, choice| Entry {
            batches: Batches {
                rows,
                ..entry.batches
            },
            choice,
        };
        vec![
            of(Interval::new(0, Some(most)), choice),
            of(Interval::new(most, None), entry.choice.clone()),
        ]
    });
    Dispatch::of(parts.collect())
}

/// Puts a kernel for batches of few tokens, whatever their lengths, before a dispatch by length.
fn with_few_tokens(dispatch: Dispatch<KernelSpec>, few: MhaSplitKeys) -> Dispatch<KernelSpec> {
    let most = u64::from(MhaSplitKeys::MAX_LEN);
    let more = Interval::new(most, None);
    let rest = dispatch.entries().iter().map(|entry| Entry {
        batches: Batches {
            rows: more,
            ..entry.batches
        },
        choice: entry.choice.clone(),
    });
    let first = Entry {
        batches: Batches::by_rows(Interval::new(0, Some(most))),
        choice: few.into(),
    };
    Dispatch::of([first].into_iter().chain(rest).collect())
}

/// The ranges that sequences of at most `longest` tokens reach, so that kernels for longer ones are not compiled. The kernel of
/// the last range takes any length, so that correctness does not rest on a check of the lengths.
fn within(
    mut ranges: Vec<(Option<u64>, KernelSpec)>,
    longest: Option<u64>,
) -> Vec<(Option<u64>, KernelSpec)> {
    let Some(longest) = longest else {
        return ranges;
    };
    let is_last = |(up_to, kernel): &(Option<u64>, KernelSpec)| {
        let serves_any = !matches!(kernel, KernelSpec::MhaShort(_));
        serves_any && up_to.is_none_or(|up_to| up_to >= longest)
    };
    if let Some(last) = ranges.iter().position(is_last) {
        ranges.truncate(last + 1);
        ranges[last].0 = None;
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        kernels::attention::{HeadView, Keys},
        machine::testing,
        tensor::{DType, Extents},
    };

    fn attention(head: u32, dtype: DType) -> Attention {
        let column = |i: u32| HeadView::TokenMajor {
            offset: i * 12 * head,
            stride: 36 * head,
        };
        let of = Attending::full(12, head, 0.125, [0, 1, 2].map(column));
        Attention(MhaOnline { of, dtype })
    }

    fn batch(tokens: u64, longest: u64) -> Extents {
        Extents {
            tokens,
            longest,
            rows: tokens,
            ..Extents::default()
        }
    }

    fn shown(dispatch: &Dispatch<KernelSpec>) -> Vec<String> {
        let entries = dispatch.entries().iter();
        let template = |kernel: &KernelSpec| kernel.as_kernel().template();
        entries
            .map(|e| format!("{}: {}", e.batches, template(&e.choice)))
            .collect()
    }

    #[test]
    fn lengths_that_no_position_reaches_are_left_out_but_any_length_is_served() {
        let machine = testing::usual();
        let problem = attention(64, DType::F16);
        let all = shown(&problem.by_length(&machine, None));
        assert_eq!(
            all.last().map(String::as_str),
            Some("longest above 256: mha_online")
        );
        let few = problem.by_length(&machine, Some(100));
        assert!(Batches::ALL.is_covered_by(&few.covered()));
        // Only the last kernel takes any length, so that no range can be left out.
        assert_eq!(shown(&few).len(), all.len());
        let on_hopper = problem.by_length(&testing::hopper(), Some(100));
        assert_eq!(
            shown(&on_hopper),
            ["rows up to 64: mha_split_keys", "rows above 64: mha_wgmma"]
        );
        assert!(Batches::ALL.is_covered_by(&on_hopper.covered()));
    }

    #[test]
    fn few_tokens_have_a_kernel_of_their_own_on_hopper_whatever_their_lengths() {
        let machine = testing::hopper();
        let dispatch = attention(64, DType::F16).by_length(&machine, Some(512));
        assert_eq!(
            shown(&dispatch),
            [
                "rows up to 64: mha_split_keys",
                "rows above 64, longest up to 192: mha_wgmma",
                "rows above 64, longest above 192: mha_wgmma_persistent",
            ]
        );
        assert_eq!(dispatch.overlap(), None);
        assert!(Batches::ALL.is_covered_by(&dispatch.covered()));
        let f32 = attention(64, DType::F32).by_length(&machine, None);
        assert!(shown(&f32).iter().all(|line| !line.contains("wgmma")));
    }

    #[test]
    fn distances_have_a_warpgroup_kernel_on_hopper_unless_later_keys_are_hidden() {
        let machine = testing::hopper();
        let usual = |problem: &Attention| shown(&problem.by_length(&machine, None));
        let mut problem = attention(64, DType::F16);
        problem.0.of.by.window = Some(64);
        assert_eq!(usual(&problem), ["any batch: mha_wgmma"]);
        let mut single = attention(64, DType::F32);
        single.0.of.by.window = Some(64);
        assert_eq!(usual(&single), ["any batch: mha_simt"]);
        problem.0.of.causal = true;
        assert_eq!(problem.wgmma(&machine), Err(AttentionError::WarpgroupMask));
        assert_eq!(usual(&problem), ["any batch: mha_online"]);
    }

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
            stride: u64::from(8 * head * 32),
            dtype,
        })
    }

    #[test]
    fn steps_split_the_keys_of_few_sequences_and_longer_pieces_have_tiles_of_queries() {
        let hopper = testing::hopper();
        assert_eq!(hopper.sms, 132);
        let dispatch = cached(64, DType::F16).by_length(&hopper);
        assert_eq!(
            shown(&dispatch),
            [
                "rows up to 33, longest up to 1, keys up to 512: mha_decode",
                "rows up to 8, longest up to 1, keys above 512: mha_decode",
                "rows 9 to 33, longest up to 1, keys above 512: mha_decode",
                "rows above 33, longest up to 1: mha_decode",
                "longest 2 to 192: mha_prefill",
                "longest above 192: mha_wgmma_persistent",
            ]
        );
        assert_eq!(dispatch.overlap(), None);
        assert!(Batches::ALL.is_covered_by(&dispatch.covered()));
        let mut windowed = cached(64, DType::F16);
        windowed.0.by.window = Some(300);
        let dispatch = windowed.by_length(&hopper);
        let steps = &shown(&dispatch)[..2];
        assert_eq!(
            steps,
            [
                "rows up to 33, longest up to 1: mha_decode",
                "rows above 33, longest up to 1: mha_decode",
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
    fn steps_add_to_the_cache_themselves_where_their_kernel_serves() {
        let x = |head: u32| HeadView::TokenMajor {
            offset: 12 * head,
            stride: 20 * head,
        };
        let hopper = testing::hopper();
        let [steps, pieces] = cached(64, DType::F16)
            .appending(&hopper, x(64))
            .expect("both");
        let all = shown(&steps);
        assert_eq!(all.len(), 4);
        assert!(
            all.iter()
                .all(|line| line.contains("longest up to 1") && line.ends_with(": mha_decode"))
        );
        assert_eq!(
            shown(&pieces),
            [
                "longest 2 to 192: mha_prefill",
                "longest above 192: mha_wgmma_persistent"
            ]
        );
        let covered = [steps.covered(), pieces.covered()].concat();
        assert!(Batches::ALL.is_covered_by(&covered));
        // One kernel serves any batch in f32, and adds its own in steps alone.
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
    fn few_tiles_for_each_sm_are_finer() {
        let hopper = testing::hopper();
        let problem = cached(128, DType::F16);
        let tile = |dispatch: &Dispatch<KernelSpec>, tokens, longest| match dispatch
            .at(&batch(tokens, longest))
            .expect("a kernel")
        {
            KernelSpec::MhaPrefill(k) => k.tile.expect("a tile"),
            KernelSpec::MhaWgmma(k) => k.tile,
            other => panic!("{}", other.as_kernel().symbol()),
        };
        // 4 · 132 · 192 rows of 12 heads.
        let pieces = problem.by_length(&hopper);
        assert_eq!(tile(&pieces, 8448, 512).rows, 128);
        assert_eq!(tile(&pieces, 8449, 512).rows, 192);
        let whole = attention(128, DType::F16).by_length(&hopper, None);
        assert_eq!(tile(&whole, 8448, 512).rows, 128);
        assert_eq!(tile(&whole, 8449, 512).rows, 192);
        assert_eq!((pieces.overlap(), whole.overlap()), (None, None));
        assert!(Batches::ALL.is_covered_by(&whole.covered()));
    }

    #[test]
    fn what_a_kernel_for_a_cache_does_not_serve_another_does() {
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
    fn an_invariant_program_splits_the_keys_of_every_batch_alike() {
        for machine in [testing::usual(), testing::hopper()] {
            let one = cached(64, DType::F16).invariant(&machine);
            assert_eq!(shown(&one), ["any batch: mha_decode"]);
        }
    }

    #[test]
    fn an_invariant_program_has_the_kernel_for_the_longest() {
        let machine = testing::usual();
        let one = attention(64, DType::F16).invariant(&machine);
        assert_eq!(shown(&one), ["any batch: mha_online"]);
    }
}
