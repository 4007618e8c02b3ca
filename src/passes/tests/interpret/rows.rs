//! Reference implementations of the operators on rows and on single elements, and a sample of each of these operators.

use crate::{
    graph::Op,
    ops::{Activation, SoftCap, activate_f64},
};

/// Returns every operator of this file, with attributes that fit rows of 9 or 16 elements.
pub fn samples() -> Vec<Op> {
    let eps = 1e-3;
    let norm = |heads, from, centered| Op::RmsNorm {
        eps,
        heads,
        from,
        centered,
    };
    let mut ops = vec![
        Op::AddBias,
        Op::Add,
        Op::Multiply,
        Op::Scale { by: -0.5 },
        Op::SoftCap(SoftCap::new(2.5).unwrap()),
        Op::LayerNorm { eps },
        norm(1, 0, false),
        norm(2, 3, false),
        norm(3, 3, true),
        Op::L2Normalize { eps },
        Op::BiasResidualLayerNorm { eps, bias: false },
        Op::BiasResidualLayerNorm { eps, bias: true },
        Op::Concat { parts: 2 },
        Op::Concat { parts: 3 },
        Op::SliceColumns { start: 0, width: 4 },
        Op::SliceColumns { start: 3, width: 6 },
    ];
    ops.extend(Activation::ALL.map(Op::Activate));
    ops.extend(Activation::ALL.map(Op::Gate));
    ops
}

pub(super) fn apply(op: &Op, reads: &[&[f64]], widths: &[usize]) -> Vec<f64> {
    match op {
        Op::AddBias => add_bias(reads[0], reads[1]),
        Op::Add => add(reads[0], reads[1]),
        Op::Multiply => reads[0].iter().zip(reads[1]).map(|(a, b)| a * b).collect(),
        Op::RmsNorm {
            eps,
            heads,
            from,
            centered,
        } => {
            let columns = *from as usize..*from as usize + *heads as usize * widths[1];
            let x = rows(reads[0], widths[0], |row| row[columns.clone()].to_vec());
            super::heads::norm(&x, reads[1], widths[1], f64::from(*eps), *centered)
        }
        Op::Activate(activation) => reads[0]
            .iter()
            .map(|&v| activate_f64(*activation, v))
            .collect(),
        Op::Gate(activation) => rows(reads[0], widths[0], |row| {
            let (gate, up) = row.split_at(row.len() / 2);
            let gate = gate.iter().map(|&v| activate_f64(*activation, v));
            gate.zip(up).map(|(g, u)| g * u).collect()
        }),
        Op::Scale { by } => reads[0].iter().map(|v| f64::from(*by) * v).collect(),
        Op::SoftCap(cap) => {
            let cap = f64::from(cap.get());
            reads[0].iter().map(|v| cap * (v / cap).tanh()).collect()
        }
        Op::LayerNorm { eps } => layer_norm(reads[0], reads[1], reads[2], *eps),
        Op::Concat { .. } => {
            let n_rows = reads[0].len() / widths[0];
            let row = |r: usize| {
                let parts = reads.iter().zip(widths);
                parts.flat_map(move |(part, &width)| &part[r * width..][..width])
            };
            (0..n_rows).flat_map(row).copied().collect()
        }
        Op::L2Normalize { eps } => l2_normalize(reads[0], widths[0], *eps),
        Op::SliceColumns { start, width } => rows(reads[0], widths[0], |row| {
            row[*start as usize..][..*width as usize].to_vec()
        }),
        Op::BiasResidualLayerNorm { eps, bias } => {
            let mut x = reads[0].to_vec();
            if *bias {
                x = add_bias(&x, reads[1]);
            }
            let rest = &reads[1 + usize::from(*bias)..];
            layer_norm(&add(&x, rest[0]), rest[1], rest[2], *eps)
        }
        other => unreachable!("{other} is interpreted before"),
    }
}

pub(super) fn rows(x: &[f64], width: usize, f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    x.chunks(width).flat_map(f).collect()
}

pub(super) fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

pub(super) fn add_bias(x: &[f64], bias: &[f64]) -> Vec<f64> {
    rows(x, bias.len(), |row| add(row, bias))
}

pub(super) fn layer_norm(x: &[f64], gamma: &[f64], beta: &[f64], eps: f32) -> Vec<f64> {
    let n = gamma.len();
    rows(x, n, |row| {
        let mean = row.iter().sum::<f64>() / n as f64;
        let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64;
        let norm = (variance + f64::from(eps)).sqrt();
        (0..n)
            .map(|i| (row[i] - mean) / norm * gamma[i] + beta[i])
            .collect()
    })
}

pub(super) fn l2_normalize(x: &[f64], width: usize, eps: f32) -> Vec<f64> {
    rows(x, width, |row| {
        let norm = row.iter().map(|v| v * v).sum::<f64>().sqrt();
        row.iter().map(|v| v / norm.max(f64::from(eps))).collect()
    })
}
