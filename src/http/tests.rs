use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    Route,
    embeddings::{base64, inputs, normalize, shortened},
    openai, openapi, tei, unescaped,
};
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

/// Notes the fields that a body asks for, and reads nothing.
struct Fields<'a>(&'a mut Vec<&'static str>);

impl<'de> serde::Deserializer<'de> for Fields<'_> {
    type Error = serde::de::value::Error;

    fn deserialize_any<V: serde::de::Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
        Err(serde::de::Error::custom("only the fields are wanted"))
    }

    fn deserialize_struct<V: serde::de::Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        self.0.extend(fields);
        self.deserialize_any(visitor)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

fn fields<T: serde::de::DeserializeOwned>() -> Vec<&'static str> {
    let mut fields = Vec::new();
    assert!(T::deserialize(Fields(&mut fields)).is_err());
    fields.sort_unstable();
    fields
}

#[test]
fn the_document_has_every_route_and_the_fields_that_are_read() {
    let document = openapi::document();
    let of = |path: &str| {
        &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    };
    for (route, path, method) in Route::ALL {
        let operation = &document["paths"][path][method.as_str().to_lowercase()];
        assert_eq!(operation["operationId"], format!("{route:?}"));
        assert_eq!(
            operation["requestBody"].is_object(),
            method == hyper::Method::POST,
            "{path}"
        );
        let sample = path.replace("{model}", "a%2Fb");
        assert_eq!(
            Route::of(&sample),
            (route, method, if sample == path { "" } else { "a%2Fb" })
        );
    }
    for (path, read) in [
        ("/v1/embeddings", fields::<openai::Asked>()),
        ("/v1/rerank", fields::<openai::Rerank>()),
        ("/v2/rerank", fields::<openai::RerankV2>()),
        ("/embed", fields::<tei::Embed>()),
        ("/embed_all", fields::<tei::EmbedAll>()),
        ("/predict", fields::<tei::Predict>()),
        ("/rerank", fields::<tei::Rerank>()),
        ("/similarity", fields::<tei::Similarity>()),
        ("/tokenize", fields::<tei::Tokenize>()),
        ("/decode", fields::<tei::Decode>()),
    ] {
        let mut told: Vec<&String> = of(path)["properties"].as_object().unwrap().keys().collect();
        told.sort_unstable();
        assert_eq!(told, read, "{path}");
    }
    assert_eq!(unescaped("a%2Fb%zz%"), "a/b%zz%");
    // Every reference has its shape.
    let text = document.to_string();
    for part in text.split("#/components/schemas/").skip(1) {
        let name = part.split('"').next().unwrap();
        assert!(
            document["components"]["schemas"][name].is_object(),
            "{name}"
        );
    }
}
