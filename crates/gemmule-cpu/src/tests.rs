//! Tests the vector code on every instruction set of this machine, not only the widest.

use std::ops::Range;

use pulp::{Scalar, Simd, WithSimd};

use crate::{
    attention::{Attend, Positions, Scratch},
    linear::panels::{PanelCols, Panels},
    parallel::SharedOut,
    product::Operand,
    simd::{self, GeluExact, GeluTanh, Pointwise, Running, Silu, Tanh},
};

/// Numbers in (−1, 1) that depend only on the seed.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x2545_F491_4F6C_DD1D;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// Checks `|got − want| ≤ tolerance · (1 + |want|)` everywhere.
#[track_caller]
fn assert_close(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(
            error <= tolerance * (1.0 + want.abs()),
            "element {i}: got {got}, want {want}"
        );
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Computes `erf` by the series whose terms all have the same sign, which avoids cancellation.
fn erf(x: f64) -> f64 {
    if x.abs() >= 6.0 {
        return x.signum();
    }
    // 2/√π · e^(−x²) · Σ 2ⁿ x^(2n+1) / (1·3·5···(2n+1))
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while term.abs() > 1e-17 * sum.abs() {
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
        n += 1.0;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}

fn gelu_exact(x: f64) -> f64 {
    0.5 * x * (1.0 + erf(x / 2.0_f64.sqrt()))
}

fn gelu_tanh(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

fn on_every_instruction_set<Op: WithSimd + Clone>(op: Op) -> Vec<(&'static str, Op::Output)> {
    let mut results = vec![("scalar", Scalar::new().vectorize(op.clone()))];
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(simd) = pulp::x86::V3::try_new() {
            results.push(("AVX2", Simd::vectorize(simd, op.clone())));
        }
        if let Some(simd) = pulp::x86::V4::try_new() {
            results.push(("AVX-512", Simd::vectorize(simd, op.clone())));
        }
    }
    results.push(("dispatched", simd::dispatch(op)));
    results
}

#[derive(Clone, Copy)]
struct Exp;

impl Pointwise for Exp {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::f32s) -> S::f32s {
        simd::exp(simd, x)
    }
}

#[derive(Clone)]
struct Mapped<'a, F>(F, &'a [f32]);

impl<F: Pointwise> WithSimd for Mapped<'_, F> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.1.len()];
        simd::map(simd, self.0, self.1, &mut out);
        out
    }
}

#[derive(Clone, Copy)]
struct Exp2OfNegative;

impl Pointwise for Exp2OfNegative {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::f32s) -> S::f32s {
        simd::exp2_of_negative(simd, x)
    }
}

/// Quiet and signaling NaNs of both signs. Some of their mantissa bits look like exponent bits.
fn nans() -> Vec<f32> {
    let payloads = (0..10).map(|bit| 1 << bit).chain([0x1ff, 0x20_0000]);
    let bits = payloads.flat_map(|payload| [0x7fc0_0000 | payload, 0x7f80_0000 | payload]);
    let bits = bits.chain([0x7fc0_0000, 0x7fff_ffff]);
    bits.flat_map(|bits| [bits, bits | 1 << 31])
        .map(f32::from_bits)
        .collect()
}

#[test]
fn powers_of_two_are_within_a_few_units_in_the_last_place() {
    let x: Vec<f32> = (-126_000..=0).map(|i| i as f32 / 1000.0).collect();
    for (set, got) in on_every_instruction_set(Mapped(Exp2OfNegative, &x)) {
        for (&x, &got) in x.iter().zip(&got) {
            let want = f64::from(x).exp2();
            let error = (f64::from(got) / want - 1.0).abs();
            assert!(error < 3e-7, "{set}: 2^{x}: got {got}, want {want}");
        }
    }
    let small = [-127.0, -1e30, f32::NEG_INFINITY];
    for (set, got) in on_every_instruction_set(Mapped(Exp2OfNegative, &small)) {
        let least = 2.0_f32.powi(-126);
        assert!(got.iter().all(|&x| x == least), "{set}: {got:?}");
    }
    let nans = nans();
    for (set, got) in on_every_instruction_set(Mapped(Exp2OfNegative, &nans)) {
        assert!(got.iter().all(|x| x.is_nan()), "{set}: {got:?}");
    }
}

#[test]
fn exp_is_within_a_few_units_in_the_last_place() {
    let x: Vec<f32> = (-87_300..=88_300).map(|i| i as f32 / 1000.0).collect();
    for (set, got) in on_every_instruction_set(Mapped(Exp, &x)) {
        for (&x, &got) in x.iter().zip(&got) {
            let want = f64::from(x).exp();
            let error = (f64::from(got) / want - 1.0).abs();
            assert!(error < 3e-7, "{set}: exp({x}): got {got}, want {want}");
        }
    }
}

