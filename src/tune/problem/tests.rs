use super::*;
use crate::kernels::{attention::SoftmaxForm, gemm::Activation};

pub fn gemm() -> Problem {
    Problem::Gemm {
        n: 3072,
        k: 768,
        dtype: DType::F16,
        epilogue: Epilogue {
            bias: true,
            activation: Some(Activation::GeluExact),
        },
        instructions: Instructions::Ampere,
    }
}

/// As [`gemm`], for a card with Hopper's instructions.
pub fn hopper_gemm() -> Problem {
    let Problem::Gemm {
        n,
        k,
        dtype,
        epilogue,
        ..
    } = gemm()
    else {
        unreachable!("a GEMM");
    };
    Problem::Gemm {
        n,
        k,
        dtype,
        epilogue,
        instructions: Instructions::Hopper,
    }
}

pub fn attention(head: u32) -> Problem {
    let stride = 3 * 12 * head;
    let view = |part: u32| HeadView::TokenMajor {
        offset: part * 12 * head,
        stride,
    };
    Problem::Attention {
        heads: 12,
        head,
        scale: 1.0 / (head as f32).sqrt(),
        q: view(0),
        k: view(1),
        v: view(2),
        dtype: DType::F16,
        instructions: Instructions::Ampere,
    }
}

pub fn hopper_attention(head: u32) -> Problem {
    match attention(head) {
        Problem::Attention {
            heads,
            head,
            scale,
            q,
            k,
            v,
            dtype,
            ..
        } => Problem::Attention {
            heads,
            head,
            scale,
            q,
            k,
            v,
            dtype,
            instructions: Instructions::Hopper,
        },
        other => other,
    }
}

pub fn layernorm() -> Problem {
    Problem::BiasResidualLayerNorm(BiasResidualLayerNorm::new(768, 1e-12, DType::F16, true))
}

/// A linear layer and the LayerNorm behind it.
pub fn pair() -> Problem {
    Problem::LinearLayerNorm(LinearLayerNorm {
        n: 768,
        k: 3072,
        eps: 1e-12,
        dtype: DType::F16,
        bias: true,
    })
}

pub fn softmax() -> Problem {
    Problem::Softmax(AttentionSoftmax::new(12, 0.125, DType::F16))
}

#[test]
fn keys_say_what_is_computed() {
    assert_eq!(
        layernorm().key(),
        "bias_residual_layernorm_f16_w768_eps1em12"
    );
    assert_eq!(softmax().key(), "attention_softmax_f16_h12_scale0p125");
    assert_eq!(
        pair().key(),
        "gemm_bias_residual_layernorm_f16_n768_k3072_eps1em12"
    );
    assert_eq!(gemm().key(), "gemm_bias_gelu_f16_n3072_k768");
    assert_eq!(attention(64).key(), "mha_f16_h12x64_qkv2304");
    assert_eq!(hopper_attention(64).key(), "mha_f16_h12x64_qkv2304_hopper");
}

#[test]
fn every_candidate_has_a_kernel_and_the_guess_is_made_of_candidates() {
    let problems = [
        gemm(),
        hopper_gemm(),
        attention(64),
        attention(7),
        hopper_attention(64),
        hopper_attention(80),
        layernorm(),
        softmax(),
        pair(),
    ];
    for problem in problems {
        let candidates = problem.candidates();
        // Two launches are those of their own problems.
        let has_kernel = |&c: &Choice| c == Choice::Apart || !problem.kernels(c).is_empty();
        assert!(candidates.iter().all(has_kernel));
        for range in problem.guess() {
            assert!(candidates.contains(&range.choice), "{range:?}");
            let most = range.choice.most();
            assert!(
                most.is_none_or(|most| range.up_to.is_some_and(|end| end <= most)),
                "{range:?}"
            );
        }
    }
    assert_eq!(gemm().kernel(Choice::MhaOnline), None);
    assert_eq!(attention(64).kernel(gemm().candidates()[0]), None);
}

#[test]
fn few_rows_have_kernels_of_their_own_where_the_card_has_them() {
    let few = |choice| matches!(choice, Choice::SplitK(_) | Choice::Skinny(_));
    let at = |problem: &Problem, rows| choice_at(&problem.guess(), rows).is_some_and(few);
    assert!(at(&hopper_gemm(), 1) && at(&hopper_gemm(), 128));
    assert!(!at(&hopper_gemm(), 129) && !at(&gemm(), 1));
    assert!(few(hopper_gemm().ranked(20, 132)[0]));
    assert!(!hopper_gemm().ranked(1000, 132).into_iter().any(few));
}

