use super::*;
use crate::kernels::elementwise::*;
use crate::kernels::embedding::{Embedding, EmbeddingLayerNorm, Table};
use crate::kernels::layernorm::{BiasResidualLayerNorm, LayerNorm};
use crate::ops::{Activation, BatchInput};

/// Numbers of rows and columns: columns around the width of a vector, with and without a tail, and enough rows for several threads.
const SHAPES: [(usize, usize); 6] = [(1, 1), (3, 7), (5, 16), (4, 33), (7, 384), (200, 400)];

fn extents(rows: usize) -> Extents {
    Batch::new(&[1]).extents.with_rows(rows as u64)
}

#[test]
fn add_bias_adds_one_bias_to_every_row() {
    for (rows, width) in SHAPES {
        let (x, bias) = (noise(rows * width, 1), noise(width, 2));
        let spec = KernelSpec::AddBias(AddBias {
            width: width as u32,
            dtype: F32,
        });
        let reads = [Read::Real(&x), Read::Real(&bias)];
        let got = output(&spec, &extents(rows), &reads, rows * width);
        let want: Vec<f32> = (0..rows * width).map(|i| x[i] + bias[i % width]).collect();
        assert_eq!(got, want);
    }
}

#[test]
fn add_is_the_sum_of_elements() {
    for (rows, width) in SHAPES {
        let (a, b) = (noise(rows * width, 1), noise(rows * width, 2));
        let spec = KernelSpec::Combine(Combine {
            how: BinaryOp::Sum,
            width: width as u32,
            dtype: F32,
        });
        let reads = [Read::Real(&a), Read::Real(&b)];
        let got = output(&spec, &extents(rows), &reads, rows * width);
        let want: Vec<f32> = (0..rows * width).map(|i| a[i] + b[i]).collect();
        assert_eq!(got, want);
    }
}

#[test]
fn scale_multiplies_every_element() {
    for (rows, width) in SHAPES {
        let x = noise(rows * width, 1);
        let spec = KernelSpec::Scale(Scale {
            by: -0.3,
            width: width as u32,
            dtype: F32,
        });
        let got = output(&spec, &extents(rows), &[Read::Real(&x)], rows * width);
        let want: Vec<f32> = x.iter().map(|x| x * -0.3).collect();
        assert_eq!(got, want);
    }
}

fn activated(activation: Activation, x: &[f32]) -> Vec<f32> {
    let spec = KernelSpec::Activate(Activate {
        activation,
        width: x.len() as u32,
        dtype: F32,
    });
    output(&spec, &extents(1), &[Read::Real(x)], x.len())
}

/// Returns the numbers from −8 to 8 in steps of a thousandth.
fn grid() -> Vec<f32> {
    (-8000..=8000).map(|i| i as f32 / 1000.0).collect()
}

#[test]
fn activations_are_within_a_millionth_of_their_definitions() {
    let x = grid();
    type Definition = fn(f64) -> f64;
    let cases: [(Activation, Definition); 4] = [
        (Activation::GeluExact, gelu_exact),
        (Activation::GeluTanh, gelu_tanh),
        (Activation::Relu, |x| x.max(0.0)),
        (Activation::Tanh, f64::tanh),
    ];
    for (activation, definition) in cases {
        let got = activated(activation, &x);
        for (&x, &got) in x.iter().zip(&got) {
            let want = definition(f64::from(x));
            assert!(
                (f64::from(got) - want).abs() < 1e-6,
                "{activation:?}({x}): got {got}, want {want}"
            );
        }
    }
}

#[test]
fn activations_of_huge_values_are_their_limits() {
    let x = [1e30, -1e30, f32::INFINITY, f32::NEG_INFINITY];
    let linear = [1e30, 0.0, f32::INFINITY, 0.0];
    assert_eq!(activated(Activation::GeluExact, &x), linear);
    assert_eq!(activated(Activation::GeluTanh, &x), linear);
    assert_eq!(activated(Activation::Relu, &x), linear);
    for (got, want) in activated(Activation::Tanh, &x)
        .iter()
        .zip([1.0, -1.0, 1.0, -1.0])
    {
        assert!((got - want).abs() < 1e-6, "got {got}, want {want}");
    }
}

