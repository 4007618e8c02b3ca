use super::*;
use crate::{kernels::attention::*, ops::AttentionProblem};

const HEADS: u32 = 3;
const HEAD: u32 = 20;
const WIDTH: u32 = HEADS * HEAD;

/// View of one part (q, k or v) of a tensor that holds q, k and v of each token.
fn packed(part: u32) -> HeadView {
    HeadView::TokenMajor {
        offset: part * WIDTH,
        stride: 3 * WIDTH,
    }
}

const OWN_ROWS: HeadView = HeadView::TokenMajor {
    offset: 0,
    stride: WIDTH,
};

/// Number of elements of a tensor that holds a view of all heads.
fn n_elements(view: HeadView, tokens: usize) -> usize {
    match view {
        HeadView::HeadMajor => tokens * WIDTH as usize,
        HeadView::TokenMajor { stride, .. } => tokens * stride as usize,
    }
}

fn value(x: &[f32], view: HeadView, tokens: usize, h: usize, t: usize, c: usize) -> f64 {
    f64::from(x[at(view, tokens, HEAD as usize, h, t, c)])
}

/// Computes `scale · q·kᵀ` for each head and each (query, key) pair of a sequence, `[heads, pairs]`.
fn scores(
    batch: &Batch,
    scale: f64,
    (q, q_view): (&[f32], HeadView),
    (k, k_view): (&[f32], HeadView),
) -> Vec<f64> {
    let (tokens, pairs) = (batch.tokens(), batch.pairs());
    let mut out = vec![0.0; HEADS as usize * pairs];
    for h in 0..HEADS as usize {
        for (start, pair, len) in batch.sequences() {
            for i in 0..len {
                for j in 0..len {
                    let dot: f64 = (0..HEAD as usize)
                        .map(|c| {
                            value(q, q_view, tokens, h, start + i, c)
                                * value(k, k_view, tokens, h, start + j, c)
                        })
                        .sum();
                    out[h * pairs + pair + i * len + j] = scale * dot;
                }
            }
        }
    }
    out
}

fn softmax(batch: &Batch, scores: &[f64]) -> Vec<f64> {
    let mut out = vec![0.0; scores.len()];
    for h in 0..HEADS as usize {
        for (_, pair, len) in batch.sequences() {
            for i in 0..len {
                let row =
                    h * batch.pairs() + pair + i * len..h * batch.pairs() + pair + (i + 1) * len;
                let max = scores[row.clone()].iter().copied().fold(f64::MIN, f64::max);
                let sum: f64 = scores[row.clone()].iter().map(|s| (s - max).exp()).sum();
                for j in row {
                    out[j] = (scores[j] - max).exp() / sum;
                }
            }
        }
    }
    out
}

fn context(
    batch: &Batch,
    probabilities: &[f64],
    (v, v_view): (&[f32], HeadView),
    out_view: HeadView,
) -> Vec<f64> {
    let (tokens, pairs) = (batch.tokens(), batch.pairs());
    let mut out = vec![0.0; n_elements(out_view, tokens)];
    for h in 0..HEADS as usize {
        for (start, pair, len) in batch.sequences() {
            for i in 0..len {
                for c in 0..HEAD as usize {
                    out[at(out_view, tokens, HEAD as usize, h, start + i, c)] = (0..len)
                        .map(|j| {
                            probabilities[h * pairs + pair + i * len + j]
                                * value(v, v_view, tokens, h, start + j, c)
                        })
                        .sum();
                }
            }
        }
    }
    out
}

#[test]
fn attention_scores_are_products_within_each_sequence() {
    for batch in batches() {
        for (q_view, k_view) in [
            (HeadView::HeadMajor, HeadView::HeadMajor),
            (packed(0), packed(1)),
            (OWN_ROWS, packed(2)),
        ] {
            let q = noise(n_elements(q_view, batch.tokens()), 1);
            let k = noise(n_elements(k_view, batch.tokens()), 2);
            let spec = KernelSpec::AttentionScores(AttentionScores {
                heads: HEADS,
                kv_heads: HEADS,
                head: HEAD,
                scale: 0.25,
                q: q_view,
                k: k_view,
                dtype: F32,
            });
            let reads = [
                Read::Real(&q),
                Read::Real(&k),
                Read::I32(&batch.cu_lens),
                Read::I64(&batch.pair_offsets),
            ];
            let n = HEADS as usize * batch.pairs();
            let got = output(&spec, &batch.extents, &reads, n);
            let want = scores(&batch, 0.25, (&q, q_view), (&k, k_view));
            assert_close(&got, &want, 1e-5);
        }
    }
}

