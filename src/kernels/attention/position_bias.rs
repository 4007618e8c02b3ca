//! Operand, constants and symbols of position biases.

use crate::{
    kernels::{Constant, Fill, Param, Role, f32_literal},
    ops::{Bias, PositionBias},
    tensor::{DType, Shape, Size},
};

pub(in crate::kernels) trait PositionBiasCode {
    /// Parameter of the bias operand, if there is one.
    fn params(&self, heads: u32, dtype: DType) -> Option<Param>;

    /// Suffix of a symbol that names the window and the bias; empty without either.
    fn suffix(&self) -> String;

    /// Constants of `partials/attention_by_distance.cu`, and the factor applied to scores in the base-2 softmax. If there is a
    /// bias, scores are scaled before it is added. `head` is the CUDA expression for a head's index.
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
        [window, bias].into_iter().flatten().collect()
    }

    fn constants(&self, head: &str, scale: f32) -> Vec<(&'static str, Constant)> {
        let log2 = f32_literal(super::view::scale_log2(scale));
        let reach = match self.bias {
            Some(Bias::Table { reach }) => reach,
            Some(Bias::Slopes) | None => 0,
        };
        let scale_log2 = match self.bias {
            Some(_) => f32_literal(1.0),
            None => log2.clone(),
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
            ("score_log2", log2.into()),
            ("scale_log2", scale_log2.into()),
        ]
    }
}

/// Windows and biases, alone and together, causal and not, for tests that compile or run kernels.
pub(in crate::kernels) fn examples() -> [(bool, PositionBias); 5] {
    let by = |window, bias| PositionBias { window, bias };
    [
        (false, by(None, Some(Bias::Table { reach: 128 }))),
        (true, by(None, Some(Bias::Table { reach: 20 }))),
        (false, by(Some(64), None)),
        (true, by(Some(37), None)),
        (false, by(Some(100), Some(Bias::Slopes))),
    ]
}
