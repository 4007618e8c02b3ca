use std::collections::BTreeSet;

use super::*;
use crate::kernels::Kernel;
use crate::{
    codegen::Codegen,
    kernels::{Case, Constant, HostTensor, Role, trial::Trial},
    ops::PositionBias,
    tensor::{Extents, Format},
};

fn qkv(heads: u32, head: u32) -> [HeadView; 3] {
    [0, 1, 2].map(|i| HeadView::TokenMajor {
        offset: i * heads * head,
        stride: 3 * heads * head,
    })
}

fn short(heads: u32, head: u32, max_len: u32, dtype: DType) -> MhaShort {
    let of = AttentionProblem::full(heads, head, default_scale(head), qkv(heads, head));
    MhaShort { of, max_len, dtype }
}

fn online(heads: u32, head: u32, dtype: DType) -> MhaOnline {
    let of = AttentionProblem::full(heads, head, default_scale(head), qkv(heads, head));
    MhaOnline { of, dtype }
}

/// Returns `cu_lens` and `pair_offsets` of sequences with these lengths.
fn starts(lens: &[u32]) -> [HostTensor; 2] {
    let running = |f: fn(i64) -> i64| {
        let mut all = vec![0];
        for &n in lens {
            all.push(all[all.len() - 1] + f(n.into()));
        }
        HostTensor::Index(all)
    };
    [running(|n| n), running(|n| n * n)]
}

/// Returns `n` pseudorandom numbers from −1 to 1.
fn noise(n: usize) -> HostTensor {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    HostTensor::Real((0..n).map(|_| next()).collect())
}

fn assert_close(got: &HostTensor, want: &[f32]) {
    assert_eq!(got.real().len(), want.len());
    for (i, (g, w)) in got.real().iter().zip(want).enumerate() {
        assert!((g - w).abs() < 1e-6, "element {i}: got {g}, want {w}");
    }
}

