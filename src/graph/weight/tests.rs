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

/// Returns the outputs of a linear layer after the norm, for the normalized row `z`.
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
