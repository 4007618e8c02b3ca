//! The softmax between the two matrix products of unfused attention.
//!
//! A row of scores has the length of its sequence and may start at any element. A team of lanes reads the row once, in aligned packs of 16
//! bytes, and keeps it in registers. The team interleaves the reductions of several rows, as in `warpAllReduce_XElem` of TurboTransformers
//! (section 4.1.2).

use serde::{Deserialize, Serialize};

use super::{
    AttentionError,
    common::{pairs_shape, rounding, softmax},
    params, storage,
    view::{scale_log2, scale_suffix},
};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance, f32_literal,
        limits,
    },
    machine::Machine,
    tensor::{DType, Extents},
};

/// `scores [heads, pairs]`, `cu_lens`, `pair_offsets`, (`valid_lens [batch]`) → `out [heads, pairs]`: softmax of
/// `scale · scores` over the keys of each query.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionSoftmax {
    pub heads: u32,
    pub scale: f32,
    pub dtype: DType,
    pub mask: SoftmaxMask,
    pub form: SoftmaxForm,
}

/// Keys that the softmax masks: their probability is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SoftmaxMask {
    None,
    /// Masks the keys that are padding: those with index `valid_lens` and above in their sequence.
    Padding,
    /// Masks the keys after the query.
    Causal,
}

/// Distribution of rows over lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SoftmaxForm {
    /// A team of lanes reads `x_rows` rows once and keeps them in registers. A team is a part of a warp, a warp, or (from 64
    /// lanes) a whole CTA.
    Resident {
        /// Lanes per team, a power of two from 4 to 1024.
        lanes: u32,
        /// Rows that a team reduces at the same time: 1, 2 or 4.
        x_rows: u32,
        /// Max sequence length.
        max_len: u32,
    },
    /// A CTA reads a row of any length twice: first for the row maximum and row sum (online softmax, Milakov and Gimelshein 2018), then for
    /// the result.
    Streamed,
}

/// Threads per CTA if a team is a warp or less. Small CTAs spread few rows over more SMs.
const WARP_TEAM_THREADS: u32 = 128;
/// Threads per CTA of the streamed form.
const STREAMED_THREADS: u32 = 256;
/// Max elements in a thread's registers, over all rows of its team.
const MAX_PER_THREAD: u32 = 64;

/// Default dispatch of [`AttentionSoftmax::variants`]: lanes per team, rows per team, and max row length in elements. The max length is one
/// pack (eight 16-bit elements) less than a team can hold, because an unaligned row touches one pack more than an aligned row.
const LADDER: [(u32, u32, u32); 5] = [
    (4, 1, 24),
    (16, 2, 120),
    (32, 1, 504),
    (32, 1, 1272),
    (256, 1, 8184),
];

impl SoftmaxForm {
    /// Checks that a kernel of this form can be generated for elements of `dtype`.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(self, dtype: DType) -> Result<(), AttentionError> {
        let fits = match self {
            Self::Streamed => true,
            Self::Resident {
                lanes,
                x_rows,
                max_len,
            } => {
                lanes.is_power_of_two()
                    && (4..=1024).contains(&lanes)
                    && [1, 2, 4].contains(&x_rows)
                    && (1..=lanes * MAX_PER_THREAD).contains(&max_len)
                    && packs(max_len, lanes, dtype) * vector(dtype) * x_rows <= MAX_PER_THREAD
            }
        };
        match fits {
            true => Ok(()),
            false => Err(AttentionError::SoftmaxForm { form: self, dtype }),
        }
    }

    /// Max sequence length that the form supports; `None` if unlimited.
    pub fn max_len(self) -> Option<u32> {
        match self {
            Self::Resident { max_len, .. } => Some(max_len),
            Self::Streamed => None,
        }
    }

    fn threads(self) -> u32 {
        match self {
            Self::Resident { lanes, .. } if lanes <= 32 => WARP_TEAM_THREADS,
            Self::Resident { lanes, .. } => lanes,
            Self::Streamed => STREAMED_THREADS,
        }
    }

    /// Rows per CTA.
    fn rows(self) -> u32 {
        match self {
            Self::Resident { lanes, x_rows, .. } => self.threads() / lanes * x_rows,
            Self::Streamed => 1,
        }
    }
}

/// Elements per pack. A pack is one 16-byte access.
fn vector(dtype: DType) -> u32 {
    16 / dtype.bytes() as u32
}

/// Returns the number of packs per lane for a row of `max_len` elements, which may start at any element of a pack.
fn packs(max_len: u32, lanes: u32, dtype: DType) -> u32 {
    let n = vector(dtype);
    (max_len + n - 1).div_ceil(n).div_ceil(lanes)
}

impl AttentionSoftmax {
    /// Creates the streamed form, for any length, without a mask.
    pub fn new(heads: u32, scale: f32, dtype: DType) -> Self {
        Self {
            heads,
            scale,
            dtype,
            mask: SoftmaxMask::None,
            form: SoftmaxForm::Streamed,
        }
    }