#[test]
fn attention_is_the_mean_of_values_weighted_by_softmax() {
    // One head of 8 columns, of which only the first is nonzero. Sequence 0 has one token. Sequence 1 has queries 1 and 0, and keys 0 and
    // ln 3. The softmax weights are 1/4 and 3/4 for the first query, and 1/2 and 1/2 for the second query.
    let plain = HeadView::TokenMajor {
        offset: 0,
        stride: 8,
    };
    let kernel = MhaOnline {
        of: AttentionProblem::full(1, 8, 1.0, [plain; 3]),
        dtype: DType::F32,
    };
    let rows = |firsts: [f32; 3]| {
        let rows = firsts.map(|x| [x, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        HostTensor::Real(rows.concat())
    };
    let (q, k, v) = (
        rows([5.0, 1.0, 0.0]),
        rows([7.0, 0.0, 3f32.ln()]),
        rows([-2.0, 4.0, 8.0]),
    );
    let [cu_lens, _] = starts(&[1, 2]);
    let extents = Extents::of(&[1, 2]).expect("a batch");
    let out = kernel.reference(&extents, &[&q, &k, &v, &cu_lens]);
    assert_close(&out[0], rows([-2.0, 7.0, 6.0]).real());
}

#[test]
fn a_sink_is_the_score_of_one_more_key_whose_value_is_0() {
    // The weights of two keys with scores 0 and ln 3, and of a sink of ln 4, are 1/8, 3/8 and 4/8.
    let kernel = SoftmaxByDistance {
        heads: 1,
        scale: 2.0,
        mask: SoftmaxMask::None,
        by: PositionBias {
            sinks: true,
            ..PositionBias::default()
        },
        dtype: DType::F32,
    };
    let half_ln_3 = 3f32.ln() / 2.0;
    let scores = HostTensor::Real(vec![0.0, half_ln_3, half_ln_3, 0.0]);
    let sinks = HostTensor::Real(vec![4f32.ln()]);
    let [cu_lens, pair_offsets] = starts(&[2]);
    let extents = Extents::of(&[2]).expect("a batch");
    let out = kernel.reference(&extents, &[&scores, &sinks, &cu_lens, &pair_offsets]);
    assert_close(&out[0], &[0.125, 0.375, 0.375, 0.125]);
}

#[test]
fn softmax_of_a_ragged_batch_is_taken_per_row() {
    let kernel = AttentionSoftmax::new(1, 2.0, DType::F32);
    let half_ln_3 = 3f32.ln() / 2.0;
    let scores = HostTensor::Real(vec![9.0, 0.0, half_ln_3, 1.0, 1.0]);
    let [cu_lens, pair_offsets] = starts(&[1, 2]);
    let extents = Extents::of(&[1, 2]).expect("a batch");
    let out = kernel.reference(&extents, &[&scores, &cu_lens, &pair_offsets]);
    assert_close(&out[0], &[1.0, 0.25, 0.75, 0.5, 0.5]);
}

#[test]
fn a_masked_softmax_gives_invalid_keys_probability_0() {
    let kernel = AttentionSoftmax {
        mask: SoftmaxMask::Padding,
        ..AttentionSoftmax::new(1, 1.0, DType::F32)
    };
    // One of the 2 tokens of sequence 0 is valid, and two of the 3 tokens of sequence 1.
    let ln_3 = 3f32.ln();
    let scores = HostTensor::Real(vec![
        5.0, 90.0, 5.0, 90.0, 0.0, ln_3, 90.0, ln_3, 0.0, 90.0, 1.0, 1.0, -90.0,
    ]);
    let [cu_lens, pair_offsets] = starts(&[2, 3]);
    let valid = HostTensor::Index(vec![1, 2]);
    let extents = Extents::of(&[2, 3]).expect("a batch");
    let out = kernel.reference(&extents, &[&scores, &cu_lens, &pair_offsets, &valid]);
    let want = [
        1.0, 0.0, 1.0, 0.0, 0.25, 0.75, 0.0, 0.75, 0.25, 0.0, 0.5, 0.5, 0.0,
    ];
    assert_close(&out[0], &want);
    let names: Vec<&str> = kernel.params().iter().map(|p| p.name).collect();
    let reads = ["scores", "cu_lens", "pair_offsets", "valid_lens"];
    assert_eq!(names[..4], reads);
    assert_eq!(names[4..], ["out", "batch", "tokens", "longest"]);
}

#[test]
fn a_trial_masks_at_least_one_key_and_at_most_all() {
    let kernel = AttentionSoftmax {
        mask: SoftmaxMask::Padding,
        ..AttentionSoftmax::new(1, 1.0, DType::F32)
    };
    let lens: Vec<u32> = (1..=40).collect();
    let trial = Trial::new(&kernel, &Case::new("a", &lens), 7).expect("a batch");
    let valid = trial.reads[3].1.index();
    assert_eq!(valid.len(), lens.len());
    assert!(
        valid
            .iter()
            .zip(&lens)
            .all(|(v, &n)| (1..=n.into()).contains(v))
    );
    assert!(valid.iter().zip(&lens).any(|(&v, &n)| v < n.into()));
}

#[test]
fn softmax_variants_cover_every_length_and_can_be_generated() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let variants = AttentionSoftmax::variants(12, 0.125, dtype);
        let limits: Vec<u64> = variants
            .iter()
            .map(|(l, _)| l.unwrap_or(u64::MAX))
            .collect();
        assert!(limits.is_sorted_by(|a, b| a < b), "{limits:?}");
        assert_eq!(variants.last().map(|(l, _)| *l), Some(None));
        for (limit, kernel) in &variants {
            kernel.form.check(dtype).expect("a form that exists");
            assert_eq!(kernel.form.max_len().map(u64::from), *limit);
            let extents = Extents::of(&[7, 5, 9]).expect("a batch");
            let launch = kernel.launch(&extents, &crate::machine::testing::hopper());
            assert_eq!(launch.grid[1], 12);
            assert_eq!(launch.threads, kernel.threads());
        }
    }
}

