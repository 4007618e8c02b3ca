//! Operand, constants and symbols of soft caps, windows and biases.

use crate::{
    kernels::{Constant, Fill, Param, Role, f32_literal, rows::word},
    ops::{Bias, PositionBias, SoftCap},
    tensor::{DType, Shape, Size},
};

pub(in crate::kernels) trait PositionBiasCode {
    /// Parameter of the bias operand; `None` without a bias.
    fn params(&self, heads: u32, dtype: DType) -> Option<Param>;

    /// Suffix of a symbol that names the window, the bias and the cap; empty without them.
    fn suffix(&self) -> String;

    /// Constants of `partials/attention_by_distance.cu`, and the factor of the scores in the base-2 softmax. With a bias or a cap, this
    /// factor is 1, because the scores are already scaled before the bias or cap is applied. `head` is the CUDA expression for a head's
    /// index.
    fn constants(&self, head: &str, scale: f32) -> Vec<(&'static str, Constant)>;
}

impl PositionBiasCode for PositionBias {
    fn params(&self, heads: u32, dtype: DType) -> Option<Param> {
        let bias = self.bias?;
        let fill = match bias {
            Bias::Table { .. } => Fill::ACTIVATION,
            Bias::Slopes => Fill::Normal {
                mean: 0.05,
                deviation: 0.02,
            },
        };
        let dims = bias.dims(heads).into_iter().map(Size::constant);
        Some(Param {
            name: "bias",
            role: Role::Read {
                element: dtype.into(),
                shape: Shape(dims.collect()),
                fill,
            },
        })
    }

    fn suffix(&self) -> String {
        let window = self.window.map(|window| format!("_window{window}"));
        let bias = self.bias.map(|bias| match bias {
            Bias::Table { reach } => format!("_bias{reach}"),
            Bias::Slopes => "_slopes".to_owned(),
        });
        let cap = self.cap.map(|cap| format!("_cap{}", word(cap.get())));
        [window, bias, cap].into_iter().flatten().collect()
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
            ("by_distance", (!self.is_none()).into()),
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

/// Examples for tests that compile or run kernels: windows, biases and caps, alone and combined, for causal and full attention. The caps
/// are low enough to change random scores.
pub(in crate::kernels) fn examples() -> [(bool, PositionBias); 8] {
    let by = |window, bias| PositionBias {
        window,
        bias,
        cap: None,
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