#[test]
fn attention_softmax_is_the_softmax_of_scaled_scores() {
    for batch in batches() {
        // With a negative scale, the largest score becomes the smallest.
        for scale in [1.0, 7.5, -3.0] {
            let x = noise(HEADS as usize * batch.pairs(), 1);
            let spec = KernelSpec::AttentionSoftmax(AttentionSoftmax::new(HEADS, scale, F32));
            let reads = [
                Read::Real(&x),
                Read::I32(&batch.cu_lens),
                Read::I64(&batch.pair_offsets),
            ];
            let got = output(&spec, &batch.extents, &reads, x.len());
            let scaled: Vec<f64> = x.iter().map(|&x| f64::from(scale) * f64::from(x)).collect();
            assert_close(&got, &softmax(&batch, &scaled), 2e-6);
        }
    }
}

#[test]
fn attention_masked_softmax_is_the_softmax_of_the_valid_keys() {
    for batch in batches() {
        let x = noise(HEADS as usize * batch.pairs(), 1);
        let kernel = AttentionSoftmax {
            mask: SoftmaxMask::Padding,
            ..AttentionSoftmax::new(HEADS, 2.0, F32)
        };
        // Number of valid keys of each sequence: all, one, or a number in between.
        let valid: Vec<i32> = (batch.lens.iter().enumerate())
            .map(|(b, &n)| [n, 1, n.div_ceil(2)][b % 3] as i32)
            .collect();
        let reads = [
            Read::Real(&x),
            Read::I32(&batch.cu_lens),
            Read::I64(&batch.pair_offsets),
            Read::I32(&valid),
        ];
        let spec = KernelSpec::AttentionSoftmax(kernel);
        let got = output(&spec, &batch.extents, &reads, x.len());
        let mut scaled: Vec<f64> = x.iter().map(|&x| 2.0 * f64::from(x)).collect();
        for h in 0..HEADS as usize {
            for ((_, pair, len), &valid) in batch.sequences().zip(&valid) {
                let from = h * batch.pairs() + pair;
                for (at, score) in scaled[from..from + len * len].iter_mut().enumerate() {
                    if at % len >= valid as usize {
                        *score = f64::NEG_INFINITY;
                    }
                }
            }
        }
        let want = softmax(&batch, &scaled);
        assert_close(&got, &want, 2e-6);
        let masked = got.iter().zip(&want).filter(|(_, want)| **want == 0.0);
        assert!(masked.clone().all(|(got, _)| *got == 0.0));
    }
}

#[test]
fn attention_softmax_of_huge_scores_does_not_overflow() {
    let batch = Batch::new(&[2]);
    let x = [3e4, -3e4, 3e4, 3e4].repeat(HEADS as usize);
    let spec = KernelSpec::AttentionSoftmax(AttentionSoftmax::new(HEADS, 1.0, F32));
    let reads = [
        Read::Real(&x),
        Read::I32(&batch.cu_lens),
        Read::I64(&batch.pair_offsets),
    ];
    let got = output(&spec, &batch.extents, &reads, x.len());
    let want = [1.0, 0.0, 0.5, 0.5].repeat(HEADS as usize);
    assert_close(&got, &want, 1e-6);
}

#[test]
fn attention_context_sums_values_by_their_probabilities() {
    for batch in batches() {
        for (v_view, out_view) in [
            (HeadView::HeadMajor, HeadView::HeadMajor),
            (packed(2), OWN_ROWS),
            (packed(2), HeadView::HeadMajor),
        ] {
            let scores = wide(&noise(HEADS as usize * batch.pairs(), 1));
            let probabilities: Vec<f32> = softmax(&batch, &scores)
                .into_iter()
                .map(|p| p as f32)
                .collect();
            let v = noise(n_elements(v_view, batch.tokens()), 2);
            let spec = KernelSpec::AttentionContext(AttentionContext {
                heads: HEADS,
                kv_heads: HEADS,
                head: HEAD,
                v: v_view,
                out: out_view,
                dtype: F32,
            });
            let reads = [
                Read::Real(&probabilities),
                Read::Real(&v),
                Read::I32(&batch.cu_lens),
                Read::I64(&batch.pair_offsets),
            ];
            let n = n_elements(out_view, batch.tokens());
            let got = output(&spec, &batch.extents, &reads, n);
            let want = context(&batch, &wide(&probabilities), (&v, v_view), out_view);
            assert_close(&got, &want, 1e-5);
        }
    }
}