#[test]
fn activations_keep_nan() {
    // Test NaN in a whole vector and in a tail.
    for n in [16, 3] {
        let x = vec![f32::NAN; n];
        for activation in [
            Activation::GeluExact,
            Activation::GeluTanh,
            Activation::Relu,
            Activation::Tanh,
        ] {
            let got = activated(activation, &x);
            assert!(got.iter().all(|x| x.is_nan()), "{activation:?}: {got:?}");
        }
    }
}

#[test]
fn slice_columns_takes_columns_of_every_row() {
    for (start, width) in [(0, 3), (4, 6), (9, 1), (0, 10)] {
        let x = noise(7 * 10, 1);
        let spec = KernelSpec::SliceColumns(SliceColumns {
            from_width: 10,
            start,
            width,
            dtype: F32,
        });
        let (start, width) = (start as usize, width as usize);
        let got = output(&spec, &extents(7), &[Read::Real(&x)], 7 * width);
        let want: Vec<f32> = (0..7 * width)
            .map(|i| x[i / width * 10 + start + i % width])
            .collect();
        assert_eq!(got, want);
    }
}

#[test]
fn concat_lays_rows_side_by_side() {
    for widths in [vec![3, 4], vec![1, 7, 2], (1..=16).collect()] {
        let parts: Vec<Vec<f32>> = widths
            .iter()
            .map(|&width: &u32| noise(7 * width as usize, width.into()))
            .collect();
        let reads: Vec<Read<'_>> = parts.iter().map(|part| Read::Real(part)).collect();
        let want: Vec<f32> = (0..7)
            .flat_map(|row| {
                let parts = parts.iter().zip(&widths);
                parts.flat_map(move |(part, &w)| &part[row * w as usize..][..w as usize])
            })
            .copied()
            .collect();
        let dtype = F32;
        let spec = KernelSpec::Concat(Concat { widths, dtype });
        assert_eq!(output(&spec, &extents(7), &reads, want.len()), want);
    }
}

#[test]
fn split_heads_moves_heads_before_tokens_and_merge_heads_moves_them_back() {
    for batch in batches() {
        let (heads, head, tokens) = (3, 5, batch.tokens());
        let n = heads * head * tokens;
        let x = noise(n, 1);
        let split = KernelSpec::SplitHeads(SplitHeads {
            heads: 3,
            head: 5,
            dtype: F32,
        });
        let merge = KernelSpec::MergeHeads(MergeHeads {
            heads: 3,
            head: 5,
            dtype: F32,
        });
        let got = output(&split, &batch.extents, &[Read::Real(&x)], n);
        for h in 0..heads {
            for t in 0..tokens {
                for c in 0..head {
                    assert_eq!(
                        got[(h * tokens + t) * head + c],
                        x[(t * heads + h) * head + c]
                    );
                }
            }
        }
        let back = output(&merge, &batch.extents, &[Read::Real(&got)], n);
        assert_eq!(back, x);
    }
}

fn layer_norm(rows: &[f64], gamma: &[f32], beta: &[f32], eps: f64) -> Vec<f64> {
    let width = gamma.len();
    let mut out = Vec::new();
    for row in rows.chunks_exact(width) {
        let mean = row.iter().sum::<f64>() / width as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
        for (i, x) in row.iter().enumerate() {
            let unit = (x - mean) / (variance + eps).sqrt();
            out.push(unit * f64::from(gamma[i]) + f64::from(beta[i]));
        }
    }
    out
}

#[test]
fn layernorm_is_its_definition() {
    for (rows, width) in SHAPES {
        let x = noise(rows * width, 1);
        let (gamma, beta) = (noise(width, 2), noise(width, 3));
        let spec = KernelSpec::LayerNorm(LayerNorm::new(width as u32, 1e-5, F32));
        let reads = [Read::Real(&x), Read::Real(&gamma), Read::Real(&beta)];
        let got = output(&spec, &extents(rows), &reads, rows * width);
        let want = layer_norm(&wide(&x), &gamma, &beta, f64::from(1e-5_f32));
        assert_close(&got, &want, 2e-6);
    }
}

