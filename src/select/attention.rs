//! Selection of fused attention kernels by the length of the longest sequence.

mod cached;

pub use cached::CachedAttention;

use super::{Batches, Dispatch, Entry, Interval};
use crate::{
    kernels::{
        Instructions, KernelSpec,
        attention::{
            AttentionError, FusedMha, MhaLongContext, MhaLongReduce, MhaLongScores, MhaOnline,
            MhaShort, MhaSplitKeys, MhaTile, MhaToE4m3, MhaWgmma,
        },
        chain::Chain,
    },
    machine::Machine,
    ops::AttentionProblem,
};

/// Max sequence lengths of additional [`MhaShort`] kernels, besides the kernel for the largest length that [`MhaShort`] supports. A kernel
/// with a smaller max length loads and masks fewer keys.
const SHORT_LENGTHS: [u32; 2] = [64, 128];

/// A fused attention problem, given as the kernel that supports every length and card.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention(pub MhaOnline);

impl Attention {
    /// Returns a dispatch by the length of the longest sequence. `longest` is the max number of tokens of a sequence, if it is limited. On
    /// Hopper, batches of at most [`MhaSplitKeys::MAX_LEN`] tokens use [`MhaSplitKeys`], if it supports the problem.
    pub fn by_length(&self, machine: &Machine, longest: Option<u64>) -> Dispatch<KernelSpec> {
        let MhaOnline { of, dtype } = self.0;
        if of.by.adjusts()
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

    /// Returns a dispatch of kernels that convert their result to E4M3, by the length of the longest sequence. Returns `None` if some
    /// sequence length has no such kernel.
    pub fn to_e4m3(&self, machine: &Machine, invariant: bool) -> Option<Dispatch<KernelSpec>> {
        match machine.instructions {
            Instructions::Ampere => None,
            Instructions::Ada => self.to_e4m3_on_ada(machine, invariant),
            Instructions::Hopper => self.to_e4m3_on_hopper(machine, invariant),
        }
    }

    fn to_e4m3_on_ada(&self, machine: &Machine, invariant: bool) -> Option<Dispatch<KernelSpec>> {
        if !self.0.dtype.has_mma() {
            return None;
        }
        let plain = match invariant {
            true => self.invariant(machine),
            false => self.by_length(machine, None),
        };
        converted(&plain, |kernel| match kernel.clone() {
            KernelSpec::MhaShort(attention) => Some(FusedMha::Short(attention)),
            KernelSpec::MhaOnline(attention) => Some(FusedMha::Online(attention)),
            _ => None,
        })
    }

    fn to_e4m3_on_hopper(
        &self,
        machine: &Machine,
        invariant: bool,
    ) -> Option<Dispatch<KernelSpec>> {
        let MhaOnline { of, dtype } = self.0;
        let is_plain = !MhaWgmma::tiles(&of, dtype, machine.instructions).is_empty();
        let plain = match self.wgmma(machine) {
            Ok(dispatch) if is_plain || of.by.adjusts() => dispatch,
            Ok(_) | Err(_) => return None,
        };
        let plain = match (invariant, plain.choices().last()) {
            (true, Some(last)) => Dispatch::always(last.clone()),
            _ => by_rounds(&plain, machine, of.heads),
        };
        converted(&plain, |kernel| {
            let KernelSpec::MhaWgmma(attention) = kernel else {
                return None;
            };
            let mut attention = attention.clone();
            if attention.tile.rows > MhaToE4m3::MAX_ROWS {
                attention.tile = attention.tile.finer(of.head)?;
            }
            if of.head > MhaToE4m3::MAX_HEAD {
                return None;
            }
            Some(FusedMha::Wgmma(attention))
        })
    }

    /// Returns a dispatch with one kernel for every length: the kernel that [`by_length`](Self::by_length) uses for the longest sequences.
    pub fn invariant(&self, machine: &Machine) -> Dispatch<KernelSpec> {
        let all = self.by_length(machine, None);
        let last = all.choices().last().cloned();
        Dispatch::always(last.unwrap_or_else(|| self.0.clone().into()))
    }

    /// Returns the kernel that holds all keys of a sequence in shared memory, for at most `max_len` tokens.
    pub fn short(&self, max_len: u32) -> MhaShort {
        MhaShort::of(&self.0, max_len)
    }

    /// Returns the kernels with warpgroup MMA, for any length, on Hopper.
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

    /// Returns three launches: two grouped GEMMs, and the reduction of the softmax between them. Parameters with the same name are bound to
    /// the same tensor.
    pub fn grouped(&self) -> Result<Chain, AttentionError> {
        let MhaOnline { of, dtype } = self.0;
        if !of.is_full() {
            return Err(AttentionError::Full { kernel: "grouped" });
        }
        if of.by.sinks {
            return Err(AttentionError::Sinks { kernel: "grouped" });
        }
        let AttentionProblem {
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
        let AttentionProblem {
            head, by, causal, ..
        } = self.0.of;
        let tiles = match by.adjusts() {
            false => MhaTile::by_length(head),
            true => MhaTile::for_adjusted_scores(head)
                .map(|tile| (None, tile))
                .into_iter()
                .collect(),
        };
        let kernels = tiles
            .into_iter()
            .map(|(up_to, tile)| (up_to, MhaWgmma::of(&self.0, tile).into()));
        // With a window, a tile of 64 queries attends to at most `most` keys, so tiles for longer sequences are not needed.
        let sides = if causal { 1 } else { 2 };
        let most = by.window.map(|window| 64 + sides * u64::from(window));
        within(kernels.collect(), most)
    }

    /// Returns the kernel for batches of few tokens. Returns `None` if the kernel does not support the problem. Also returns `None` on
    /// cards other than Hopper, because the kernel was measured to be the fastest only on Hopper.
    fn for_few_tokens(&self, machine: &Machine) -> Option<MhaSplitKeys> {
        let few = MhaSplitKeys {
            plain: self.0.clone(),
        };
        let serves = machine.instructions == Instructions::Hopper && few.check().is_ok();
        serves.then_some(few)
    }
}

/// Replaces each kernel of the dispatch `plain` by one that also converts its result to E4M3. For a kernel, the closure `attention` returns
/// the attention part of the replacement, or `None` if the kernel has no variant with a conversion. If any kernel has no such variant, the
/// result is `None`.
fn converted(
    plain: &Dispatch<KernelSpec>,
    attention: impl Fn(&KernelSpec) -> Option<FusedMha>,
) -> Option<Dispatch<KernelSpec>> {
    let converting = |kernel: &KernelSpec| {
        let attention = attention(kernel)?;
        Some(KernelSpec::from(MhaToE4m3 { attention }))
    };
    plain
        .choices()
        .all(|kernel| converting(kernel).is_some())
        .then(|| {
            plain
                .clone()
                .map(|kernel| converting(&kernel).unwrap_or(kernel))
        })
}

/// Splits each range with a coarse tile in two: batches with few tiles per SM use a finer tile.
fn by_rounds(
    dispatch: &Dispatch<KernelSpec>,
    machine: &Machine,
    heads: u32,
) -> Dispatch<KernelSpec> {
    // If there is a finer tile, returns the rows of the coarse tile, the max number of coarse tiles per SM for which the finer tile is
    // used, and the kernel with the finer tile.
    let finer = |kernel: &KernelSpec| -> Option<(u32, u64, KernelSpec)> {
        let KernelSpec::MhaWgmma(k) = kernel else {
            return None;
        };
        let tile = k.tile.finer(k.of.head)?;
        let kernel = MhaWgmma { tile, ..k.clone() };
        Some((k.tile.rows, MhaTile::ROUNDS, kernel.into()))
    };
    let parts = dispatch.entries().iter().flat_map(|entry| {
        let Some((rows, rounds, choice)) = finer(&entry.choice) else {
            return vec![entry.clone()];
        };
        let most = rounds * u64::from(machine.sms) * u64::from(rows) / u64::from(heads);
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

/// Adds a kernel for batches of at most [`MhaSplitKeys::MAX_LEN`] tokens to a dispatch by length. A sequence in such a batch cannot be too
/// long for this kernel.
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

/// Removes the ranges after the first one that includes `longest` and whose kernel supports every length ([`MhaShort`] does not). Kernels
/// for longer sequences are then not compiled. The last remaining range has no upper bound, so the result is correct even for unchecked
/// lengths.
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
        machine::testing,
        ops::{Bias, HeadView},
        tensor::{DType, Extents},
    };

    fn attention(head: u32, dtype: DType) -> Attention {
        let column = |i: u32| HeadView::TokenMajor {
            offset: i * 12 * head,
            stride: 36 * head,
        };
        let of = AttentionProblem::full(12, head, 0.125, [0, 1, 2].map(column));
        Attention(MhaOnline { of, dtype })
    }

    pub(super) fn shown(dispatch: &Dispatch<KernelSpec>) -> Vec<String> {
        let entries = dispatch.entries().iter();
        let template = |kernel: &KernelSpec| kernel.as_kernel().template();
        entries
            .map(|e| format!("{}: {}", e.batches, template(&e.choice)))
            .collect()
    }

    #[test]
    fn lengths_beyond_the_position_table_have_no_separate_kernel_but_are_served() {
        let machine = testing::usual();
        let problem = attention(64, DType::F16);
        let all = shown(&problem.by_length(&machine, None));
        assert_eq!(
            all.last().map(String::as_str),
            Some("longest above 256: mha_online")
        );
        let few = problem.by_length(&machine, Some(100));
        assert!(Batches::ALL.is_covered_by(&few.covered()));
        // The limit of 100 tokens removes no range, because only the last kernel supports every length.
        assert_eq!(shown(&few).len(), all.len());
        let on_hopper = problem.by_length(&testing::hopper(), Some(100));
        assert_eq!(
            shown(&on_hopper),
            ["rows up to 64: mha_split_keys", "rows above 64: mha_wgmma"]
        );
        assert!(Batches::ALL.is_covered_by(&on_hopper.covered()));
    }

    #[test]
    fn few_tokens_of_any_length_have_a_separate_kernel_on_hopper() {
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
    fn windows_have_warpgroup_kernels_on_hopper_and_biases_have_if_no_keys_are_hidden() {
        let machine = testing::hopper();
        let usual = |problem: &Attention| shown(&problem.by_length(&machine, None));
        let mut problem = attention(64, DType::F16);
        problem.0.of.by.window = Some(64);
        assert_eq!(usual(&problem), ["any batch: mha_wgmma"]);
        problem.0.of.by.window = Some(65);
        let by_length = [
            "longest up to 192: mha_wgmma",
            "longest above 192: mha_wgmma_persistent",
        ];
        assert_eq!(usual(&problem), by_length);
        problem.0.of.causal = true;
        assert_eq!(usual(&problem), ["any batch: mha_wgmma"]);
        problem.0.of.by.window = Some(4096);
        let all = usual(&problem);
        assert_eq!((&all[0][..], all.len()), (by_length[0], 3));
        let mut single = attention(64, DType::F32);
        single.0.of.by.window = Some(64);
        assert_eq!(usual(&single), ["any batch: mha_simt"]);
        problem.0.of.by.bias = Some(Bias::Slopes);
        assert_eq!(problem.wgmma(&machine), Err(AttentionError::WarpgroupMask));
        assert_eq!(usual(&problem), ["any batch: mha_online"]);
    }

    #[test]
    fn attention_with_sinks_has_the_same_kernels_except_grouped_ones() {
        for (machine, dtype) in [
            (testing::usual(), DType::F16),
            (testing::usual(), DType::F32),
            (testing::hopper(), DType::BF16),
            (testing::hopper(), DType::F32),
        ] {
            for (causal, window) in [(false, None), (true, None), (true, Some(128))] {
                let mut plain = attention(64, dtype);
                plain.0.of.causal = causal;
                plain.0.of.by.window = window;
                let mut sinks = plain.clone();
                sinks.0.of.by.sinks = true;
                let [with, without] = [&sinks, &plain].map(|a| a.by_length(&machine, None));
                assert_eq!(shown(&with), shown(&without));
                for kernel in with.choices() {
                    assert_eq!(kernel.as_kernel().validate(), Ok(()));
                    let params = kernel.as_kernel().params();
                    assert!(params.iter().any(|param| param.name == "sinks"));
                }
            }
        }
        let mut full = attention(64, DType::F16);
        assert!(full.grouped().is_ok());
        full.0.of.by.sinks = true;
        let refused = full.grouped().expect_err("an error");
        assert_eq!(
            refused.to_string(),
            "the grouped kernel takes attention without sinks; use the online kernel"
        );
    }

    /// Returns the tile of the kernel for a batch of `tokens` tokens.
    pub(super) fn tile(dispatch: &Dispatch<KernelSpec>, tokens: u64, longest: u64) -> MhaTile {
        let batch = Extents {
            tokens,
            longest,
            rows: tokens,
            ..Extents::default()
        };
        match dispatch.at(&batch).expect("a kernel") {
            KernelSpec::MhaPrefill(k) => k.tile.expect("a tile"),
            KernelSpec::MhaWgmma(k) => k.tile,
            other => panic!("{}", other.as_kernel().symbol()),
        }
    }

    #[test]
    fn few_tiles_per_sm_use_finer_tiles() {
        let machine = testing::hopper();
        let whole = attention(128, DType::F16).by_length(&machine, None);
        // The limit is four tiles of 192 rows per SM, with 12 heads.
        let tokens = u64::from(4 * 192 * machine.sms / 12);
        assert_eq!(tile(&whole, tokens, 512).rows, 128);
        assert_eq!(tile(&whole, tokens + 1, 512).rows, 192);
        assert_eq!(whole.overlap(), None);
        assert!(Batches::ALL.is_covered_by(&whole.covered()));
    }

    #[test]
    fn results_are_converted_to_e4m3_on_cards_that_multiply_in_it() {
        let problem = attention(64, DType::F16);
        let on = |machine: &Machine, invariant| problem.to_e4m3(machine, invariant);
        let ada = testing::ada();
        let all = on(&ada, false).expect("it converts");
        let plain = problem.by_length(&ada, None);
        assert_eq!(shown(&all), shown(&plain));
        for kernel in all.choices() {
            assert_eq!(kernel.as_kernel().validate(), Ok(()));
            assert_eq!(kernel.as_kernel().instructions(), Instructions::Ada);
        }
        let invariant = on(&ada, true).expect("it converts");
        assert_eq!(shown(&invariant), ["any batch: mha_online"]);
        assert!(on(&testing::usual(), false).is_none());
        assert!(attention(64, DType::F32).to_e4m3(&ada, false).is_none());
    }

    #[test]
    fn an_invariant_program_uses_the_kernel_for_the_longest_sequences() {
        let machine = testing::usual();
        let one = attention(64, DType::F16).invariant(&machine);
        assert_eq!(shown(&one), ["any batch: mha_online"]);
    }
}
