use proptest::prelude::*;
use serde_json::{Value, json};

use super::embeddings::{base64, inputs, normalize, shortened};
use crate::serve::Text;

#[test]
fn base64_is_that_of_the_standard() {
    // 1.0, and -2.5 behind it, as Python's base64 gives them.
    assert_eq!(base64(&[]), "");
    assert_eq!(base64(&[1.0]), "AACAPw==");
    assert_eq!(base64(&[1.0, -2.5]), "AACAPwAAIMA=");
    assert_eq!(base64(&[1.0, -2.5, 0.0]), "AACAPwAAIMAAAAAA");
}

#[test]
fn inputs_have_the_four_shapes_of_openai() {
    let read = |value: Value| inputs("input", &value).ok();
    let text = |text: &str| Text::One(text.to_owned());
    assert_eq!(read(json!("a")), Some(vec![text("a")]));
    assert_eq!(read(json!(["a", "b"])), Some(vec![text("a"), text("b")]));
    assert_eq!(read(json!([1, 2])), Some(vec![Text::Ids(vec![1, 2])]));
    let lists = vec![Text::Ids(vec![1]), Text::Ids(vec![2, 3])];
    assert_eq!(read(json!([[1], [2, 3]])), Some(lists));
    for wrong in [
        json!(null),
        json!(1),
        json!([]),
        json!([1, "a"]),
        json!([[1.5]]),
        json!([-1]),
    ] {
        assert_eq!(read(wrong.clone()), None, "{wrong}");
    }
}

proptest! {
    #[test]
    fn embeddings_that_are_shortened_have_unit_length(
        values in prop::collection::vec(-10.0_f32..10.0, 2..40),
        n in 1_usize..40,
    ) {
        let n = n.min(values.len() - 1);
        let short = shortened(values.clone(), Some(n)).unwrap();
        prop_assert_eq!(short.len(), n);
        let length: f32 = short.iter().map(|v| v * v).sum();
        prop_assert!(length == 0.0 || (length - 1.0).abs() < 1e-5);
        prop_assert_eq!(shortened(values.clone(), Some(values.len())).unwrap(), values.clone());
        prop_assert!(shortened(values.clone(), Some(values.len() + 1)).is_err());
        prop_assert!(shortened(values, Some(0)).is_err());
    }
}

#[test]
fn a_vector_of_zeros_stays_one() {
    let mut zeros = [0.0; 3];
    normalize(&mut zeros);
    assert_eq!(zeros, [0.0; 3]);
}