#[test]
fn exp_of_values_out_of_range_stays_finite_and_nan_stays_nan() {
    let x = [f32::NEG_INFINITY, -1e30, 1e30, f32::INFINITY, f32::NAN];
    for (set, got) in on_every_instruction_set(Mapped(Exp, &x)) {
        assert!(
            got[..2].iter().all(|&e| (0.0..1.3e-38).contains(&e)),
            "{set}: {got:?}"
        );
        assert!(
            got[2..4].iter().all(|&e| e > 2e38 && e.is_finite()),
            "{set}: {got:?}"
        );
        assert!(got[4].is_nan(), "{set}: {got:?}");
    }
}

#[test]
fn activations_are_near_their_definitions_on_every_instruction_set() {
    fn check(f: impl Pointwise, definition: fn(f64) -> f64) {
        let x: Vec<f32> = (-8000..=8000).map(|i| i as f32 / 1000.0).collect();
        for (set, got) in on_every_instruction_set(Mapped(f, &x)) {
            // Without fused multiply-add, each step of a polynomial is rounded twice.
            let bound = if set == "scalar" { 2e-6 } else { 1e-6 };
            for (&x, &got) in x.iter().zip(&got) {
                let want = definition(f64::from(x));
                let error = (f64::from(got) - want).abs();
                assert!(error < bound, "{set}: of {x}: got {got}, want {want}");
            }
        }
    }
    check(GeluExact, gelu_exact);
    check(GeluTanh, gelu_tanh);
    check(Tanh, f64::tanh);
    check(Silu, |x| x / (1.0 + (-x).exp()));
}

/// Computes the softmax of a row in two parts, whose numerators are then rescaled to a common maximum.
#[derive(Clone)]
struct SoftmaxInTwo<'a>(&'a [f32], usize);

impl WithSimd for SoftmaxInTwo<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
        let mut row = self.0.to_vec();
        let mut running = Running::START;
        let (a, b) = row.split_at_mut(self.1);
        simd::softmax_numerators(simd, a, 1.0, &mut running);
        let correction = simd::softmax_numerators(simd, b, 1.0, &mut running);
        for x in a {
            *x *= correction;
        }
        for x in &mut row {
            *x /= running.sum;
        }
        row
    }
}

#[test]
fn online_softmax_of_two_parts_is_the_softmax_of_the_whole() {
    for (n, at, rise) in [
        (2, 1, 0.0),
        (40, 17, 30.0),
        (67, 32, -30.0),
        (33, 32, 200.0),
    ] {
        let mut x = noise(n, 1);
        x[at..].iter_mut().for_each(|x| *x += rise);
        let max = x.iter().copied().fold(f32::MIN, f32::max);
        let e: Vec<f64> = x
            .iter()
            .map(|&x| (f64::from(x) - f64::from(max)).exp())
            .collect();
        let sum: f64 = e.iter().sum();
        let want: Vec<f64> = e.iter().map(|e| e / sum).collect();
        for (_, got) in on_every_instruction_set(SoftmaxInTwo(&x, at)) {
            assert_close(&got, &want, 1e-6);
        }
    }
}

#[derive(Clone)]
struct Normalized<'a> {
    x: &'a [f32],
    gamma: &'a [f32],
    beta: &'a [f32],
}

impl WithSimd for Normalized<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
        let mut row = self.x.to_vec();
        simd::normalize(simd, &mut row, self.gamma, self.beta, 1e-5);
        row
    }
}

#[test]
fn normalize_is_its_definition_on_every_instruction_set() {
    for n in [1, 3, 8, 31, 100] {
        let (x, gamma, beta) = (noise(n, 1), noise(n, 2), noise(n, 3));
        let op = Normalized {
            x: &x,
            gamma: &gamma,
            beta: &beta,
        };
        let mean = wide(&x).iter().sum::<f64>() / n as f64;
        let variance = wide(&x).iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        let want: Vec<f64> = (0..n)
            .map(|i| {
                let unit = (f64::from(x[i]) - mean) / (variance + f64::from(1e-5_f32)).sqrt();
                unit * f64::from(gamma[i]) + f64::from(beta[i])
            })
            .collect();
        for (_, got) in on_every_instruction_set(op) {
            assert_close(&got, &want, 2e-6);
        }
    }
}

/// The inputs of a linear layer, whose products the tests compute with the panels of an instruction set.
#[derive(Clone)]
struct Products<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    n: usize,
    k: usize,
}

impl WithSimd for Products<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
        let (n, k) = (self.n, self.k);
        let panels = Panels::of_width(PanelCols.with_simd(simd), self.weight, n, k);
        let mut out = vec![f32::NAN; self.x.len() / k * n];
        panels.block_of(self.x, n, k, &mut out).with_simd(simd);
        out
    }
}

