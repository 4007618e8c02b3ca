mod attention;
mod joined;
mod left;

use std::fmt;

pub use joined::LinearLayerNorm;
use left::mostly_left;

use super::{Choice, Range, choice_at};
use crate::{
    kernels::{
        Instructions, Kernel, KernelSpec,
        attention::{
            AttentionError, AttentionSoftmax, HeadView, MhaLongContext, MhaLongReduce,
            MhaLongScores, MhaShort, MhaTile, MhaWgmma,
        },
        chain::Chain,
        gemm::{
            EitherGemm, Epilogue, FewRows, Gemm, GemmOneTile, GemmSkinny, GemmSplitK, GemmWgmma,
            RowRange, Tile,
        },
        layernorm::{BiasResidualLayerNorm, LayerNorm, Teams},
    },
    tensor::DType,
};

/// Lengths that the short attention kernel is compiled for without tuning, besides the longest that it
/// can take.
const GUESSED_LENGTHS: [u32; 2] = [64, 128];
/// Lengths that the short attention kernel is compiled for by the tuner, besides the longest that it can take.
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
        /// What the card has.
        instructions: Instructions,
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
        /// What the card has.
        instructions: Instructions,
    },
    /// In the form that [`LayerNorm::new`] gives it; another is a choice.
    LayerNorm(LayerNorm),
    /// As [`BiasResidualLayerNorm::new`] makes it.
    BiasResidualLayerNorm(BiasResidualLayerNorm),
    /// Softmax of stored scores, for any length: streamed.
    Softmax(AttentionSoftmax),
    /// A linear layer and the LayerNorm behind it, on Hopper: one launch, or two, whose kernels are problems of their own.
    LinearLayerNorm(LinearLayerNorm),
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
        match self {
            Problem::Gemm {
                n,
                k,
                dtype,
                epilogue,
                instructions,
            } => {
                format!("{}_{dtype}_n{n}_k{k}{}", epilogue.name(), on(*instructions))
            }
            // Of the others a kernel without parameters of its own says the same in its symbol.
            Problem::Attention { instructions, .. } => match self.kernel(Choice::MhaOnline) {
                Some(kernel) => {
                    let symbol = kernel.as_kernel().symbol();
                    symbol.replacen("mha_online", "mha", 1) + on(*instructions)
                }
                None => unreachable!("online attention is a choice of every attention"),
            },
            Problem::LayerNorm(usual) => usual.symbol(),
            Problem::BiasResidualLayerNorm(usual) => usual.symbol(),
            Problem::Softmax(streamed) => streamed.symbol().replacen("_streamed", "", 1),
            Problem::LinearLayerNorm(pair) => pair.key(),
        }
    }

    pub fn counted(&self) -> Counted {
        match self {
            Problem::Gemm { .. }
            | Problem::LayerNorm(_)
            | Problem::BiasResidualLayerNorm(_)
            | Problem::LinearLayerNorm(_) => Counted::Rows,
            Problem::Attention { .. } | Problem::Softmax(_) => Counted::Longest,
        }
    }

    /// Whether its kernels can be raced by themselves: else they are what stands between their neighbours.
    pub fn is_raced_alone(&self) -> bool {
        !matches!(self, Problem::LinearLayerNorm(_))
    }

    /// Every choice.
    pub fn candidates(&self) -> Vec<Choice> {
        let teams = |width, dtype| {
            let teams = Teams::candidates(width, dtype).into_iter();
            teams.map(Choice::Teams).collect()
        };
        match *self {
            Problem::LayerNorm(LayerNorm { width, dtype, .. })
            | Problem::BiasResidualLayerNorm(BiasResidualLayerNorm { width, dtype, .. }) => {
                teams(width, dtype)
            }
            Problem::LinearLayerNorm(ref pair) => pair.candidates(),
            Problem::Softmax(ref softmax) => {
                let mut choices = Vec::new();
                for (_, kernel) in softmax.by_length() {
                    for AttentionSoftmax { form, .. } in kernel.candidates() {
                        let choice = Choice::Softmax(form);
                        if !choices.contains(&choice) {
                            choices.push(choice);
                        }
                    }
                }
                choices
            }
            Problem::Gemm {
                n,
                k,
                dtype,
                instructions,
                ..
            } => {
                let any = Tile::fitting(n, dtype).into_iter().map(Choice::Tile);
                let hopper = GemmWgmma::tiles(n, k, dtype, instructions).into_iter();
                let one = GemmOneTile::tiles(n, k, dtype, instructions).into_iter();
                let split = GemmSplitK::tiles(n, k, dtype, instructions).into_iter();
                let skinny = GemmSkinny::tiles(n, k, dtype, instructions).into_iter();
                any.chain(hopper.map(Choice::Wgmma))
                    .chain(one.map(Choice::OneTile))
                    .chain(split.map(Choice::SplitK))
                    .chain(skinny.map(Choice::Skinny))
                    .collect()
            }
            Problem::Attention { head, dtype, .. } => {
                let longest = MhaShort::max_len_for(head, dtype);
                let hopper = self.wgmma_tiles().iter().copied();
                let mut lengths: Vec<u32> = SHORT_LENGTHS
                    .into_iter()
                    .filter(|&length| length < longest)
                    .collect();
                lengths.extend((longest > 0).then_some(longest));
                lengths
                    .into_iter()
                    .map(|max_len| Choice::MhaShort { max_len })
                    .chain([Choice::MhaOnline])
                    .chain(hopper.map(Choice::MhaWgmma))
                    .chain(
                        [Choice::MhaGrouped]
                            .into_iter()
                            .filter(|&c| self.check(c).is_ok()),
                    )
                    .collect()
            }
        }
    }

    /// The choices that serve a size, most promising first, for a card of so many multiprocessors.
    ///
    /// GEMMs have a cost model. Of attention and softmax the kernel for the shortest sequences that
    /// holds the keys comes first, those for longer ones have no place where they only hold more, and
    /// the one for any length is last. Sharings of rows are in the order of their distance from the first
    /// guess, in doublings of warps or lanes and rows.
    pub fn ranked(&self, size: u64, n_sms: u32) -> Vec<Choice> {
        let mut choices = self.candidates();
        choices.retain(|choice| choice.most().is_none_or(|most| size <= most));
        if let Problem::Softmax(_) = self {
            let shortest = choices.iter().filter_map(|choice| choice.most()).min();
            choices.retain(|choice| choice.most().is_none_or(|most| Some(most) == shortest));
        }
        choices.sort_by(|&a, &b| {
            let cost = |choice| self.cost(choice, size, n_sms);
            cost(a).total_cmp(&cost(b))
        });
        // The model of those for any card was not fitted to so few rows.
        let is_few = |choice: &Choice| matches!(choice, Choice::Skinny(_) | Choice::SplitK(_));
        if choices.iter().any(is_few) {
            choices.sort_by_key(|choice| matches!(choice, Choice::Tile(_)));
        }
        choices
    }

    /// A choice's estimated cycles, where it has a model of its time.
    pub fn cycles(&self, choice: Choice, size: u64, n_sms: u32) -> Option<f64> {
        let modelled = matches!(self, Problem::Gemm { .. } | Problem::LinearLayerNorm(_));
        modelled.then(|| self.cost(choice, size, n_sms))
    }

    /// What choices are ranked by: of GEMMs the estimated time in cycles, of others a distance.
    pub fn cost(&self, choice: Choice, size: u64, n_sms: u32) -> f64 {
        match (self, choice) {
            (&Problem::Gemm { n, k, dtype, .. }, Choice::Tile(tile)) => {
                tile.cycles(size, n, k, dtype, n_sms)
            }
            (&Problem::Gemm { n, k, epilogue, .. }, Choice::Wgmma(tile)) => {
                tile.cycles(size, n, k, epilogue, n_sms)
            }
            (&Problem::Gemm { n, k, epilogue, .. }, Choice::OneTile(tile)) => {
                tile.cycles(size, n, k, epilogue, n_sms)
            }
            (&Problem::Gemm { n, k, .. }, Choice::SplitK(tile)) => tile.cycles(size, n, k, n_sms),
            (&Problem::Gemm { n, k, .. }, Choice::Skinny(tile)) => tile.cycles(size, n, k, n_sms),
            (Problem::LinearLayerNorm(pair), choice) => pair.cycles(choice, size),
            (Problem::Attention { .. }, choice) => choice.most().map_or(f64::MAX, |n| n as f64),
            (_, choice) => {
                let guess = choice_at(&self.guess(), size).and_then(Choice::sharing);
                let distance = |[a, b]: [u32; 2], [c, d]: [u32; 2]| {
                    let doublings = |x: u32, y: u32| (f64::from(x) / f64::from(y)).log2().abs();
                    doublings(a, c) + doublings(b, d)
                };
                match (choice.sharing(), guess) {
                    (Some(own), Some(guess)) => distance(own, guess),
                    (None, None) => 0.0,
                    _ => f64::MAX,
                }
            }
        }
    }

    /// What is launched where nothing was measured.
    pub fn guess(&self) -> Vec<Range> {
        self.guess_beside(&[])
    }

    /// As [`Problem::guess`], for the sizes that are left where others serve these: above the first, up to the second.
    pub fn guess_beside(&self, others: &[RowRange]) -> Vec<Range> {
        let range = |up_to, choice| Range { up_to, choice };
        match *self {
            Problem::LayerNorm(ref usual) => usual
                .by_rows()
                .into_iter()
                .map(|(up_to, kernel)| range(up_to, Choice::Teams(kernel.teams)))
                .collect(),
            Problem::BiasResidualLayerNorm(ref usual) => {
                let of = |(up_to, kernel): (_, BiasResidualLayerNorm)| {
                    range(up_to, Choice::Teams(kernel.teams))
                };
                mostly_left(usual.by_rows().into_iter().map(of).collect(), others)
            }
            Problem::Softmax(ref softmax) => softmax
                .by_length()
                .into_iter()
                .map(|(up_to, kernel)| range(up_to, Choice::Softmax(kernel.form)))
                .collect(),
            Problem::Gemm {
                n,
                k,
                dtype,
                epilogue,
                instructions: Instructions::Ampere,
            } => Gemm::variants(n, k, dtype, epilogue)
                .into_iter()
                .map(|(up_to, gemm)| range(up_to, Choice::Tile(gemm.tile)))
                .collect(),
            Problem::Gemm {
                n,
                k,
                dtype,
                epilogue,
                instructions: Instructions::Hopper,
            } => {
                let few = FewRows::variants(n, k, dtype, epilogue);
                let most = few.last().map_or(0, |&(end, _)| end);
                let few = few.into_iter().map(|(end, tile)| {
                    let choice = match tile {
                        FewRows::Skinny(tile) => Choice::Skinny(tile),
                        FewRows::SplitK(tile) => Choice::SplitK(tile),
                        FewRows::Wgmma(tile) => Choice::Wgmma(tile),
                        FewRows::OneTile(tile) => Choice::OneTile(tile),
                    };
                    range(Some(end), choice)
                });
                let more = EitherGemm::variants(n, k, dtype, epilogue, most);
                let more = EitherGemm::variants_beside(more, most, others).into_iter();
                let more = more.map(|(up_to, kernel)| {
                    let choice = match kernel {
                        EitherGemm::Any(gemm) => Choice::Tile(gemm.tile),
                        EitherGemm::Hopper(gemm) => Choice::Wgmma(gemm.tile),
                        EitherGemm::OneTile(gemm) => Choice::OneTile(gemm.tile),
                    };
                    range(up_to, choice)
                });
                let mut ranges: Vec<Range> = few.chain(more).collect();
                ranges.dedup_by(|next, before| {
                    let same = next.choice == before.choice;
                    before.up_to = if same { next.up_to } else { before.up_to };
                    same
                });
                ranges
            }
            Problem::LinearLayerNorm(ref pair) => pair.guess(),
            Problem::Attention { head, .. } if !self.wgmma_tiles().is_empty() => {
                MhaTile::by_length(head)
                    .into_iter()
                    .map(|(up_to, tile)| range(up_to, Choice::MhaWgmma(tile)))
                    .collect()
            }
            Problem::Attention { head, dtype, .. } => {
                let max_len = MhaShort::max_len_for(head, dtype);
                // A kernel for shorter sequences loads and skips less.
                let short = GUESSED_LENGTHS
                    .into_iter()
                    .filter(|&length| length < max_len)
                    .chain((max_len > 0).then_some(max_len))
                    .map(|max_len| range(Some(max_len.into()), Choice::MhaShort { max_len }));
                let online = range(None, Choice::MhaOnline);
                short.chain([online]).collect()
            }
        }
    }

    /// The tiles of Hopper's attention; none where the problem is not for it.
    fn wgmma_tiles(&self) -> &'static [MhaTile] {
        match *self {
            Problem::Attention {
                head,
                q,
                k,
                v,
                dtype,
                instructions,
                ..
            } => MhaWgmma::tiles(head, dtype, &[q, k, v], instructions),
            _ => &[],
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
            KernelSpec::MhaWgmma(k) => k.check(),
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
                instructions: _,
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
                    ..
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
                &Problem::Gemm {
                    n,
                    k,
                    dtype,
                    epilogue,
                    instructions: Instructions::Hopper,
                },
                Choice::Wgmma(tile),
            ) => Some(KernelSpec::GemmWgmma(GemmWgmma {
                n,
                k,
                dtype,
                epilogue,
                tile,
            })),
            (
                &Problem::Gemm {
                    n,
                    k,
                    dtype,
                    epilogue,
                    instructions: Instructions::Hopper,
                },
                Choice::OneTile(tile),
            ) => Some(KernelSpec::GemmOneTile(GemmOneTile {
                n,
                k,
                dtype,
                epilogue,
                tile,
            })),
            (
                &Problem::Gemm {
                    n,
                    k,
                    dtype,
                    epilogue,
                    instructions: Instructions::Hopper,
                },
                Choice::SplitK(tile),
            ) => Some(KernelSpec::GemmSplitK(GemmSplitK {
                n,
                k,
                dtype,
                epilogue,
                tile,
            })),
            (
                &Problem::Gemm {
                    n,
                    k,
                    dtype,
                    epilogue,
                    instructions: Instructions::Hopper,
                },
                Choice::Skinny(tile),
            ) => Some(KernelSpec::GemmSkinny(GemmSkinny {
                n,
                k,
                dtype,
                epilogue,
                tile,
            })),
            (Problem::Attention { .. }, choice) => attention::kernel(self, choice),
            (Problem::LayerNorm(usual), Choice::Teams(teams)) => {
                let usual = usual.clone();
                Some(KernelSpec::LayerNorm(LayerNorm { teams, ..usual }))
            }
            (Problem::BiasResidualLayerNorm(usual), Choice::Teams(teams)) => {
                let usual = usual.clone();
                let kernel = BiasResidualLayerNorm { teams, ..usual };
                Some(KernelSpec::BiasResidualLayerNorm(kernel))
            }
            (Problem::Softmax(softmax), Choice::Softmax(form)) => {
                let softmax = softmax.clone();
                let kernel = AttentionSoftmax { form, ..softmax };
                Some(KernelSpec::AttentionSoftmax(kernel))
            }
            (Problem::LinearLayerNorm(pair), Choice::Joined(tile)) => {
                Some(pair.joined(tile).into())
            }
            _ => None,
        }
    }
}

/// The end of a key.
fn on(instructions: Instructions) -> &'static str {
    match instructions {
        Instructions::Ampere => "",
        Instructions::Hopper => "_hopper",
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
pub(super) mod tests;
