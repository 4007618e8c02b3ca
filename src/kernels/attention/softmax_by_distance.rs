//! The softmax between the two matrix products of unfused attention, with a [`PositionBias`]: soft cap, window, bias by distance, sinks.

use serde::{Deserialize, Serialize};

use super::{
    SoftmaxMask,
    common::{pairs_shape, rounding, softmax},
    params, position_bias, storage,
    view::scale_suffix,
};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance,
        attention::position_bias::PositionBiasCode, limits,
    },
    machine::Machine,
    ops::PositionBias,
    tensor::{DType, Extents},
};

/// `scores [heads, pairs]`, (`bias`), (`sinks [heads]`), `cu_lens`, `pair_offsets`, (`valid_lens [batch]`) → `out [heads, pairs]`: softmax
/// of the scores with their [`PositionBias`], over the keys that each query attends to. This is the plain kernel, with one warp per row.
/// Fused attention kernels compute this softmax themselves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SoftmaxByDistance {
    pub heads: u32,
    pub scale: f32,
    pub mask: SoftmaxMask,
    pub by: PositionBias,
    pub dtype: DType,
}

/// Warps per CTA.
const WARPS: u32 = 4;

impl Kernel for SoftmaxByDistance {
    facts! { template: "attention_softmax_by_distance", dtype: self.dtype, class: Softmax }

    fn symbol(&self) -> String {
        format!(
            "attention_{}softmax_{}_h{}{}{}",
            match self.mask {
                SoftmaxMask::None => "",
                SoftmaxMask::Padding => "masked_",
                SoftmaxMask::Causal => "causal_",
            },
            self.dtype,
            self.heads,
            self.by.suffix(),
            scale_suffix(self.scale, 1.0),
        )
    }

    fn constants(&self) -> Constants {
        let mut constants = Constants::from([
            ("storage", storage(self.dtype).into()),
            ("warps", WARPS.into()),
            ("causal", (self.mask == SoftmaxMask::Causal).into()),
            ("masked", (self.mask == SoftmaxMask::Padding).into()),
        ]);
        constants.extend(self.by.constants("head", self.scale));
        constants
    }

    fn params(&self) -> Vec<Param> {
        let mut all = vec![params::read("scores", self.dtype, pairs_shape(self.heads))];
        all.extend(self.by.params(self.heads, self.dtype));
        all.extend([params::cu_lens(), params::pair_offsets()]);
        if self.mask == SoftmaxMask::Padding {
            all.push(params::valid_lens());
        }
        all.push(params::write("out", self.dtype, pairs_shape(self.heads)));
        let [batch, tokens, _] = params::batch_counts();
        all.extend([batch, tokens]);
        all
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.heads])?;
        limits::real("the scale", self.scale)?;
        self.by.check().map_err(|e| e.to_string())
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        Launch {
            // There are at most 2^24 tokens, so the number of CTAs fits in 32 bits.
            grid: [
                extents.tokens.div_ceil(WARPS.into()).max(1) as u32,
                self.heads,
                1,
            ],
            threads: self.threads(),
            shared_bytes: 0,
        }
    }

    fn threads(&self) -> u32 {
        WARPS * 32
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let scores = reads[0].real();
        let mut metas = &reads[1..];
        let operands = self.by.take(&mut metas);
        let (cu_lens, offsets) = (metas[0].index(), metas[1].index());
        let padded = self.mask == SoftmaxMask::Padding;
        let valid_lens = padded.then(|| metas[2].index());
        let causal = self.mask == SoftmaxMask::Causal;
        let mut out = vec![0.0; scores.len()];
        for h in 0..self.heads as usize {
            for (b, ends) in cu_lens.windows(2).enumerate() {
                let n = (ends[1] - ends[0]) as usize;
                let valid = valid_lens.map_or(n, |lens| lens[b] as usize);
                let first = h * extents.pairs as usize + offsets[b] as usize;
                for query in 0..n {
                    let seen = self.by.seen(causal, query, valid);
                    // The window of a query that is padding may contain only masked keys.
                    if seen.is_empty() {
                        continue;
                    }
                    let row = first + query * n;
                    let scaled = seen.clone().map(|key| {
                        let scaled = f64::from(self.scale) * f64::from(scores[row + key]);
                        let distance = key as i64 - query as i64;
                        self.by.score(scaled, operands.biases, h, distance)
                    });
                    let probabilities = softmax(scaled.collect(), operands.sink(h));
                    for (to, p) in out[row + seen.start..row + seen.end]
                        .iter_mut()
                        .zip(probabilities)
                    {
                        *to = p as f32;
                    }
                }
            }
        }
        vec![HostTensor::Real(out)]
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = Case::standard();
        cases.push(Case::new("edges", &[31, 32, 33, 200, 1]));
        cases
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            absolute: 2e-5,
            relative: rounding(self.dtype),
            reason: "exponents of up to about 60 with 2^-24 each, and one rounding to the stored type",
        }
    }
}

/// Instances with windows, biases and caps of every kind, and with every mask.
pub(super) fn representative(dtype: DType) -> Vec<KernelSpec> {
    let all = position_bias::examples().into_iter().enumerate();
    let kernels = all.map(|(nth, (causal, by))| SoftmaxByDistance {
        heads: 3,
        scale: if nth == 0 { 1.0 } else { 0.125 },
        mask: match causal {
            true => SoftmaxMask::Causal,
            false if nth == 2 => SoftmaxMask::Padding,
            false => SoftmaxMask::None,
        },
        by,
        dtype,
    });
    kernels.map(KernelSpec::from).collect()
}
