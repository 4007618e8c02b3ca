//! Bounds on values, computed from the weights of a model.

use serde::{Deserialize, Serialize};

use super::{WeightExpr, weight::parts};

/// A bound on the magnitude of a value that is computed from a norm, whatever the norm's input.
///
/// A normalized row of `n` elements has a Euclidean norm of at most `√n`. By the Cauchy–Schwarz inequality, an output of a linear
/// layer with the row `w` of its weight is at most `√n · ‖w ∘ gamma‖ + |w · beta + bias|`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Bound {
    /// Weight of the norm.
    #[serde(deserialize_with = "parts")]
    pub gamma: Vec<WeightExpr>,
    /// Bias of the norm. Empty if there is none.
    #[serde(deserialize_with = "parts")]
    pub beta: Vec<WeightExpr>,
    /// The linear layer after the norm, if the value is its result.
    pub linear: Option<BoundLinear>,
}

/// The linear layer of a [`Bound`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BoundLinear {
    #[serde(deserialize_with = "parts")]
    pub weight: Vec<WeightExpr>,
    /// Empty if there is none.
    #[serde(deserialize_with = "parts")]
    pub bias: Vec<WeightExpr>,
    /// The first of the outputs that the value depends on.
    pub from: u64,
    /// How many outputs the value depends on.
    pub outputs: u64,
    /// Whether the value is a gate: the product of the first half of the outputs with the second.
    pub gated: bool,
}

impl Bound {
    /// Returns the weights of which the bound is computed.
    pub(super) fn parts(&self) -> impl Iterator<Item = &WeightExpr> {
        let linear = self.linear.iter();
        let linear = linear.flat_map(|linear| linear.weight.iter().chain(&linear.bias));
        self.gamma.iter().chain(&self.beta).chain(linear)
    }

    /// Returns the largest magnitude that the value can have, from the values of the weights.
    ///
    /// A sixteenth more than the bound allows for the rounding of a factor to E4M3, which changes it by at most a sixteenth.
    pub fn of(&self, gamma: &[f32], beta: &[f32], weight: &[f32], bias: &[f32]) -> f64 {
        let n = gamma.len();
        let root = (n as f64).sqrt();
        let beta = |c: usize| beta.get(c).map_or(0.0, |&b| f64::from(b));
        let Some(linear) = &self.linear else {
            let columns = gamma.iter().enumerate();
            let bounds = columns.map(|(c, &g)| root * f64::from(g.abs()) + beta(c).abs());
            return bounds.fold(0.0, f64::max);
        };
        const ROUNDING: f64 = 17.0 / 16.0;
        let output = |row: usize| {
            let weight = weight[row * n..][..n].iter().zip(gamma).enumerate();
            let (mut square, mut constant) = (0.0, 0.0);
            for (c, (&w, &g)) in weight {
                square += (f64::from(w) * f64::from(g)).powi(2);
                constant += f64::from(w) * beta(c);
            }
            let bias = bias.get(row).map_or(0.0, |&b| f64::from(b));
            ROUNDING * ROUNDING * (root * square.sqrt() + (constant + bias).abs())
        };
        let (from, outputs) = (linear.from as usize, linear.outputs as usize);
        let bounds: Vec<f64> = (from..from + outputs).map(output).collect();
        match linear.gated {
            true => {
                let (gates, ups) = bounds.split_at(outputs / 2);
                let products = gates.iter().zip(ups).map(|(a, b)| a * b);
                products.fold(0.0, f64::max)
            }
            false => bounds.into_iter().fold(0.0, f64::max),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTH: usize = 5;
    const GAMMA: [f32; WIDTH] = [0.5, -2.0, 1.0, 0.0, 1.5];
    const BETA: [f32; WIDTH] = [0.25, 0.0, -1.0, 0.5, 0.0];

    fn bound(linear: Option<BoundLinear>) -> Bound {
        Bound {
            gamma: Vec::new(),
            beta: Vec::new(),
            linear,
        }
    }

    /// The values of outputs with these weights for a normalized row.
    fn outputs(z: &[f64], weight: &[f32], bias: &[f32]) -> Vec<f64> {
        let of_row = |(row, bias): (&[f32], &f32)| {
            let products = (0..WIDTH).map(|c| {
                let x = z[c] * f64::from(GAMMA[c]) + f64::from(BETA[c]);
                x * f64::from(row[c])
            });
            products.sum::<f64>() + f64::from(*bias)
        };
        weight.chunks(WIDTH).zip(bias).map(of_row).collect()
    }

    #[test]
    fn the_bound_of_a_norm_is_reached_by_a_row_with_one_large_element() {
        // The largest of √5 · |gamma| + |beta| is that of the second column.
        let want = 5f64.sqrt() * 2.0;
        let got = bound(None).of(&GAMMA, &BETA, &[], &[]);
        assert!((got - want).abs() < 1e-9, "{got}, expected {want}");
    }

    #[test]
    fn the_bound_of_a_linear_layer_is_reached_by_the_row_along_its_weight() {
        let weight = [0.5, 1.0, -1.0, 2.0, 0.25, 3.0, -0.5, 0.0, 1.0, -2.0];
        let bias = [0.5, -0.25];
        let linear = |from, outputs, gated| {
            Some(BoundLinear {
                weight: Vec::new(),
                bias: Vec::new(),
                from,
                outputs,
                gated,
            })
        };
        let rounding = (17.0f64 / 16.0).powi(2);
        let mut reached = Vec::new();
        for row in 0..2 {
            let of_row = &weight[row * WIDTH..][..WIDTH];
            let along: Vec<f64> = (0..WIDTH)
                .map(|c| f64::from(of_row[c] * GAMMA[c]))
                .collect();
            let norm = along.iter().map(|v| v * v).sum::<f64>().sqrt();
            let values = [1.0, -1.0].map(|sign| {
                let z: Vec<f64> = along
                    .iter()
                    .map(|v| sign * v / norm * 5f64.sqrt())
                    .collect();
                outputs(&z, of_row, &bias[row..])[0].abs()
            });
            let largest = values[0].max(values[1]);
            let got = bound(linear(row as u64, 1, false)).of(&GAMMA, &BETA, &weight, &bias);
            assert!(
                (got - rounding * largest).abs() < 1e-9,
                "{got} for {largest}"
            );
            reached.push(got);
        }
        let both = bound(linear(0, 2, false)).of(&GAMMA, &BETA, &weight, &bias);
        assert_eq!(both, reached[0].max(reached[1]));
        let gate = bound(linear(0, 2, true)).of(&GAMMA, &BETA, &weight, &bias);
        assert_eq!(gate, reached[0] * reached[1]);
    }
}
