use std::fmt;

use serde::{Deserialize, Serialize};

use super::Range;
use crate::{
    kernels::{
        KernelSpec,
        attention::{
            AttentionError, HeadView, MhaLongContext, MhaLongReduce, MhaLongScores, MhaOnline,
            MhaShort,
        },
        chain::Chain,
        gemm::{Epilogue, Gemm, Tile},
    },
    tensor::DType,
};

/// Lengths that the short attention kernel is compiled for, besides the longest that it can take.
const SHORT_LENGTHS: [u32; 4] = [32, 64, 128, 256];

/// What a step asks for, whichever kernel serves it.
#[derive(Clone, Debug, PartialEq)]
pub enum Problem {
    /// `x [rows, k]`, `weight [n, k]` → `[rows, n]`.
    Gemm {
        n: u32,
        k: u32,
        dtype: DType,
        epilogue: Epilogue,
    },
    /// Softmax of `scale · q·kᵀ` times `v`, in each sequence and head.
    Attention {
        heads: u32,
        head: u32,
        scale: f32,
        q: HeadView,
        k: HeadView,
        v: HeadView,
        dtype: DType,
    },
}

/// One of the kernels that solve a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Choice {
    Tile(Tile),
    /// For sequences of at most `max_len`.
    MhaShort {
        max_len: u32,
    },
    MhaOnline,
    /// Three launches, with the scores in memory.
    MhaGrouped,
}

/// What a problem's sizes count, and its limits with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// Rows of the launch: tokens, or sequences after pooling.
    Rows,
    /// Tokens of the longest sequence.
    Longest,
}

impl Problem {
    /// The problem in words: what it computes, storage type, sizes. Equal problems, and only they,
    /// have equal keys.
    pub fn key(&self) -> String {
        match *self {
            Problem::Gemm {
                n,
                k,
                dtype,
                epilogue,
            } => format!("{}_{dtype}_n{n}_k{k}", epilogue.name()),
            // The symbol of the kernel without parameters of its own says the rest.
            Problem::Attention { .. } => match self.kernel(Choice::MhaOnline) {
                Some(kernel) => kernel.as_kernel().symbol().replacen("mha_online", "mha", 1),
                None => unreachable!("online attention is a choice of every attention"),
            },
        }
    }

    pub fn counted(&self) -> Counted {
        match self {
            Problem::Gemm { .. } => Counted::Rows,
            Problem::Attention { .. } => Counted::Longest,
        }
    }

    /// Every choice.
    pub fn candidates(&self) -> Vec<Choice> {
        match *self {
            Problem::Gemm { n, dtype, .. } => Tile::fitting(n, dtype)
                .into_iter()
                .map(Choice::Tile)
                .collect(),
            Problem::Attention { head, dtype, .. } => {
                let longest = MhaShort::max_len_for(head, dtype);
                let mut lengths: Vec<u32> = SHORT_LENGTHS
                    .into_iter()
                    .filter(|&length| length < longest)
                    .collect();
                lengths.extend((longest > 0).then_some(longest));
                lengths
                    .into_iter()
                    .map(|max_len| Choice::MhaShort { max_len })
                    .chain([Choice::MhaOnline])
                    .chain(
                        [Choice::MhaGrouped]
                            .into_iter()
                            .filter(|&c| self.check(c).is_ok()),
                    )
                    .collect()
            }
        }
    }

    /// The choices that serve a size, in the order of the cost model for a card of so many
    /// multiprocessors. The model knows tiles of GEMMs; of attention it says that the shortest
    /// kernel that holds the keys comes first and the one for any length last.
    pub fn ranked(&self, size: u64, n_sms: u32) -> Vec<Choice> {
        let mut choices = self.candidates();
        choices.retain(|choice| choice.most().is_none_or(|most| size <= most));
        if let Problem::Gemm { n, k, dtype, .. } = *self {
            let cycles = |choice: &Choice| match choice {
                Choice::Tile(tile) => tile.cycles(size, n, k, dtype, n_sms),
                _ => f64::INFINITY,
            };
            choices.sort_by(|a, b| cycles(a).total_cmp(&cycles(b)));
        }
        choices
    }