    /// Returns kernels without a mask for all lengths. Each entry is a max sequence length in tokens (inclusive) and the kernel for it. The
    /// last entry has no max.
    pub fn variants(heads: u32, scale: f32, dtype: DType) -> Vec<(Option<u64>, Self)> {
        Self::new(heads, scale, dtype).by_length()
    }

    /// Like [`AttentionSoftmax::variants`], but with the heads, the scale, the type and the mask of this kernel.
    pub fn by_length(&self) -> Vec<(Option<u64>, Self)> {
        let held = LADDER.map(|(lanes, x_rows, max_len)| {
            let form = SoftmaxForm::Resident {
                lanes,
                x_rows,
                max_len,
            };
            (Some(u64::from(max_len)), form)
        });
        held.into_iter()
            .chain([(None, SoftmaxForm::Streamed)])
            .map(|(longest, form)| {
                let kernel = Self {
                    form,
                    ..self.clone()
                };
                (longest, kernel)
            })
            .collect()
    }

    /// Returns the kernels that can replace this kernel: those of resident form with the same max length, followed by the kernel of
    /// streamed form. In a resident form, at least half of a team's lanes have work, or the team has four lanes. If this kernel is
    /// streamed, it is the only candidate.
    pub fn candidates(&self) -> Vec<Self> {
        let mut forms = Vec::new();
        if let Some(max_len) = self.form.max_len() {
            for lanes in (2..=10).map(|bits| 1 << bits) {
                let busy = max_len.div_ceil(vector(self.dtype));
                for x_rows in [1, 2, 4] {
                    let form = SoftmaxForm::Resident {
                        lanes,
                        x_rows,
                        max_len,
                    };
                    if (lanes == 4 || 2 * busy >= lanes) && form.check(self.dtype).is_ok() {
                        forms.push(form);
                    }
                }
            }
        }
        forms.push(SoftmaxForm::Streamed);
        forms
            .into_iter()
            .map(|form| Self {
                form,
                ..self.clone()
            })
            .collect()
    }
}

impl AttentionSoftmax {
    /// Returns `scale · log2(e)`, but returns the smallest normal number if this product is 0. Otherwise, the product of 0 and the −∞ of a
    /// masked key would be NaN. With the smallest normal number, all keys that are not masked get the same probability as with 0, if the
    /// magnitudes of scores are below 10³⁰.
    fn scale_log2(&self) -> f32 {
        match scale_log2(self.scale) {
            0.0 => f32::MIN_POSITIVE,
            scale => scale,
        }
    }
}

impl Kernel for AttentionSoftmax {
    facts! { dtype: self.dtype, class: Softmax }

    fn symbol(&self) -> String {
        let form = match self.form {
            SoftmaxForm::Resident {
                lanes,
                x_rows,
                max_len,
            } => format!("l{max_len}_lanes{lanes}_x{x_rows}"),
            SoftmaxForm::Streamed => "streamed".to_owned(),
        };
        format!(
            "attention_{}softmax_{}_h{}_{form}{}",
            match self.mask {
                SoftmaxMask::None => "",
                SoftmaxMask::Padding => "masked_",
                SoftmaxMask::Causal => "causal_",
            },
            self.dtype,
            self.heads,
            scale_suffix(self.scale, 1.0),
        )
    }