#[test]
fn softmax_candidates_are_valid_distinct_and_cover_the_same_lengths() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (limit, kernel) in AttentionSoftmax::variants(12, 1.0, dtype) {
            let all = kernel.candidates();
            let symbols: BTreeSet<String> = all.iter().map(Kernel::symbol).collect();
            assert_eq!(symbols.len(), all.len());
            assert!(all.contains(&kernel), "{kernel:?}");
            for other in &all {
                other.form.check(dtype).expect("a form that exists");
                let takes = other.form.max_len().map_or(u64::MAX, u64::from);
                assert!(takes >= limit.unwrap_or(u64::MAX), "{other:?}");
            }
        }
    }
    // For rows of up to 504 elements, a team may be a part of a warp, a warp, or a CTA.
    let form = SoftmaxForm::Resident {
        lanes: 32,
        x_rows: 1,
        max_len: 504,
    };
    let kernel = AttentionSoftmax {
        form,
        ..AttentionSoftmax::new(12, 1.0, DType::F16)
    };
    let symbols: Vec<String> = kernel.candidates().iter().map(Kernel::symbol).collect();
    assert_eq!(
        symbols,
        [
            "attention_softmax_f16_h12_l504_lanes8_x1",
            "attention_softmax_f16_h12_l504_lanes16_x1",
            "attention_softmax_f16_h12_l504_lanes16_x2",
            "attention_softmax_f16_h12_l504_lanes32_x1",
            "attention_softmax_f16_h12_l504_lanes32_x2",
            "attention_softmax_f16_h12_l504_lanes32_x4",
            "attention_softmax_f16_h12_l504_lanes64_x1",
            "attention_softmax_f16_h12_l504_lanes64_x2",
            "attention_softmax_f16_h12_l504_lanes64_x4",
            "attention_softmax_f16_h12_streamed",
        ]
    );
}

#[test]
fn invalid_softmax_forms_are_rejected() {
    for (lanes, x_rows, max_len) in [
        (0, 1, 8),
        (3, 1, 8),
        (2, 1, 8),
        (2048, 1, 8),
        (32, 3, 8),
        (32, 0, 8),
        (32, 1, 0),
        (32, 1, 5000),
        (32, 4, 1024),
        (32, 1, u32::MAX),
        (u32::MAX, 1, 8),
    ] {
        let form = SoftmaxForm::Resident {
            lanes,
            x_rows,
            max_len,
        };
        let dtype = DType::F16;
        assert_eq!(
            form.check(dtype),
            Err(AttentionError::SoftmaxForm { form, dtype })
        );
    }
}

#[test]
fn a_row_fits_its_lanes_wherever_it_starts() {
    for kernel in representative() {
        let KernelSpec::AttentionSoftmax(kernel) = kernel else {
            continue;
        };
        let SoftmaxForm::Resident { lanes, max_len, .. } = kernel.form else {
            continue;
        };
        let packs = match kernel.constants()["packs"] {
            Constant::Int(packs) => packs,
            ref other => panic!("{other:?}"),
        };
        let n = 16 / kernel.dtype.bytes();
        for before in 0..n {
            let touched = (before + u64::from(max_len)).div_ceil(n);
            assert!(touched <= packs * u64::from(lanes), "{}", kernel.symbol());
        }
    }
}

#[test]
fn unfused_kernels_together_equal_fused_attention() {
    let (heads, head, dtype) = (2, 24, DType::F32);
    let lens = [5, 1, 9];
    let extents = Extents::of(&lens).expect("a batch");
    let [cu_lens, pair_offsets] = starts(&lens);
    for views in [qkv(heads, head), [HeadView::HeadMajor; 3]] {
        let [q, k, v] = views;
        let scale = default_scale(head);
        let elements = q.shape(heads, head).elements().eval(&extents);
        let x = noise(elements.expect("a small tensor") as usize);
        let of = AttentionProblem::full(heads, head, scale, views);
        let fused = MhaOnline { of, dtype };
        let want = fused.reference(&extents, &[&x, &x, &x, &cu_lens]);

        let scores = AttentionScores {
            heads,
            kv_heads: heads,
            head,
            scale,
            q,
            k,
            dtype,
        };
        let scores = scores.reference(&extents, &[&x, &x, &cu_lens, &pair_offsets]);
        let softmax = AttentionSoftmax::new(heads, 1.0, dtype);
        let weights = softmax.reference(&extents, &[&scores[0], &cu_lens, &pair_offsets]);
        let out = HeadView::TokenMajor {
            offset: 0,
            stride: heads * head,
        };
        let context = AttentionContext {
            heads,
            kv_heads: heads,
            head,
            v,
            out,
            dtype,
        };
        let got = context.reference(&extents, &[&weights[0], &x, &cu_lens, &pair_offsets]);
        assert_close(&got[0], want[0].real());
    }
}

