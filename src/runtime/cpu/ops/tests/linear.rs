use super::*;
use crate::{
    kernels::gemm::Gemm,
    ops::{Activation, Epilogue},
    runtime::cpu::ops::{MatmulPrecision, PackedWeight},
};

/// `act(x · weightᵀ + bias) + residual` with a packed weight.
struct Layer {
    rows: usize,
    n: usize,
    k: usize,
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
    residual: Vec<f32>,
}

impl Layer {
    fn new(rows: usize, n: usize, k: usize) -> Self {
        Self {
            rows,
            n,
            k,
            x: noise(rows * k, 1),
            weight: noise(n * k, 2),
            bias: noise(n, 3),
            residual: noise(rows * n, 4),
        }
    }

    fn spec(&self) -> KernelSpec {
        let epilogue = Epilogue::new(true, Some(Activation::Relu)).with_residual();
        // The tile is ignored on the CPU.
        Gemm::of(self.n as u32, self.k as u32, F32, epilogue).into()
    }

    /// Computes the result for some of the rows with the CPU kernels.
    fn computed(&self, packed: &PackedWeight, rows: std::ops::Range<usize>) -> Vec<f32> {
        let n_rows = rows.len();
        let reads = [
            Read::Real(&self.x[rows.start * self.k..rows.end * self.k]),
            Read::Packed(packed),
            Read::Real(&self.bias),
            Read::Real(&self.residual[rows.start * self.n..rows.end * self.n]),
        ];
        let extents = Batch::new(&[1]).extents.with_rows(n_rows as u64);
        output(&self.spec(), &extents, &reads, n_rows * self.n)
    }

    /// Computes the result in f64. `x(row, i)` returns element `i` of a row of x, and `w(row, i)` element `i` of a row of the weight.
    fn defined(
        &self,
        x: impl Fn(usize, usize) -> f64,
        w: impl Fn(usize, usize) -> f64,
    ) -> Vec<f64> {
        let mut out = Vec::new();
        for row in 0..self.rows {
            for col in 0..self.n {
                let sum: f64 = (0..self.k).map(|i| x(row, i) * w(col, i)).sum();
                let sum = sum + f64::from(self.bias[col]);
                out.push(sum.max(0.0) + f64::from(self.residual[row * self.n + col]));
            }
        }
        out
    }
}

/// Returns layers with sizes just below and just above tiles, panels and blocks, and with an odd `k`. One layer has more than 4096 rows,
/// the maximum number of rows that are converted to bf16 or int8 at once.
fn layers() -> impl Iterator<Item = Layer> {
    let small = [1, 3, 8, 9, 65].into_iter().flat_map(|rows| {
        [1, 47, 48, 97, 200]
            .into_iter()
            .flat_map(move |n| [0, 1, 2, 3, 16, 37].into_iter().map(move |k| (rows, n, k)))
    });
    let large = [(300, 100, 80), (12, 300, 400), (4100, 49, 9)];
    small
        .chain(large)
        .map(|(rows, n, k)| Layer::new(rows, n, k))
}

#[test]
fn packed_f32_weights_give_the_product() {
    for layer in layers() {
        let packed = PackedWeight::new(&layer.weight, layer.n, layer.k, MatmulPrecision::F32);
        let want = layer.defined(
            |row, i| f64::from(layer.x[row * layer.k + i]),
            |col, i| f64::from(layer.weight[col * layer.k + i]),
        );
        let got = layer.computed(&packed, 0..layer.rows);
        assert_close(&got, &want, 1e-5);
        alone_as_among_others(&layer, &packed, &got);
        held_in_panels(&packed, layer.n, [4 * layer.k; 2]);
    }
}

#[test]
fn bf16_products_are_those_of_rounded_factors_independent_of_other_rows() {
    if !MatmulPrecision::Bf16.is_supported() {
        eprintln!("this CPU has no bf16 products: nothing was tested");
        return;
    }
    let rounded = |x: f32| half::bf16::from_f32(x).to_f64();
    for layer in layers() {
        let packed = PackedWeight::new(&layer.weight, layer.n, layer.k, MatmulPrecision::Bf16);
        let want = layer.defined(
            |row, i| rounded(layer.x[row * layer.k + i]),
            |col, i| rounded(layer.weight[col * layer.k + i]),
        );
        let got = layer.computed(&packed, 0..layer.rows);
        assert_close(&got, &want, 1e-5);
        alone_as_among_others(&layer, &packed, &got);
    }
}

/// Quantizes a row to integers of magnitude up to `largest`. Returns the scale and the integers.
fn integers(row: &[f32], largest: f32) -> (f64, Vec<f64>) {
    let scale = row.iter().fold(0.0_f32, |most, x| most.max(x.abs())) / largest;
    let factor = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let rounded = row
        .iter()
        .map(|x| f64::from((x * factor).round_ties_even()));
    (scale.into(), rounded.collect())
}