    fn template(&self) -> &'static str {
        match self.form {
            SoftmaxForm::Resident { .. } => "attention_softmax",
            SoftmaxForm::Streamed => "attention_softmax_streamed",
        }
    }

    fn constants(&self) -> Constants {
        let mut constants = Constants::from([
            ("storage", storage(self.dtype).into()),
            ("vector", vector(self.dtype).into()),
            ("scale_log2", f32_literal(self.scale_log2()).into()),
            ("masked", (self.mask == SoftmaxMask::Padding).into()),
            ("causal", (self.mask == SoftmaxMask::Causal).into()),
            (
                "valid_lens",
                match self.mask {
                    SoftmaxMask::Padding => "valid_lens",
                    SoftmaxMask::None | SoftmaxMask::Causal => "nullptr",
                }
                .into(),
            ),
        ]);
        if let SoftmaxForm::Resident {
            lanes,
            x_rows,
            max_len,
        } = self.form
        {
            constants.insert("lanes", lanes.into());
            constants.insert("x_rows", x_rows.into());
            constants.insert("packs", packs(max_len, lanes, self.dtype).into());
        }
        constants
    }

    fn params(&self) -> Vec<Param> {
        let mut all = vec![
            params::read("scores", self.dtype, pairs_shape(self.heads)),
            params::cu_lens(),
            params::pair_offsets(),
        ];
        if self.mask == SoftmaxMask::Padding {
            all.push(params::valid_lens());
        }
        all.push(params::write("out", self.dtype, pairs_shape(self.heads)));
        all.extend(params::batch_counts());
        all
    }

    fn max_len(&self) -> Option<u32> {
        self.form.max_len()
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.heads])?;
        limits::real("the scale", self.scale)?;
        self.form.check(self.dtype).map_err(|e| e.to_string())
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        Launch {
            // There are at most 2^24 tokens, so the number of CTAs fits in 32 bits.
            grid: [
                extents.tokens.div_ceil(self.form.rows().into()).max(1) as u32,
                self.heads,
                1,
            ],
            threads: self.form.threads(),
            shared_bytes: 0,
        }
    }

    fn threads(&self) -> u32 {
        self.form.threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let scores = reads[0].real();
        let (cu_lens, offsets) = (reads[1].index(), reads[2].index());
        let padded = self.mask == SoftmaxMask::Padding;
        let valid_lens = padded.then(|| reads[3].index());
        let mut out = vec![0.0; scores.len()];
        for h in 0..self.heads as usize {
            for (b, ends) in cu_lens.windows(2).enumerate() {
                let n = (ends[1] - ends[0]) as usize;
                let valid = valid_lens.map_or(n, |lens| lens[b] as usize);
                let first = h * extents.pairs as usize + offsets[b] as usize;
                for (query, start) in (first..first + n * n).step_by(n).enumerate() {
                    let valid = match self.mask {
                        SoftmaxMask::Causal => query + 1,
                        SoftmaxMask::None | SoftmaxMask::Padding => valid,
                    };
                    let row = start..start + valid;
                    let scaled = scores[row.clone()]
                        .iter()
                        .map(|&s| f64::from(self.scale) * f64::from(s));
                    for (to, p) in out[row].iter_mut().zip(softmax(scaled.collect(), None)) {
                        *to = p as f32;
                    }
                }
            }
        }
        vec![HostTensor::Real(out)]
    }

    /// Returns cases with lengths that the form supports, around the boundaries of packs, teams and CTAs.
    fn cases(&self) -> Vec<Case> {
        let mut cases = Case::standard();
        cases.push(Case::new("every_start", &(1..=17).collect::<Vec<u32>>()));
        cases.push(Case::new("equal", &[19; 5]));
        let edges = [16u32, 24, 32, 64, 120, 128, 256, 504, 512];
        let around: Vec<u32> = edges.iter().flat_map(|&n| [n + 1, n, n - 1]).collect();
        cases.push(Case::new("pack_edges", &around));
        // The loop of a warp's search (`find_rows`) has one iteration for 70 sequences, and two for 1100.
        for (name, n) in [("many", 70), ("very_many", 1100)] {
            let lens: Vec<u32> = (0..n).map(|i| 1 + i * 5 % 13).collect();
            cases.push(Case::new(name, &lens));
        }
        cases.push(Case::new("thousand", &[1023, 1, 1024, 1025]));
        let longest = self.form.max_len().unwrap_or(9001);
        if longest <= 1272 {
            let lens = [longest, 1, longest.saturating_sub(1), longest];
            cases.push(Case::new("longest", &lens));
        } else if self.heads <= 2 {
            // The length is limited to 3001, because the time of the reference is quadratic in the length.
            cases.push(Case::new("longest", &[3, longest.min(3001)]));
        }
        for case in &mut cases {
            case.lens.retain(|&n| (1..=longest).contains(&n));
        }
        cases.retain(|case| !case.lens.is_empty());
        cases
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            absolute: 1e-6,
            relative: rounding(self.dtype),
            reason: "one rounding to the stored type, in which small probabilities are subnormal",
        }
    }
}

/// Instances of every form of the default dispatch, with and without masks, and of other forms that the tuner may choose.
pub(super) fn representative(dtype: DType) -> Vec<KernelSpec> {
    let plain = AttentionSoftmax::new(2, 1.0, dtype);
    let masked = AttentionSoftmax {
        heads: 3,
        scale: 0.125,
        mask: SoftmaxMask::Padding,
        ..plain.clone()
    };
    let causal = AttentionSoftmax {
        mask: SoftmaxMask::Causal,
        ..plain.clone()
    };
    let mut kernels: Vec<AttentionSoftmax> = [&plain, &masked, &causal]
        .into_iter()
        .flat_map(|kernel| kernel.by_length().into_iter().map(|(_, kernel)| kernel))
        .collect();
    for (lanes, x_rows, max_len) in [
        (8, 4, 41),
        (16, 4, 120),
        (32, 2, 504),
        (32, 4, 240),
        (64, 2, 700),
        (128, 4, 1000),
        (64, 1, 2000),
        (1024, 1, 8184),
    ] {
        let form = SoftmaxForm::Resident {
            lanes,
            x_rows,
            max_len,
        };
        kernels.push(AttentionSoftmax {
            form,
            ..plain.clone()
        });
    }
    kernels.into_iter().map(KernelSpec::from).collect()
}