    /// What is launched where nothing was measured.
    pub fn guess(&self) -> Vec<Range> {
        match *self {
            Problem::Gemm {
                n,
                k,
                dtype,
                epilogue,
            } => Gemm::variants(n, k, dtype, epilogue)
                .into_iter()
                .map(|(up_to, gemm)| Range {
                    up_to,
                    choice: Choice::Tile(gemm.tile),
                })
                .collect(),
            Problem::Attention { head, dtype, .. } => {
                let max_len = MhaShort::max_len_for(head, dtype);
                let short = (max_len > 0).then_some(Range {
                    up_to: Some(max_len.into()),
                    choice: Choice::MhaShort { max_len },
                });
                let online = Range {
                    up_to: None,
                    choice: Choice::MhaOnline,
                };
                short.into_iter().chain([online]).collect()
            }
        }
    }

    /// Whether the kernels of a choice of attention can be made for these sizes.
    pub fn check(&self, choice: Choice) -> Result<(), AttentionError> {
        let Some(chain) = self.chain(choice) else {
            return Ok(());
        };
        chain.launches.iter().try_for_each(|l| match &l.kernel {
            KernelSpec::MhaShort(k) => k.check(),
            KernelSpec::MhaOnline(k) => k.check(),
            KernelSpec::MhaLongScores(k) => k.check(),
            KernelSpec::MhaLongContext(k) => k.check(),
            _ => Ok(()),
        })
    }

    /// The launches of a choice; `None` where the choice is none for this problem.
    pub fn chain(&self, choice: Choice) -> Option<Chain> {
        let (
            &Problem::Attention {
                heads,
                head,
                scale,
                q,
                k,
                v,
                dtype,
            },
            Choice::MhaGrouped,
        ) = (self, choice)
        else {
            return self.kernel(choice).map(Chain::of);
        };
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
        // Each reads what the one before wrote, by the names of their parameters.
        let chain = Chain::of(scores).then(MhaLongReduce { heads }, &[]);
        Some(chain.then(context, &[]))
    }

    /// The kernels of a choice, in the order of their launches; none where the choice is none for
    /// this problem.
    pub fn kernels(&self, choice: Choice) -> Vec<KernelSpec> {
        let chain = self.chain(choice).unwrap_or_default();
        chain.launches.into_iter().map(|l| l.kernel).collect()
    }

    /// The kernel of a choice that is a single launch; `None` where the choice is none for this
    /// problem.
    pub fn kernel(&self, choice: Choice) -> Option<KernelSpec> {
        match (self, choice) {
            (
                &Problem::Gemm {
                    n,
                    k,
                    dtype,
                    epilogue,
                },
                Choice::Tile(tile),
            ) => Some(KernelSpec::Gemm(Gemm {
                n,
                k,
                dtype,
                epilogue,
                tile,
            })),
            (
                &Problem::Attention {
                    heads,
                    head,
                    scale,
                    q,
                    k,
                    v,
                    dtype,
                },
                Choice::MhaShort { max_len },
            ) => Some(KernelSpec::MhaShort(MhaShort {
                heads,
                head,
                scale,
                q,
                k,
                v,
                max_len,
                dtype,
            })),
            (
                &Problem::Attention {
                    heads,
                    head,
                    scale,
                    q,
                    k,
                    v,
                    dtype,
                },
                Choice::MhaOnline,
            ) => Some(KernelSpec::MhaOnline(MhaOnline {
                heads,
                head,
                scale,
                q,
                k,
                v,
                dtype,
            })),
            _ => None,
        }
    }
}

impl Choice {
    /// The largest size that it serves; `None` where it serves all.
    pub fn most(self) -> Option<u64> {
        match self {
            Choice::MhaShort { max_len } => Some(max_len.into()),
            Choice::Tile(_) | Choice::MhaOnline | Choice::MhaGrouped => None,
        }
    }
}