#[test]
fn layernorm_keeps_its_digits_far_from_zero() {
    // For these values, the mean of squares minus the square of the mean would lose the variance of 1/3 by cancellation.
    let x: Vec<f32> = noise(4 * 384, 1).iter().map(|x| x + 4096.0).collect();
    let (gamma, beta) = (vec![1.0; 384], vec![0.0; 384]);
    let spec = KernelSpec::LayerNorm(LayerNorm::new(384, 1e-12, F32));
    let reads = [Read::Real(&x), Read::Real(&gamma), Read::Real(&beta)];
    let got = output(&spec, &extents(4), &reads, x.len());
    // The mean is near 4096, where it is rounded to f32 with an error of up to half of 2⁻¹¹.
    assert_close(&got, &layer_norm(&wide(&x), &gamma, &beta, 1e-12), 1e-3);
}

#[test]
fn bias_residual_layernorm_normalizes_the_sum() {
    for (rows, width) in SHAPES {
        for with_bias in [false, true] {
            let n = rows * width;
            let (x, residual) = (noise(n, 1), noise(n, 2));
            let (bias, gamma, beta) = (noise(width, 3), noise(width, 4), noise(width, 5));
            let spec = KernelSpec::BiasResidualLayerNorm(BiasResidualLayerNorm::new(
                width as u32,
                1e-5,
                F32,
                with_bias,
            ));
            let mut reads = vec![Read::Real(&x)];
            if with_bias {
                reads.push(Read::Real(&bias));
            }
            reads.extend([Read::Real(&residual), Read::Real(&gamma), Read::Real(&beta)]);
            let sum: Vec<f64> = (0..n)
                .map(|i| {
                    let bias = if with_bias { bias[i % width] } else { 0.0 };
                    f64::from(x[i]) + f64::from(residual[i]) + f64::from(bias)
                })
                .collect();
            let got = output(&spec, &extents(rows), &reads, n);
            let want = layer_norm(&sum, &gamma, &beta, f64::from(1e-5_f32));
            assert_close(&got, &want, 3e-6);
        }
    }
}

fn table(ids: BatchInput, offset: u32, rows: u32) -> Table {
    Table { ids, offset, rows }
}

#[test]
fn embedding_copies_the_row_of_each_id_after_its_offset() {
    let batch = Batch::new(&[2, 3]);
    let rows = noise(9 * 6, 1);
    let ids = [0, 6, 3, 3, 1];
    let spec = KernelSpec::Embedding(Embedding {
        table: table(BatchInput::Positions, 2, 9),
        width: 6,
        dtype: F32,
    });
    let reads = [Read::I32(&ids), Read::Real(&rows)];
    let got = output(&spec, &batch.extents, &reads, 5 * 6);
    let want: Vec<f32> = ids
        .iter()
        .flat_map(|&id| &rows[(id as usize + 2) * 6..][..6])
        .copied()
        .collect();
    assert_eq!(got, want);
}

#[test]
fn embedding_layernorm_normalizes_the_sum_of_the_tables_rows() {
    for width in [5, 16, 40] {
        let batch = Batch::new(&[2, 3]);
        let tables = [
            noise(9 * width, 1),
            noise(2 * width, 2),
            noise(7 * width, 3),
        ];
        let ids = [[8, 0, 3, 3, 1], [0, 0, 1, 1, 0], [0, 1, 0, 1, 2]];
        let offsets = [0, 0, 2];
        let (gamma, beta) = (noise(width, 4), noise(width, 5));
        let spec = KernelSpec::EmbeddingLayerNorm(EmbeddingLayerNorm {
            tables: vec![
                table(BatchInput::TokenIds, 0, 9),
                table(BatchInput::TypeIds, 0, 2),
                table(BatchInput::Positions, 2, 7),
            ],
            width: width as u32,
            eps: 1e-5,
            dtype: F32,
        });
        let mut reads: Vec<Read<'_>> = ids.iter().map(|ids| Read::I32(ids)).collect();
        reads.extend(tables.iter().map(|rows| Read::Real(rows)));
        reads.extend([Read::Real(&gamma), Read::Real(&beta)]);
        let mut sum = vec![0.0; 5 * width];
        for t in 0..5 {
            for c in 0..width {
                for i in 0..3 {
                    let row = ids[i][t] as usize + offsets[i];
                    sum[t * width + c] += f64::from(tables[i][row * width + c]);
                }
            }
        }
        let got = output(&spec, &batch.extents, &reads, 5 * width);
        let want = layer_norm(&sum, &gamma, &beta, f64::from(1e-5_f32));
        assert_close(&got, &want, 3e-6);
    }
}