#[test]
fn every_tile_of_every_sequence_has_a_unique_index_in_the_grid() {
    // Computes the tile indices that the device function `find_tile` maps to each sequence, and checks that they are in the grid.
    let batches = [
        vec![1],
        vec![64; 5],
        vec![65, 1, 1, 128, 63, 64],
        (1..200).collect(),
    ];
    for lens in batches {
        let kernel = short(12, 64, 256, DType::F16);
        let extents = Extents::of(&lens).expect("a batch");
        let rows = 64;
        let blocks = kernel
            .launch(&extents, &crate::machine::testing::hopper())
            .grid[0];
        let mut used = BTreeSet::new();
        let mut start = 0;
        for (b, &n) in lens.iter().enumerate() {
            let first = start / rows + b as u32;
            for tile in first..first + n.div_ceil(rows) {
                assert!(tile < blocks, "{lens:?}: sequence {b}, tile {tile}");
                assert!(used.insert(tile), "{lens:?}: sequence {b}, tile {tile}");
            }
            start += n;
        }
    }
}

#[test]
fn launches_fit_every_target_at_every_head_size() {
    let extents = Extents::of(&[7]).expect("a batch");
    for head in (8..=256).step_by(8) {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let longest = MhaShort::max_len_for(head, dtype);
            assert!(longest >= 64, "head size {head} in {dtype}: {longest}");
            let short = short(3, head, longest, dtype);
            let online = online(3, head, dtype);
            short.check().expect("a short kernel");
            online.check().expect("an online kernel");
            for launch in [
                short.launch(&extents, &crate::machine::testing::hopper()),
                online.launch(&extents, &crate::machine::testing::hopper()),
            ] {
                assert!(
                    launch.shared_bytes <= 99 * 1024,
                    "head size {head}: {launch:?}"
                );
                assert_eq!(launch.grid[1], 3);
            }
        }
    }
    assert_eq!(MhaShort::max_len_for(64, DType::F16), 256);
    assert_eq!(MhaShort::max_len_for(256, DType::F16), 64);
    assert_eq!(MhaShort::max_len_for(20, DType::F16), 0);
}

#[test]
fn a_short_kernel_is_checked_only_on_supported_lengths() {
    for max_len in [1, 32, 100, 128, 256] {
        let cases = short(12, 64, max_len, DType::F16).cases();
        let longest = cases.iter().flat_map(|c| &c.lens).max();
        assert_eq!(longest, Some(&max_len));
        assert!(cases.iter().all(|c| Extents::of(&c.lens).is_ok()));
    }
}

#[test]
fn tokens_are_a_parameter_only_where_addresses_depend_on_them() {
    let names = |kernel: &dyn Kernel| -> Vec<&'static str> {
        kernel.params().iter().map(|p| p.name).collect()
    };
    let merged = online(2, 32, DType::F16);
    assert_eq!(names(&merged), ["q", "k", "v", "cu_lens", "out", "batch"]);
    let of = AttentionProblem {
        q: HeadView::HeadMajor,
        ..merged.of
    };
    let split = MhaOnline { of, ..merged };
    let with_tokens = ["q", "k", "v", "cu_lens", "out", "batch", "tokens"];
    assert_eq!(names(&split), with_tokens);
}