#[test]
fn int8_products_are_those_of_scaled_integers_independent_of_other_rows() {
    let largest = PackedWeight::largest_integer() as f32;
    for layer in layers() {
        let Layer { n, k, .. } = layer;
        // The packed form for this CPU, and the fallback for CPUs without instructions for such a form.
        let forms = [
            PackedWeight::new(&layer.weight, n, k, MatmulPrecision::Int8),
            PackedWeight::int8_of_crate(&layer.weight, n, k),
        ];
        let of = |values: &[f32], row: usize, largest| {
            integers(&values[row * layer.k..][..layer.k], largest)
        };
        let x: Vec<_> = (0..layer.rows)
            .map(|row| of(&layer.x, row, 127.0))
            .collect();
        let w: Vec<_> = (0..layer.n)
            .map(|row| of(&layer.weight, row, largest))
            .collect();
        let want = layer.defined(
            |row, i| x[row].0 * x[row].1[i],
            |col, i| w[col].0 * w[col].1[i],
        );
        for packed in forms {
            let got = layer.computed(&packed, 0..layer.rows);
            assert_close(&got, &want, 1e-5);
            alone_as_among_others(&layer, &packed, &got);
            // A weight with `k = 0` takes no memory. Otherwise, `rten-gemm` also stores the sum of the integers of each result column.
            let (held, of_column) = match k {
                0 => (0, 0),
                k => (n, k.next_multiple_of(4) + 8),
            };
            held_in_panels(&packed, held, [of_column, of_column + 16]);
        }
    }
}

/// Checks that the weight takes from `least` to `most` bytes per column of the result. The last panel may have up to 47 additional columns,
/// and the last cache line of this panel is padded.
fn held_in_panels(packed: &PackedWeight, n: usize, [least, most]: [usize; 2]) {
    let expected = n * least..=(n + 47) * most + 63;
    let bytes = packed.bytes() as usize;
    assert!(expected.contains(&bytes), "{bytes}, not {expected:?}");
}

/// Checks that a row that is computed alone is bitwise identical to the same row computed with other rows.
fn alone_as_among_others(layer: &Layer, packed: &PackedWeight, among_others: &[f32]) {
    for row in [0, layer.rows / 2, layer.rows - 1] {
        let alone = layer.computed(packed, row..row + 1);
        assert_eq!(alone, among_others[row * layer.n..][..layer.n]);
    }
}

#[test]
fn non_finite_values_stay_in_their_row_and_column() {
    for products in [
        MatmulPrecision::F32,
        MatmulPrecision::Bf16,
        MatmulPrecision::Int8,
    ] {
        if !products.is_supported() {
            eprintln!("this CPU has no products in {products}: they were not tested");
            continue;
        }
        for bad in [f32::NAN, f32::INFINITY] {
            let mut layer = Layer::new(9, 50, 20);
            layer.x[3 * layer.k + 5] = bad;
            layer.weight[7 * layer.k + 1] = bad;
            let packed = PackedWeight::new(&layer.weight, layer.n, layer.k, products);
            let got = layer.computed(&packed, 0..layer.rows);
            for (at, x) in got.iter().enumerate() {
                let (row, col) = (at / layer.n, at % layer.n);
                // Elements of row 3 and column 7 may be finite or not, because ReLU maps −∞ to 0. All other elements must be finite.
                if row != 3 && col != 7 {
                    assert!(x.is_finite(), "{products}: row {row}, column {col} is {x}");
                }
            }
            assert!(got[3 * layer.n..][..layer.n].iter().any(|x| !x.is_finite()));
            assert!(got.iter().skip(7).step_by(layer.n).any(|x| !x.is_finite()));
        }
    }
}

#[test]
fn rows_of_zeros_give_the_bias() {
    let mut layer = Layer::new(3, 50, 20);
    layer.x.fill(0.0);
    layer.weight[..layer.k].fill(0.0);
    for products in [
        MatmulPrecision::F32,
        MatmulPrecision::Bf16,
        MatmulPrecision::Int8,
    ] {
        if !products.is_supported() {
            eprintln!("this CPU has no products in {products}: they were not tested");
            continue;
        }
        let packed = PackedWeight::new(&layer.weight, layer.n, layer.k, products);
        let want = layer.defined(|_, _| 0.0, |_, _| 0.0);
        assert_close(&layer.computed(&packed, 0..layer.rows), &want, 1e-6);
    }
}

#[test]
fn a_weight_that_was_packed_for_another_layer_is_an_error() {
    let layer = Layer::new(3, 50, 20);
    let packed = PackedWeight::new(&layer.weight, 20, 50, MatmulPrecision::F32);
    let reads = [
        Read::Real(&layer.x),
        Read::Packed(&packed),
        Read::Real(&layer.bias),
        Read::Real(&layer.residual),
    ];
    let extents = Batch::new(&[1]).extents.with_rows(3);
    let mut out = vec![0.0; 150];
    let error = run(&layer.spec(), &extents, &reads, &mut [&mut out]).expect_err("it does not fit");
    assert_eq!(
        error.to_string(),
        "gemm_simt: `weight` was packed as [20, 50]; expected [50, 20]"
    );
}
