use std::collections::HashMap;

use safetensors::{Dtype, tensor::TensorView};

use super::*;
use crate::{
    graph::{Bound, WeightNames},
    tensor::Element,
};

#[test]
fn encoded_elements_are_those_of_the_evaluated_expression() {
    let folder = tempfile::tempdir().expect("room for a folder");
    let values: Vec<f32> = (0..24u8)
        .map(|n| f32::from(n) * 0.37 - 3.0)
        .chain([f32::NAN, f32::INFINITY, 1e-7, 70_000.0])
        .collect();
    let stored = DType::ALL.map(|dtype| (dtype.name(), encode(&values, dtype)));
    let types = [Dtype::F32, Dtype::F16, Dtype::BF16];
    let views = stored.iter().zip(types).map(|((name, bytes), dtype)| {
        let view = TensorView::new(dtype, vec![7, 4], bytes).expect("the sizes agree");
        (*name, view)
    });
    let views: HashMap<&str, TensorView<'_>> = views.collect();
    let file = folder.path().join("model.safetensors");
    safetensors::serialize_to_file(&views, None, &file).expect("room for a file");
    let source = Checkpoint::open(folder.path(), folder.path(), WeightNames::default());
    let source = source.expect("it is valid");
    let dims = vec![7, 4];
    let mut exprs = vec![WeightExpr::Zeros { n: 3 }];
    for dtype in DType::ALL {
        let name = dtype.name().to_owned();
        let (from, rows) = (2, 3);
        exprs.extend([
            WeightExpr::Stored {
                name: name.clone(),
                dims: dims.clone(),
            },
            WeightExpr::Transposed {
                name: name.clone(),
                dims: dims.clone(),
            },
            WeightExpr::Rows {
                name: name.clone(),
                dims: dims.clone(),
                groups: 1,
                from,
                rows,
                interleaved: 0,
            },
            WeightExpr::Rows {
                name: name.clone(),
                dims: dims.clone(),
                groups: 1,
                from,
                rows: 5,
                interleaved: 4,
            },
            WeightExpr::PlusOne {
                name,
                dims: dims.clone(),
            },
        ]);
    }
    let rows = exprs[1..].iter().filter(|e| e.dims() == dims).cloned();
    exprs.push(WeightExpr::ConcatRows(rows.collect()));
    for expr in &exprs {
        let plain = evaluate(expr, &source).expect("it is there");
        for dtype in DType::ALL {
            let encoded = evaluate_as(expr, &source, dtype).expect("it is there");
            assert_eq!(encoded, encode(&plain, dtype), "{expr:?} as {dtype}");
        }
    }
}

/// Each element of the table is the index of its row.
#[test]
fn interleaved_rows_are_separated_in_each_part() {
    let folder = tempfile::tempdir().expect("room for a folder");
    let values: Vec<f32> = (0..14).flat_map(|row| [row as f32; 3]).collect();
    let bytes = encode(&values, DType::F32);
    let view = TensorView::new(Dtype::F32, vec![14, 3], &bytes).expect("the sizes agree");
    let file = folder.path().join("model.safetensors");
    safetensors::serialize_to_file([("w", view)], None, &file).expect("room for a file");
    let source = Checkpoint::open(folder.path(), folder.path(), WeightNames::default());
    let expr = WeightExpr::Rows {
        name: "w".to_owned(),
        dims: vec![14, 3],
        groups: 2,
        from: 1,
        rows: 6,
        interleaved: 4,
    };
    let got = evaluate(&expr, &source.expect("it is valid")).expect("it is there");
    let rows: Vec<f32> = got.chunks(3).map(|row| row[0]).collect();
    assert_eq!(
        rows,
        [
            1.0, 3.0, 2.0, 4.0, 5.0, 6.0, 8.0, 10.0, 9.0, 11.0, 12.0, 13.0
        ]
    );
}

