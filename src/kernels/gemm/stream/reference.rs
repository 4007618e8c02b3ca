//! CPU reference of the GEMM that streams its weight. It is composed of the references of the GEMM problem and of the two parts of a norm.

use super::{GemmStream, SCALE, StreamNorm};
use crate::{
    kernels::{
        HostTensor,
        gemm::{row_stats::row_stats_of, small_m::BLOCK_K},
    },
    tensor::Extents,
};

impl GemmStream {
    /// Computes the kernel's outputs, in the order of its parameters.
    pub(super) fn on_host(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let rows = extents.rows as usize;
        let (mut of_product, more) = (reads.to_vec(), reads.len());
        let normal;
        if let Some((eps, centered)) = self.input_norm() {
            let stats = of_product
                .pop()
                .expect("row statistics are read last")
                .real();
            normal = HostTensor::Real(stream_normals(
                reads[0].real(),
                stats,
                rows,
                self.problem.k as usize,
                eps,
                centered,
            ));
            of_product[0] = &normal;
        }
        let vectors = match self.norm {
            StreamNorm::Before { centered } => 1 + usize::from(centered),
            _ => 0,
        };
        of_product.truncate(more.min(of_product.len()) - vectors);
        let converts = !self.multiplies_by_warps();
        let mut results = self.problem.reference(extents, &of_product, converts);
        let out = results.remove(0);
        if vectors == 0 {
            return vec![out];
        }
        let vectors: Vec<&[f32]> = reads[more - vectors..].iter().map(|v| v.real()).collect();
        let (scaled, row_stats) = stream_scaled(out.real(), &vectors);
        vec![out, HostTensor::Real(scaled), HostTensor::Real(row_stats)]
    }
}

/// Returns `scaled` and `row_stats` of [`StreamNorm::Before`], computed from `out [rows, n]`. `vectors` holds gamma, and for LayerNorm also
/// beta.
pub(crate) fn stream_scaled(out: &[f32], vectors: &[&[f32]]) -> (Vec<f32>, Vec<f32>) {
    let gamma = vectors[0];
    let mut scaled = Vec::with_capacity(out.len());
    let mut row_stats = Vec::new();
    for row in out.chunks_exact(gamma.len()) {
        scaled.extend(row.iter().zip(gamma).map(|(&s, &g)| SCALE * s * g));
        for part in row.chunks(BLOCK_K as usize) {
            let part = part.iter().map(|&s| f64::from(s));
            row_stats.push(part.clone().sum::<f64>() as f32);
            row_stats.push(part.map(|s| s * s).sum::<f64>() as f32);
        }
    }
    if vectors.len() > 1 {
        vectors.iter().for_each(|vector| scaled.extend(*vector));
    }
    (scaled, row_stats)
}

/// Returns the normalized rows `[rows, width]` of [`StreamNorm::After`], computed from the results `scaled` and `row_stats` of
/// [`StreamNorm::Before`].
pub(crate) fn stream_normals(
    scaled: &[f32],
    row_stats: &[f32],
    rows: usize,
    width: usize,
    eps: f32,
    centered: bool,
) -> Vec<f32> {
    let (scaled, vectors) = scaled.split_at(rows * width);
    let numbers = row_stats_of(width as u32) as usize;
    let each = scaled
        .chunks_exact(width)
        .zip(row_stats.chunks_exact(numbers));
    each.flat_map(|(row, stats)| {
        let sum = |first| stats.iter().skip(first).step_by(2).map(|&v| f64::from(v));
        let mean = match centered {
            true => sum(0).sum::<f64>() / width as f64,
            false => 0.0,
        };
        let variance = (sum(1).sum::<f64>() / width as f64 - mean * mean).max(0.0);
        let deviation = (variance + f64::from(eps)).sqrt();
        row.iter().enumerate().map(move |(at, &s)| {
            let (gamma, beta) = match centered {
                true => (f64::from(vectors[at]), f64::from(vectors[width + at])),
                false => (0.0, 0.0),
            };
            ((f64::from(s) / f64::from(SCALE) - mean * gamma) / deviation + beta) as f32
        })
    })
    .collect()
}