#[test]
fn unsupported_kernels_are_rejected_with_a_reason() {
    let good = online(2, 32, DType::F16);
    assert_eq!(good.check(), Ok(()));
    let changed = |of| MhaOnline { of, ..good.clone() };
    let odd_head = changed(AttentionProblem {
        head: 20,
        ..good.of
    });
    assert_eq!(odd_head.check(), Err(AttentionError::HeadSize { head: 20 }));
    let no_scale = changed(AttentionProblem {
        scale: 0.0,
        ..good.of
    });
    assert_eq!(no_scale.check(), Err(AttentionError::Scale { scale: 0.0 }));
    let view = |offset, stride| HeadView::TokenMajor { offset, stride };
    let misaligned = changed(AttentionProblem {
        k: view(4, 192),
        ..good.of
    });
    assert_eq!(
        misaligned.check().expect_err("an error").to_string(),
        "`k` starts at column 4 of rows of 192; fused attention reads 16 bytes at a time and takes \
         multiples of 8 only"
    );
    let groups = changed(AttentionProblem {
        heads: 4,
        kv_heads: 3,
        ..good.of
    });
    assert_eq!(
        groups.check().expect_err("an error").to_string(),
        "4 query heads do not divide into groups for 3 key heads; expected a divisor of 4"
    );
    let outside = changed(AttentionProblem {
        v: view(136, 192),
        ..good.of
    });
    assert_eq!(
        outside.check().expect_err("an error").to_string(),
        "`v` is 64 columns from column 136, but a row has 192"
    );
    assert_eq!(
        short(1, 256, 96, DType::F16)
            .check()
            .expect_err("an error")
            .to_string(),
        "the longest sequence of a short kernel is 96; with head size 256 in f16 it is from 1 to \
         64, use the online kernel"
    );
}

#[test]
fn symbols_are_unique_and_name_the_instance() {
    let all = representative();
    let symbols: BTreeSet<String> = all.iter().map(|k| k.as_kernel().symbol()).collect();
    assert_eq!(symbols.len(), all.len());
    assert!(symbols.contains("mha_short_f16_h12x64_l128_qkv2304"));
    assert!(symbols.contains("mha_online_bf16_h4x40_headmajor_scale1"));
    assert!(symbols.contains("attention_scores_simt_f32_h3x17_q0of153_k51of153_scale0p5"));
    let mut near = online(12, 64, DType::F16);
    near.of.scale = default_scale(64).next_up();
    assert_eq!(
        near.symbol(),
        "mha_online_f16_h12x64_qkv2304_scale0p12500001"
    );
}

#[test]
fn every_instance_renders_with_its_parameters_in_order() {
    let codegen = Codegen::new().expect("templates that parse");
    for kernel in representative() {
        let source = codegen.source(kernel.as_kernel()).expect("a source");
        let from = source.text.find(&source.symbol).expect("the symbol");
        let signature = &source.text[from..];
        let mut rest = &signature[..signature.find(") {").expect("the body")];
        for param in kernel.as_kernel().params() {
            let at = rest.find(&format!(" {}", param.name));
            let at = at.unwrap_or_else(|| panic!("{}: no `{}`", source.symbol, param.name));
            rest = &rest[at + param.name.len()..];
            if let Role::Read { shape, .. } | Role::Write { shape, .. } = param.role {
                assert!(shape.rank() > 0);
            }
        }
        assert!(!source.text.contains("#include"), "{}", source.symbol);
    }
}

#[test]
fn a_cache_in_e4m3_is_refused_by_kernels_that_do_not_convert_it() {
    let all = super::representative();
    let decode = all.iter().find_map(|kernel| match kernel {
        KernelSpec::MhaDecode(k) if k.plain.dtype == DType::F32 => Some(k.clone()),
        _ => None,
    });
    let mut decode = decode.expect("one is in f32");
    decode.plain = decode.plain.in_e4m3();
    let dtype = DType::F32;
    assert_eq!(decode.check(), Err(AttentionError::DecodeE4m3 { dtype }));
    let mut plain = decode.plain;
    assert_eq!(plain.validate(), Ok(()));
    for format in [Format::INT8, Format::FP8, Format::Plain(DType::F16)] {
        plain.pool.format = format;
        let problem = plain.validate().expect_err("refused");
        let expected =
            format!("a KV cache in {format} with activations in f32; expected f32 or e4m3");
        assert_eq!(problem, expected);
    }
}