fn short(scale: f32, views: [HeadView; 3], max_len: u32) -> KernelSpec {
    KernelSpec::MhaShort(MhaShort {
        of: AttentionProblem::full(HEADS, HEAD, scale, views),
        max_len,
        dtype: F32,
    })
}

fn online(scale: f32, views: [HeadView; 3]) -> KernelSpec {
    KernelSpec::MhaOnline(MhaOnline {
        of: AttentionProblem::full(HEADS, HEAD, scale, views),
        dtype: F32,
    })
}

#[test]
fn fused_attention_is_scores_softmax_and_context() {
    for batch in batches() {
        let longest = batch.extents.longest as u32;
        let views = [OWN_ROWS, HeadView::HeadMajor, OWN_ROWS];
        let tensors = [1, 2, 3].map(|seed| noise(batch.tokens() * WIDTH as usize, seed));
        let [q, k, v] = &tensors;
        let s = scores(&batch, 2.0, (q, views[0]), (k, views[1]));
        let want = context(&batch, &softmax(&batch, &s), (v, views[2]), OWN_ROWS);
        let reads = [
            Read::Real(q),
            Read::Real(k),
            Read::Real(v),
            Read::I32(&batch.cu_lens),
        ];
        for spec in [online(2.0, views), short(2.0, views, longest)] {
            let got = output(&spec, &batch.extents, &reads, want.len());
            assert_close(&got, &want, 1e-5);
        }
    }
}

#[test]
fn fused_attention_reads_queries_keys_and_values_from_one_tensor() {
    for batch in batches() {
        let views = [packed(0), packed(1), packed(2)];
        let qkv = noise(n_elements(packed(0), batch.tokens()), 1);
        let s = scores(&batch, 0.2, (&qkv, views[0]), (&qkv, views[1]));
        let want = context(&batch, &softmax(&batch, &s), (&qkv, views[2]), OWN_ROWS);
        let reads = [
            Read::Real(&qkv),
            Read::Real(&qkv),
            Read::Real(&qkv),
            Read::I32(&batch.cu_lens),
        ];
        let got = output(&online(0.2, views), &batch.extents, &reads, want.len());
        assert_close(&got, &want, 1e-5);
    }
}

#[test]
fn short_attention_rejects_a_longer_sequence() {
    let batch = Batch::new(&[3, 5]);
    let views = [OWN_ROWS; 3];
    let x = noise(batch.tokens() * WIDTH as usize, 1);
    let reads = [
        Read::Real(&x),
        Read::Real(&x),
        Read::Real(&x),
        Read::I32(&batch.cu_lens),
    ];
    let mut out = vec![0.0; x.len()];
    let got = run(
        &short(1.0, views, 4),
        &batch.extents,
        &reads,
        &mut [&mut out],
    );
    assert_eq!(
        got,
        Err(OpError::TooLong {
            op: "mha_simt",
            sequence: 1,
            len: 5,
            max_len: 4
        })
    );
}

#[test]
fn windows_and_position_biases_agree_with_the_references() {
    let is_one = |k: &KernelSpec| match k {
        KernelSpec::MhaOnline(k) => k.dtype == F32 && !k.of.by.is_none(),
        KernelSpec::MhaCached(k) => k.dtype == F32 && !k.by.is_none(),
        KernelSpec::SoftmaxByDistance(k) => k.dtype == F32,
        KernelSpec::RelativeScores(k) => k.dtype == F32,
        _ => false,
    };
    let kernels: Vec<KernelSpec> = crate::kernels::representative();
    let kernels: Vec<KernelSpec> = kernels.into_iter().filter(is_one).collect();
    assert!(kernels.len() > 12, "{}", kernels.len());
    super::long_attention::agree(kernels);
}
