//! Descriptions of the routes for task heads.

use serde_json::{Value, json};

use super::{Described, Route, schema::*};

/// Returns the description of a route for a task head.
pub(super) fn described(route: Route) -> Described {
    let of = |summary, body: Value, answer: Value| -> Described {
        Described {
            summary,
            body: Some(body),
            answers: json_answer(answer),
        }
    };
    let inputs = || {
        let list = json!({"type": "array", "minItems": 1, "items": {"anyOf": [
            some_text(), {"type": "array", "minItems": 1, "maxItems": 1, "items": some_text()},
        ]}});
        json!({"anyOf": [some_text(), list]})
    };
    let rules = || only(json!([null, "none", "simple", "first", "average", "max"]));
    let labels = || or_null(json!({"type": "array", "items": text()}));
    let top_k = || or_null(json!({"type": "integer", "minimum": 1, "maximum": 1000}));
    let one_or_list = |one: Value| json!({"anyOf": [one.clone(), list(one)]});
    let place = json!({"start": whole(0), "end": whole(0)});
    match route {
        Route::TokenClassification => {
            let mut entity = place;
            entity["entity"] = text();
            entity["entity_group"] = text();
            entity["index"] = whole(0);
            entity["word"] = text();
            entity["score"] = number();
            of(
                "Labels tokens or finds entities, like the pipeline of transformers",
                object(
                    &["inputs"],
                    json!({
                        "model": or_null(text()), "inputs": inputs(), "truncate": flag(),
                        "aggregation_strategy": rules(), "ignore_labels": labels(),
                    }),
                ),
                one_or_list(list(object(&["word", "score", "start", "end"], entity))),
            )
        }
        Route::PredictTokens => {
            let mut token = place;
            token["token"] = text();
            token["token_id"] = whole(0);
            token["results"] = json!({"type": "object", "additionalProperties": number()});
            of(
                "Scores all labels of tokens, or finds entities (TEI)",
                object(
                    &["inputs"],
                    json!({
                        "model": or_null(text()), "inputs": inputs(), "truncate": flag(),
                        "raw_scores": flag(), "aggregation_strategy": rules(), "ignore_labels": labels(),
                    }),
                ),
                list(list(object(&["token", "start", "end", "results"], token))),
            )
        }
        Route::FillMask => of(
            "Fills masks, like the pipeline of transformers",
            object(
                &["inputs"],
                json!({
                    "model": or_null(text()), "inputs": inputs(), "truncate": flag(), "top_k": top_k(),
                    "targets": {"anyOf": [{"type": "null"}, inputs()]},
                }),
            ),
            list(json!({})),
        ),
        Route::ZeroShot => of(
            "Scores labels that the model was not trained on, like the pipeline of transformers",
            object(
                &["inputs", "candidate_labels"],
                json!({
                    "model": or_null(text()), "inputs": inputs(), "candidate_labels": inputs(),
                    "hypothesis_template": or_null(text()), "multi_label": flag(), "truncate": flag(),
                }),
            ),
            one_or_list(object(
                &["sequence", "labels", "scores"],
                json!({"sequence": text(), "labels": list(text()), "scores": list(number())}),
            )),
        ),
        _ => {
            let mut answer = place;
            answer["answer"] = text();
            answer["score"] = number();
            of(
                "Answers a question with parts of a text, like the pipeline of transformers 4",
                object(
                    &["question", "context"],
                    json!({
                        "model": or_null(text()), "question": some_text(), "context": some_text(),
                        "top_k": top_k(), "max_answer_len": top_k(), "max_seq_len": or_null(whole(1)),
                        "doc_stride": or_null(whole(0)), "handle_impossible_answer": flag(),
                        "align_to_words": flag(),
                    }),
                ),
                one_or_list(object(&["answer", "score", "start", "end"], answer)),
            )
        }
    }
}
