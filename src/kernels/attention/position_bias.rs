//! Parameters, template constants and symbols of a [`PositionBias`]: soft caps, windows, biases and sinks.

use crate::{
    kernels::{Constant, Fill, HostTensor, Param, Role, f32_literal, rows::word},
    ops::{Bias, PositionBias, SoftCap},
    tensor::{DType, Shape, Size},
};

/// Values of the parameters `bias` and `sinks`. If the kernel lacks one of these parameters, the corresponding slice is empty.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct ScoreOperands<'a> {
    pub biases: &'a [f32],
    sinks: &'a [f32],
}

impl ScoreOperands<'_> {
    /// Logit of the sink of a head, if there is one.
    pub fn sink(&self, head: usize) -> Option<f64> {
        self.sinks.get(head).map(|&sink| sink.into())
    }
}

pub(in crate::kernels) trait PositionBiasCode {
    /// Returns the parameters `bias` and `sinks`, each only if there is one.
    fn params(&self, heads: u32, dtype: DType) -> Vec<Param>;

    /// Takes the operands of [`params`](Self::params) from the start of `reads`.
    fn take<'a>(&self, reads: &mut &[&'a HostTensor]) -> ScoreOperands<'a>;

    /// Returns the part of a kernel's symbol that names the window, the bias, the cap and the sinks; empty without them.
    fn suffix(&self) -> String;

    /// Returns the constants of `partials/attention_by_distance.cu` and of the attention templates. The constant `sinks` is whether there
    /// are sinks. The constant `scale_log2` is the factor by which the base-2 softmax multiplies scores. With a bias or a cap, this factor
    /// is 1, because the scores are scaled before the bias or cap is applied. The argument `head` is the CUDA expression for the index of a
    /// head.
    fn constants(&self, head: &str, scale: f32) -> Vec<(&'static str, Constant)>;
}

impl PositionBiasCode for PositionBias {
    fn params(&self, heads: u32, dtype: DType) -> Vec<Param> {
        let param = |name, dims: Vec<u64>, fill| Param {
            name,
            role: Role::Read {
                element: dtype.into(),
                shape: Shape(dims.into_iter().map(Size::constant).collect()),
                fill,
            },
        };
        let normal = |mean, deviation| Fill::Normal { mean, deviation };
        let bias = self.bias.map(|bias| {
            let fill = match bias {
                Bias::Table { .. } => Fill::ACTIVATION,
                Bias::Slopes => normal(0.05, 0.02),
            };
            param("bias", bias.dims(heads), fill)
        });
        // In checks, sinks are about the logarithm of the number of keys, so they take a large part of the softmax weights.
        let sinks = self
            .sinks
            .then(|| param("sinks", vec![heads.into()], normal(3.0, 2.0)));
        bias.into_iter().chain(sinks).collect()
    }

    fn take<'a>(&self, reads: &mut &[&'a HostTensor]) -> ScoreOperands<'a> {
        let mut next = |exists: bool| match reads.split_first() {
            Some((first, rest)) if exists => {
                *reads = rest;
                first.real()
            }
            _ => &[],
        };
        ScoreOperands {
            biases: next(self.bias.is_some()),
            sinks: next(self.sinks),
        }
    }

    fn suffix(&self) -> String {
        let window = self.window.map(|window| format!("_window{window}"));
        let bias = self.bias.map(|bias| match bias {
            Bias::Table { reach } => format!("_bias{reach}"),
            Bias::Slopes => "_slopes".to_owned(),
        });
        let cap = self.cap.map(|cap| format!("_cap{}", word(cap.get())));
        let sinks = self.sinks.then(|| "_sinks".to_owned());
        [window, bias, cap, sinks].into_iter().flatten().collect()
    }

    fn constants(&self, head: &str, scale: f32) -> Vec<(&'static str, Constant)> {
        let log2 = f32_literal(super::view::scale_log2(scale));
        let reach = match self.bias {
            Some(Bias::Table { reach }) => reach,
            Some(Bias::Slopes) | None => 0,
        };
        let scale_log2 = match self.adjusts() {
            true => f32_literal(1.0),
            false => log2.clone(),
        };
        vec![
            ("by_distance", (!self.keeps_scores()).into()),
            ("sinks", self.sinks.into()),
            (
                "by_distance_of",
                match self.bias {
                    Some(_) => format!("(bias, {head})"),
                    None => "{}".to_owned(),
                }
                .into(),
            ),
            (
                "first_key",
                if self.window.is_some() { "from" } else { "0" }.into(),
            ),
            ("windowed", self.window.is_some().into()),
            ("window", self.window.unwrap_or(0).into()),
            (
                "bias",
                match self.bias {
                    Some(Bias::Table { .. }) => "table",
                    Some(Bias::Slopes) => "slopes",
                    None => "none",
                }
                .into(),
            ),
            ("reach", reach.into()),
            ("adjusts", self.adjusts().into()),
            ("capped", self.cap.is_some().into()),
            ("score_log2", log2.into()),
            ("scale_log2", scale_log2.into()),
        ]
        .into_iter()
        .chain(self.cap.into_iter().flat_map(|cap| {
            let by_cap = f64::from(scale) / f64::from(cap.get());
            let twice_log2 = (2.0 * by_cap * std::f64::consts::LOG2_E) as f32;
            [
                ("score_by_cap", f32_literal(by_cap as f32).into()),
                ("score_by_cap_2_log2", f32_literal(twice_log2).into()),
                (
                    "cap_log2",
                    f32_literal(super::view::scale_log2(cap.get())).into(),
                ),
            ]
        }))
        .collect()
    }
}

/// Returns examples for tests that compile or run kernels. They have windows, biases and caps, alone and combined. The caps are low enough
/// to change random scores. The `bool` of an example is whether its attention is causal.
pub(in crate::kernels) fn examples() -> [(bool, PositionBias); 8] {
    let by = |window, bias| PositionBias {
        window,
        bias,
        ..PositionBias::default()
    };
    let capped = |window, bias, cap| PositionBias {
        cap: Some(SoftCap::new(cap).expect("it is in range")),
        ..by(window, bias)
    };
    [
        (false, by(None, Some(Bias::Table { reach: 128 }))),
        (true, by(None, Some(Bias::Table { reach: 20 }))),
        (false, by(Some(64), None)),
        (true, by(Some(37), None)),
        (false, by(Some(100), Some(Bias::Slopes))),
        (true, capped(None, None, 1.5)),
        (false, capped(Some(64), None, 0.75)),
        (true, capped(Some(37), Some(Bias::Table { reach: 20 }), 2.0)),
    ]
}