#[test]
fn panels_give_the_product_on_every_instruction_set() {
    let sizes = [(1, 1, 1), (3, 4, 20), (8, 48, 33), (7, 50, 64), (21, 25, 7)];
    for (rows, n, k) in sizes.into_iter().chain([(5, 49, 1030), (2, 3, 2500)]) {
        let (x, weight) = (noise(rows * k, 1), noise(n * k, 2));
        let product = |i: usize| {
            let (row, col) = (i / n, i % n);
            let pairs = x[row * k..][..k].iter().zip(&weight[col * k..][..k]);
            pairs.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
        };
        let want: Vec<f64> = (0..rows * n).map(product).collect();
        let op = Products {
            x: &x,
            weight: &weight,
            n,
            k,
        };
        for (_, got) in on_every_instruction_set(op) {
            assert_close(&got, &want, 1e-5);
        }
    }
}

/// Bias that depends on the distance between a key and its query.
#[derive(Clone, Copy)]
enum Bias<'a> {
    /// Biases for the distances −reach to reach. Larger distances use the outermost value on their side.
    Table(&'a [f32]),
    /// The bias is minus this slope times the distance.
    Slope(f32),
}

impl Bias<'_> {
    fn at(self, distance: i64) -> f64 {
        match self {
            Bias::Table(values) => {
                let reach = values.len() as i64 / 2;
                f64::from(values[(distance.clamp(-reach, reach) + reach) as usize])
            }
            Bias::Slope(slope) => -f64::from(slope) * distance.unsigned_abs() as f64,
        }
    }
}

#[derive(Clone, Copy, Default)]
struct By<'a> {
    window: Option<usize>,
    bias: Option<Bias<'a>>,
    causal: bool,
    cap: Option<f32>,
    sink: Option<f32>,
}

impl Positions for By<'_> {
    fn seen(&self, query: usize, n_keys: usize) -> Range<usize> {
        let first = self.window.map_or(0, |window| query.saturating_sub(window));
        let end = match (self.causal, self.window) {
            (true, _) => query + 1,
            (false, Some(window)) => n_keys.min(query + window + 1),
            (false, None) => n_keys,
        };
        first..end
    }

    fn cap(&self) -> Option<f32> {
        self.cap
    }

    fn sink(&self) -> Option<f32> {
        self.sink
    }

    fn has_biases(&self) -> bool {
        self.bias.is_some()
    }

    fn add_biases(
        &self,
        query: usize,
        keys: Range<usize>,
        factor: f32,
        scores: &mut [f32],
        stride: usize,
    ) {
        let Some(bias) = self.bias else { return };
        for (key, score) in keys.zip(scores.iter_mut().step_by(stride)) {
            *score += factor * bias.at(key as i64 - query as i64) as f32;
        }
    }
}

/// One head of one sequence.
#[derive(Clone)]
struct Attention<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    head: usize,
    by: By<'a>,
}

impl WithSimd for Attention<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
        let (head, len) = (self.head, self.q.len() / self.head);
        let rows = |data| Operand {
            data,
            row: head,
            col: 1,
        };
        let mut out = vec![f32::NAN; self.q.len()];
        let op = Attend {
            q: rows(self.q),
            k: rows(self.k),
            v: rows(self.v),
            scale: 1.5,
            head,
            len,
            queries: 0..len,
            positions: &self.by,
            scratch: &mut Scratch::default(),
            out: SharedOut::new(&mut out),
            at: 0,
            stride: head,
        };
        op.with_simd(simd);
        out
    }
}

impl Attention<'_> {
    fn defined(&self) -> Vec<f64> {
        let (head, len) = (self.head, self.q.len() / self.head);
        let mut out = Vec::new();
        for query in 0..len {
            let keys = self.by.seen(query, len);
            let score = |key: usize| {
                let pairs = (self.q[query * head..][..head].iter()).zip(&self.k[key * head..]);
                let product: f64 = pairs.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                let distance = key as i64 - query as i64;
                let bias = self.by.bias.map(|bias| bias.at(distance));
                let capped = self.by.cap.map_or(1.5 * product, |cap| {
                    let cap = f64::from(cap);
                    cap * (1.5 * product / cap).tanh()
                });
                (capped + bias.unwrap_or(0.0)).exp()
            };
            let weights: Vec<f64> = keys.clone().map(score).collect();
            let sink = self.by.sink.map_or(0.0, |sink| f64::from(sink).exp());
            let sum = weights.iter().sum::<f64>() + sink;
            for c in 0..head {
                let values = keys.clone().map(|key| f64::from(self.v[key * head + c]));
                let of = values.zip(&weights).map(|(v, w)| v * w).sum::<f64>();
                out.push(of / sum);
            }
        }
        out
    }
}

