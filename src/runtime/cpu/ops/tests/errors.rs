use super::*;
use crate::kernels::attention::{AttentionScores, AttentionSoftmax, SoftmaxMask};
use crate::kernels::elementwise::{BinaryOp, Combine, SliceColumns};
use crate::kernels::embedding::{Embedding, Table};
use crate::kernels::pooling::MeanPool;
use crate::ops::BatchInput;

fn message(result: Result<(), OpError>) -> String {
    result.unwrap_err().to_string()
}

fn add() -> KernelSpec {
    KernelSpec::Combine(Combine {
        how: BinaryOp::Sum,
        width: 4,
        dtype: F32,
    })
}

#[test]
fn a_tensor_of_the_wrong_length_is_named_with_both_lengths() {
    let extents = Batch::new(&[2]).extents;
    let (full, cut) = ([0.0; 8], [0.0; 7]);
    let mut out = [0.0; 8];
    let got = run(
        &add(),
        &extents,
        &[Read::Real(&full), Read::Real(&cut)],
        &mut [&mut out],
    );
    assert_eq!(message(got), "combine: `b` has 7 elements; expected 8");
    let got = run(
        &add(),
        &extents,
        &[Read::Real(&full), Read::Real(&full)],
        &mut [&mut out[..5]],
    );
    assert_eq!(message(got), "combine: `out` has 5 elements; expected 8");
}

#[test]
fn a_missing_or_surplus_argument_is_an_error() {
    let extents = Batch::new(&[2]).extents;
    let x = [0.0; 8];
    let mut out = [0.0; 8];
    let got = run(&add(), &extents, &[Read::Real(&x)], &mut [&mut out]);
    assert_eq!(
        message(got),
        "combine: `b` (input 1, counted from 0) was not given"
    );
    let got = run(&add(), &extents, &[Read::Real(&x); 3], &mut [&mut out]);
    assert_eq!(message(got), "combine reads 2 tensors; 3 were given");
    let got = run(&add(), &extents, &[Read::Real(&x); 2], &mut []);
    assert_eq!(message(got), "combine writes one tensor; 0 were given");
}

#[test]
fn an_argument_of_another_element_type_is_an_error() {
    let extents = Batch::new(&[2]).extents;
    let mut out = [0.0; 8];
    let got = run(&add(), &extents, &[Read::I32(&[0; 8])], &mut [&mut out]);
    assert_eq!(
        message(got),
        "combine: `a` holds i32 elements; expected f32"
    );
}

#[test]
fn an_id_outside_its_table_is_named_with_its_place() {
    let extents = Batch::new(&[3]).extents;
    let spec = KernelSpec::Embedding(Embedding {
        table: Table {
            ids: BatchInput::TokenIds,
            offset: 2,
            rows: 10,
        },
        width: 1,
        dtype: F32,
    });
    let mut out = [0.0; 3];
    // With the offset, 8 is the first id past the end. A negative id is always invalid.
    for wrong in [8, -1, i32::MAX, i32::MIN] {
        let ids = [0, 7, wrong];
        let reads = [Read::I32(&ids), Read::Real(&[0.0; 10])];
        assert_eq!(
            run(&spec, &extents, &reads, &mut [&mut out]),
            Err(OpError::Id {
                op: "embedding",
                param: "token_ids",
                index: 2,
                id: wrong,
                offset: 2,
                rows: 10
            })
        );
    }
}

#[test]
fn sequence_starts_that_do_not_cover_the_tokens_are_an_error() {
    let extents = Batch::new(&[2, 3]).extents;
    let spec = KernelSpec::MeanPool(MeanPool {
        width: 1,
        dtype: F32,
    });
    let mut out = [0.0; 2];
    for (starts, index) in [
        ([1, 2, 5], 0),
        ([0, 0, 5], 1),
        ([0, -1, 5], 1),
        ([0, 6, 5], 2),
        ([0, 2, 6], 2),
    ] {
        let reads = [Read::Real(&[0.0; 5]), Read::I32(&starts)];
        let got = run(&spec, &extents, &reads, &mut [&mut out]);
        assert!(
            matches!(got, Err(OpError::CuLens { index: i, .. }) if i == index),
            "{starts:?}: {got:?}"
        );
    }
}