/// As in symbols.
impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Choice::Tile(t) => write!(
                f,
                "t{}x{}x{}_w{}x{}_s{}",
                t.m, t.n, t.k, t.warps_m, t.warps_n, t.stages
            ),
            Choice::MhaShort { max_len } => write!(f, "mha_short_l{max_len}"),
            Choice::MhaOnline => f.write_str("mha_online"),
            Choice::MhaGrouped => f.write_str("mha_grouped"),
        }
    }
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Counted::Rows => "rows",
            Counted::Longest => "tokens in the longest sequence",
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{kernels::gemm::Activation, tune::choice_at};

    pub fn gemm() -> Problem {
        Problem::Gemm {
            n: 3072,
            k: 768,
            dtype: DType::F16,
            epilogue: Epilogue {
                bias: true,
                activation: Some(Activation::GeluExact),
            },
        }
    }

    pub fn attention(head: u32) -> Problem {
        let stride = 3 * 12 * head;
        let view = |part: u32| HeadView::TokenMajor {
            offset: part * 12 * head,
            stride,
        };
        Problem::Attention {
            heads: 12,
            head,
            scale: 1.0 / (head as f32).sqrt(),
            q: view(0),
            k: view(1),
            v: view(2),
            dtype: DType::F16,
        }
    }

    #[test]
    fn keys_say_what_is_computed() {
        assert_eq!(gemm().key(), "gemm_bias_gelu_f16_n3072_k768");
        assert_eq!(attention(64).key(), "mha_f16_h12x64_qkv2304");
    }

    #[test]
    fn every_candidate_has_a_kernel_and_the_guess_is_made_of_candidates() {
        for problem in [gemm(), attention(64), attention(128), attention(7)] {
            let candidates = problem.candidates();
            assert!(candidates.iter().all(|&c| !problem.kernels(c).is_empty()));
            for range in problem.guess() {
                assert!(candidates.contains(&range.choice), "{range:?}");
                assert!(
                    range
                        .choice
                        .most()
                        .is_none_or(|most| range.up_to == Some(most))
                );
            }
        }
        assert_eq!(gemm().kernel(Choice::MhaOnline), None);
        assert_eq!(attention(64).kernel(gemm().candidates()[0]), None);
    }

    #[test]
    fn a_short_kernel_is_no_candidate_beyond_its_length() {
        let problem = attention(64);
        let max_len = MhaShort::max_len_for(64, DType::F16);
        assert!(problem.candidates().contains(&Choice::MhaShort { max_len }));
        let ranked = problem.ranked(u64::from(max_len) + 1, 132);
        assert_eq!(ranked, [Choice::MhaOnline, Choice::MhaGrouped]);
        assert_eq!(problem.ranked(20, 132)[0], Choice::MhaShort { max_len: 32 });
    }

    #[test]
    fn grouped_attention_is_three_launches_that_meet_in_their_tensors() {
        let chain = attention(64).chain(Choice::MhaGrouped).expect("a chain");
        let names: Vec<&str> = chain.tensors.iter().map(|t| t.name).collect();
        assert_eq!(
            names,
            [
                "q",
                "k",
                "cu_lens",
                "pair_offsets",
                "scores",
                "partials",
                "statistics",
                "v",
                "out"
            ]
        );
        let operands: Vec<&[usize]> = chain.launches.iter().map(|l| &l.operands[..]).collect();
        assert_eq!(
            operands,
            [&[0, 1, 2, 3, 4, 5][..], &[5, 2, 3, 6], &[4, 6, 7, 2, 3, 8]]
        );
        assert_eq!(chain.results, [8]);
        assert!(!attention(7).candidates().contains(&Choice::MhaGrouped));
        assert!(gemm().chain(Choice::MhaGrouped).is_none());
    }

    #[test]
    fn the_model_puts_the_tile_first_that_it_picks() {
        let Problem::Gemm { n, k, dtype, .. } = gemm() else {
            unreachable!("a GEMM");
        };
        for rows in [16, 500, 8192] {
            let best = Tile::pick(rows, n, k, dtype, 132);
            assert_eq!(gemm().ranked(rows, 132)[0], Choice::Tile(best));
        }
    }

    #[test]
    fn a_range_serves_sizes_up_to_its_limit() {
        let ranges = attention(64).guess();
        let Some(most) = ranges[0].up_to else {
            unreachable!("the short kernel has a limit");
        };
        assert_eq!(choice_at(&ranges, most), Some(ranges[0].choice));
        assert_eq!(choice_at(&ranges, most + 1), Some(Choice::MhaOnline));
    }
}