/// Tests sizes on both sides of the boundaries of vectors, panels and blocks of keys, and head sizes that are not whole tiles.
#[test]
fn attention_is_its_definition_on_every_instruction_set() {
    let windows = [None, Some(0), Some(5), Some(140)];
    for (len, head) in [(1, 8), (15, 20), (17, 32), (49, 5), (129, 33), (300, 16)] {
        let [q, k, v] = [1, 2, 3].map(|seed| noise(len * head, seed));
        for (window, causal) in windows.into_iter().flat_map(|w| [(w, false), (w, true)]) {
            let op = Attention {
                q: &q,
                k: &k,
                v: &v,
                head,
                by: By {
                    window,
                    bias: None,
                    causal,
                    // Low and high caps.
                    cap: [None, Some(0.8), Some(50.0)][(len + usize::from(causal)) % 3],
                    // Sinks below and above the scores.
                    sink: [None, Some(-3.0), Some(4.0)][len % 3],
                },
            };
            let want = op.defined();
            for (_, got) in on_every_instruction_set(op) {
                assert_close(&got, &want, 2e-5);
            }
        }
    }
}

/// Queries that share a SIMD vector do not affect each other, even if the scores of one are much larger than those of another.
#[test]
fn attention_to_huge_scores_neither_overflows_nor_vanishes() {
    let (len, head) = (200, 8);
    let mut q = noise(len * head, 1);
    for (query, row) in q.chunks_exact_mut(head).enumerate() {
        let by = [1.0, 1e3, 1e-3, -1e4][query % 4];
        row.iter_mut().for_each(|x| *x *= by);
    }
    let [k, v] = [2, 3].map(|seed| noise(len * head, seed));
    let op = Attention {
        q: &q,
        k: &k,
        v: &v,
        head,
        by: By {
            window: Some(30),
            bias: None,
            causal: true,
            cap: None,
            sink: None,
        },
    };
    for (set, got) in on_every_instruction_set(op) {
        assert!(got.iter().all(|x| x.abs() <= 1.0), "{set}");
    }
}

#[test]
fn attention_with_position_biases_is_its_definition_on_every_instruction_set() {
    let table = noise(2 * 20 + 1, 4);
    let biases = [Bias::Table(&table), Bias::Slope(0.5)];
    for (len, head) in [(1, 8), (17, 32), (50, 5), (300, 16)] {
        let [q, k, v] = [1, 2, 3].map(|seed| noise(len * head, seed));
        for (bias, causal) in biases.into_iter().flat_map(|b| [(b, false), (b, true)]) {
            for window in [None, Some(7)] {
                let op = Attention {
                    q: &q,
                    k: &k,
                    v: &v,
                    head,
                    by: By {
                        window,
                        bias: Some(bias),
                        causal,
                        cap: causal.then_some(0.8),
                        sink: window.map(|_| 0.5),
                    },
                };
                let want = op.defined();
                for (_, got) in on_every_instruction_set(op) {
                    assert_close(&got, &want, 2e-5);
                }
            }
        }
    }
}

/// The results are NaN exactly for queries that see a NaN or have undefined scores.
#[test]
fn attention_to_nan_gives_nan() {
    let (len, head) = (300, 8);
    let [q, k, v] = [1, 2, 3].map(|seed| noise(len * head, seed));
    let check = |q: &[f32], k: &[f32], v: &[f32], is_nan: &dyn Fn(usize) -> bool| {
        let op = Attention {
            q,
            k,
            v,
            head,
            by: By::default(),
        };
        for (set, got) in on_every_instruction_set(op) {
            for (query, row) in got.chunks_exact(head).enumerate() {
                let expected = is_nan(query);
                assert!(row.iter().all(|x| x.is_nan() == expected), "{set}: {query}");
            }
        }
    };
    check(&q, &k, &v, &|_| false);
    for bad in nans() {
        let mut with = q.clone();
        with[201 * head + 3] = bad;
        check(&with, &k, &v, &|query| query == 201);
        for key in [0, 131, 299] {
            let mut with = k.clone();
            with[key * head + 3] = bad;
            check(&q, &with, &v, &|_| true);
        }
    }
    // If all scores of a query are −∞, its softmax is undefined and the results are NaN. If one score is finite, the softmax is defined.
    let mut endless = k.clone();
    endless
        .chunks_exact_mut(head)
        .for_each(|row| row[0] = f32::NEG_INFINITY);
    let mut positive = q.clone();
    positive.iter_mut().for_each(|x| *x = x.abs() + 0.1);
    check(&positive, &endless, &v, &|_| true);
    endless[150 * head] = 0.5;
    check(&positive, &endless, &v, &|_| false);
}