#[test]
fn scales_bring_rows_and_bounded_inputs_to_the_range_of_e4m3() {
    let folder = tempfile::tempdir().expect("room for a folder");
    let matrix = encode(&[0.5, -2.0, 1.0, 0.0, 0.0, 0.0], DType::F32);
    let gamma = encode(&[1.0, -3.0, 0.5], DType::F32);
    let infinite = encode(&[1.0, f32::INFINITY, 0.5], DType::F32);
    let file = folder.path().join("model.safetensors");
    let views = [
        ("w", TensorView::new(Dtype::F32, vec![2, 3], &matrix)),
        ("g", TensorView::new(Dtype::F32, vec![3], &gamma)),
        ("infinite", TensorView::new(Dtype::F32, vec![3], &infinite)),
    ];
    let views = views.map(|(name, view)| (name, view.expect("the sizes agree")));
    safetensors::serialize_to_file(views, None, &file).expect("room for a file");
    let source = Checkpoint::open(folder.path(), folder.path(), WeightNames::default());
    let source = source.expect("it is valid");
    let stored = |name: &str, dims: &[u64]| WeightExpr::Stored {
        name: name.to_owned(),
        dims: dims.to_vec(),
    };
    let input = Bound {
        gamma: vec![stored("g", &[3])],
        beta: Vec::new(),
        linear: None,
    };
    let scale = 3f32.sqrt() * 3.0 / 448.0;
    let got = evaluate(&WeightExpr::Scale(input.clone()), &source).expect("it is there");
    assert!((got[0] / scale - 1.0).abs() < 1e-6, "{got:?}");
    let infinite = Bound {
        gamma: vec![stored("infinite", &[3])],
        ..input.clone()
    };
    let refused = evaluate(&WeightExpr::Scale(infinite), &source).expect_err("it is refused");
    assert!(matches!(refused, CheckpointError::NoBound { tensor } if tensor == "infinite"));
    let weight = stored("w", &[2, 3]);
    let scales = WeightExpr::ProductScales {
        weight: vec![weight.clone()],
        input,
    };
    assert_eq!(scales.dims(), [2]);
    let got_scales = evaluate(&scales, &source).expect("it is there");
    // A row of zeros has scale 1, so the scale of its product is the scale of the input.
    for (got, want) in got_scales.iter().zip([2.0 / 448.0 * scale, scale]) {
        assert!((got / want - 1.0).abs() < 1e-6, "{got}, expected {want}");
    }
    let rows = evaluate_scaled(&weight, &source).expect("it is there");
    // The kept scales of the rows and of the input give the same result as scales that are computed again.
    let kept = Scales::default();
    for bound in Scales::bounds([&scales, &weight].into_iter()) {
        kept.add_input(bound, &source).expect("it is finite");
    }
    kept.add_rows(&weight, &rows);
    let from_kept = kept.evaluate(&scales, &source).expect("it is there");
    assert_eq!(from_kept, got_scales);
    let codes = rows.into_codes();
    let decoded = crate::runtime::elements::decode_values(&codes, Element::E4m3);
    assert_eq!(decoded, [112.0f32, -448.0, 224.0, 0.0, 0.0, 0.0]);
}

#[test]
fn values_that_are_not_finite_are_counted_in_every_type() {
    let values = [1.0, f32::NAN, -f32::INFINITY, 0.0, 65_504.0, f32::INFINITY];
    for dtype in DType::ALL {
        assert_eq!(shard::count_bad(&encode(&values, dtype), dtype), 3);
    }
}

#[test]
fn rows_of_each_group_are_kept_in_order() {
    let mut rows: Vec<u8> = (0..24).collect();
    // Keeps the third and fourth row of each of two groups. A group has six rows of two elements.
    keep_rows(&mut rows, [2, 2, 2], 2, 12);
    assert_eq!(rows, [4, 5, 6, 7, 16, 17, 18, 19]);
}

/// The tensor has several pieces, which are read in parallel.
#[test]
fn large_tensors_are_read_in_order() {
    let folder = tempfile::tempdir().expect("room for a folder");
    let values: Vec<f32> = (0..900_000).map(|n| (n % 8191) as f32).collect();
    let stored = [DType::F16, DType::BF16].map(|dtype| (dtype.name(), encode(&values, dtype)));
    let views = stored.iter().zip([Dtype::F16, Dtype::BF16]);
    let views = views.map(|((name, bytes), dtype)| {
        let view = TensorView::new(dtype, vec![3, 300_000], bytes).expect("the sizes agree");
        (*name, view)
    });
    let views: HashMap<&str, TensorView<'_>> = views.collect();
    let file = folder.path().join("model.safetensors");
    safetensors::serialize_to_file(&views, None, &file).expect("room for a file");
    let source = Checkpoint::open(folder.path(), folder.path(), WeightNames::default());
    let source = source.expect("it is valid");
    for (name, bytes) in &stored {
        let expr = WeightExpr::Stored {
            name: (*name).to_owned(),
            dims: vec![3, 300_000],
        };
        let plain = evaluate(&expr, &source).expect("it is there");
        for dtype in DType::ALL {
            let read = evaluate_as(&expr, &source, dtype).expect("it is there");
            assert!(read == encode(&plain, dtype), "{name} as {dtype}");
            assert!(read == *bytes || dtype.name() != *name, "{name}");
        }
        let both = WeightExpr::ConcatRows(vec![expr.clone(), expr]);
        let read = evaluate_as(&both, &source, DType::F32).expect("it is there");
        assert!(read == encode(&[plain.clone(), plain].concat(), DType::F32));
    }
}