#[test]
fn a_short_kernel_is_no_candidate_beyond_its_length() {
    let problem = attention(64);
    let max_len = MhaShort::max_len_for(64, DType::F16);
    assert!(problem.candidates().contains(&Choice::MhaShort { max_len }));
    let ranked = problem.ranked(u64::from(max_len) + 1, 132);
    assert_eq!(ranked, [Choice::MhaOnline, Choice::MhaGrouped]);
    assert_eq!(problem.ranked(20, 132)[0], Choice::MhaShort { max_len: 32 });
}

#[test]
fn the_model_puts_the_tile_first_that_it_picks() {
    let Problem::Gemm { n, k, dtype, .. } = gemm() else {
        unreachable!("a GEMM");
    };
    for rows in [16, 500, 8192] {
        let best = Tile::pick(rows, n, k, dtype, 132);
        assert_eq!(gemm().ranked(rows, 132)[0], Choice::Tile(best));
    }
}

#[test]
fn rows_are_shared_as_guessed_or_nearly_so_first() {
    for (problem, sizes) in [(layernorm(), [16, 8192]), (softmax(), [100, 500])] {
        for size in sizes {
            let ranked = problem.ranked(size, 132);
            assert_eq!(Some(ranked[0]), choice_at(&problem.guess(), size));
            assert!(ranked.len() > 3);
        }
    }
    assert_eq!(
        softmax().ranked(9000, 132),
        [Choice::Softmax(SoftmaxForm::Streamed)]
    );
}

#[test]
fn warpgroup_products_serve_attention_of_their_head_sizes_on_hopper_alone() {
    let on_hopper = |problem: &Problem| {
        let candidates = problem.candidates();
        let is = |c: &Choice| matches!(c, Choice::MhaWgmma(_));
        (
            candidates.iter().any(is),
            candidates.contains(&Choice::MhaOnline),
        )
    };
    for head in [32, 64, 96, 128] {
        let problem = hopper_attention(head);
        assert_eq!(on_hopper(&problem), (true, true), "{head}");
        let guess = problem.guess();
        let last = guess.last().map(|range| range.choice);
        assert!(
            matches!(last, Some(Choice::MhaWgmma(_))),
            "{head}: {guess:?}"
        );
        assert_eq!(on_hopper(&attention(head)), (false, true), "{head}");
    }
    for head in [40, 80, 256] {
        assert_eq!(on_hopper(&hopper_attention(head)), (false, true), "{head}");
    }
}

#[test]
fn a_range_serves_sizes_up_to_its_limit() {
    let ranges = attention(64).guess();
    let Some(most) = ranges[0].up_to else {
        unreachable!("the short kernel has a limit");
    };
    assert_eq!(choice_at(&ranges, most), Some(ranges[0].choice));
    assert_eq!(choice_at(&ranges, most + 1), Some(ranges[1].choice));
    let longest = MhaShort::max_len_for(64, DType::F16);
    let beyond = choice_at(&ranges, u64::from(longest) + 1);
    assert_eq!(beyond, Some(Choice::MhaOnline));
}

#[test]
fn grouped_attention_is_three_launches_that_meet_in_their_tensors() {
    let chain = attention(64).chain(Choice::MhaGrouped).expect("a chain");
    let names: Vec<&str> = chain.tensors.iter().map(|t| t.name).collect();
    let between = ["scores", "partials", "statistics"];
    assert_eq!(names[..4], ["q", "k", "cu_lens", "pair_offsets"]);
    assert_eq!(names[4..7], between);
    assert_eq!(names[7..], ["v", "out"]);
    let operands: Vec<&[usize]> = chain.launches.iter().map(|l| &l.operands[..]).collect();
    assert_eq!(
        operands,
        [&[0, 1, 2, 3, 4, 5][..], &[5, 2, 3, 6], &[4, 6, 7, 2, 3, 8]]
    );
    assert_eq!(chain.results, [8]);
    assert!(!attention(7).candidates().contains(&Choice::MhaGrouped));
    assert!(gemm().chain(Choice::MhaGrouped).is_none());
}