#[test]
fn pair_offsets_that_are_not_sums_of_squares_are_an_error() {
    let batch = Batch::new(&[2, 3]);
    let spec = KernelSpec::AttentionSoftmax(AttentionSoftmax::new(1, 1.0, F32));
    let x = [0.0; 13];
    let mut out = [0.0; 13];
    for (offsets, index) in [([1, 4, 13], 0), ([0, 5, 13], 1), ([0, 4, 12], 2)] {
        let reads = [
            Read::Real(&x),
            Read::I32(&batch.cu_lens),
            Read::I64(&offsets),
        ];
        let got = run(&spec, &batch.extents, &reads, &mut [&mut out]);
        assert!(
            matches!(got, Err(OpError::PairOffsets { index: i, .. }) if i == index),
            "{offsets:?}: {got:?}"
        );
    }
}

#[test]
fn valid_lengths_outside_their_sequence_are_an_error() {
    let batch = Batch::new(&[2, 3]);
    let spec = KernelSpec::AttentionSoftmax(AttentionSoftmax {
        mask: SoftmaxMask::Padding,
        ..AttentionSoftmax::new(1, 1.0, F32)
    });
    let (x, mut out) = ([0.0; 13], [0.0; 13]);
    for (valid, index) in [([0, 3], 0), ([3, 3], 0), ([2, 4], 1), ([2, -1], 1)] {
        let reads = [
            Read::Real(&x),
            Read::I32(&batch.cu_lens),
            Read::I64(&batch.pair_offsets),
            Read::I32(&valid),
        ];
        let got = run(&spec, &batch.extents, &reads, &mut [&mut out]);
        assert!(
            matches!(got, Err(OpError::ValidLens { index: i, .. }) if i == index),
            "{valid:?}: {got:?}"
        );
    }
}

#[test]
fn columns_past_the_end_of_a_row_are_an_error() {
    let extents = Batch::new(&[1]).extents;
    let spec = KernelSpec::SliceColumns(SliceColumns {
        from_width: 10,
        start: 8,
        width: 3,
        dtype: F32,
    });
    let got = run(
        &spec,
        &extents,
        &[Read::Real(&[0.0; 10])],
        &mut [&mut [0.0; 3]],
    );
    assert_eq!(
        message(got),
        "slice_columns: the columns end at column 11 of rows of 10; expected at most 10"
    );
    let spec = KernelSpec::AttentionScores(AttentionScores {
        heads: 2,
        kv_heads: 2,
        head: 4,
        scale: 1.0,
        q: HeadView::HeadMajor,
        k: HeadView::TokenMajor {
            offset: 9,
            stride: 16,
        },
        dtype: F32,
    });
    let got = run(&spec, &extents, &[], &mut [&mut [0.0; 1]]);
    assert_eq!(
        message(got),
        "attention_scores_simt: the heads of `k` end at column 17 of rows of 16; expected at most 16"
    );
}

#[test]
fn sizes_of_zero_do_not_panic() {
    let extents = Batch::new(&[1]).extents;
    let spec = KernelSpec::Combine(Combine {
        how: BinaryOp::Sum,
        width: 0,
        dtype: F32,
    });
    let empty = [Read::Real(&[]); 2];
    assert_eq!(run(&spec, &extents, &empty, &mut [&mut []]), Ok(()));
    // No slice can have this number of elements.
    let huge = extents.with_rows(u64::MAX);
    assert!(matches!(
        run(&add(), &huge, &empty, &mut [&mut []]),
        Err(OpError::Length { .. })
    ));
}
