//! The handler and the documentation of each route.

use std::sync::LazyLock;

use hyper::{Request, StatusCode};
use serde_json::Value;

use super::{
    HandlerResult, Public, RequestContext, Route, cohere, error::Failure, fields::FieldTable,
    generation, heads, health, json, late, metrics, openai, openapi, request::Fields,
    schema::RouteDoc, status, tei, tokens, transfer::Upload, translation, unescaped,
};
use crate::serve::{LOADING, Submit};

/// Handles a request to a route without a body. Returns `None` for any other route; the caller then reads the body of the request. Until
/// the models are loaded, returns an error for every route that needs them, with or without a body.
pub(super) fn without_body(
    app: &RequestContext<'_>,
    route: Route,
    request: &Request<Upload>,
) -> Option<HandlerResult> {
    Some(match route {
        Route::Health => Ok(health::health()),
        Route::Ready => health::ready(&app.models),
        Route::Metrics => Ok(metrics::response(app)),
        Route::OpenApi => Ok(json(StatusCode::OK, &document(app.choice.public))),
        Route::Page => Ok(status::page()),
        Route::Status => Ok(status::counts(app)),
        Route::Unknown => Err(Failure::no_route(request.uri().path())),
        _ if !app.models.is_loaded() => Err(Failure::not_ready(LOADING)),
        Route::Models => Ok(openai::models(&app.models)),
        Route::Model => {
            let (.., name) = Route::of(request.uri().path(), request.method());
            openai::model(&app.models, &unescaped(name))
        }
        Route::Info => tei::info(&app.models),
        _ => return None,
    })
}

/// Handles a request whose body has been parsed.
pub(super) async fn handled(
    app: &RequestContext<'_>,
    route: Route,
    fields: Fields,
    submit: Submit,
    is_raw: bool,
) -> HandlerResult {
    match route {
        Route::Embeddings => openai::embeddings(app, fields, submit, is_raw).await,
        Route::MultiVector => late::multi_vector(app, fields, submit).await,
        Route::Completions => generation::completions(app, fields, submit).await,
        Route::ChatCompletions => generation::chat(app, fields, submit).await,
        Route::Translate => translation::translate(app, fields, submit).await,
        Route::Embed => tei::embed(app, fields, submit).await,
        Route::EmbedAll => tei::embed_all(app, fields, submit).await,
        Route::EmbedSparse => tei::embed_sparse(app, fields, submit).await,
        Route::Similarity => tei::similarity(app, fields, submit).await,
        Route::Tokenize => tokens::tokenize(app, fields).await,
        Route::Decode => tokens::decode(app, fields).await,
        Route::Predict => tei::predict(app, fields, submit).await,
        Route::TeiRerank => tei::rerank(app, fields, submit).await,
        Route::RerankV2 => openai::rerank_v2(app, fields, submit).await,
        Route::EmbedV2 => cohere::embed(app, fields, submit).await,
        Route::TokenClassification => heads::entities(app, fields, submit).await,
        Route::PredictTokens => heads::predict_tokens(app, fields, submit).await,
        Route::FillMask => heads::fill_mask(app, fields, submit).await,
        Route::ZeroShot => heads::zero_shot(app, fields, submit).await,
        Route::QuestionAnswering => heads::answer(app, fields, submit).await,
        Route::Base => tei::base(app, fields, submit).await,
        Route::Rerank => openai::rerank(app, fields, submit).await,
        // `without_body` has handled requests to these routes.
        Route::Info
        | Route::Models
        | Route::Model
        | Route::Health
        | Route::Ready
        | Route::Metrics
        | Route::OpenApi
        | Route::Page
        | Route::Status
        | Route::Unknown => Err(Failure::no_route(route.name())),
    }
}

/// Returns the documentation of a route.
fn documented(route: Route) -> RouteDoc {
    match route {
        Route::Embeddings => openai::embeddings_doc(),
        Route::MultiVector => late::multi_vector_doc(),
        Route::Completions => generation::completions_doc(),
        Route::ChatCompletions => generation::chat_doc(),
        Route::Translate => translation::translate_doc(),
        Route::Embed => tei::embed_doc(),
        Route::EmbedAll => tei::embed_all_doc(),
        Route::EmbedSparse => tei::embed_sparse_doc(),
        Route::Similarity => tei::similarity_doc(),
        Route::Tokenize => tokens::tokenize_doc(),
        Route::Decode => tokens::decode_doc(),
        Route::Predict => tei::predict_doc(),
        Route::TeiRerank => tei::rerank_doc(),
        Route::RerankV2 => openai::rerank_v2_doc(),
        Route::EmbedV2 => cohere::embed_doc(),
        Route::TokenClassification => heads::entities_doc(),
        Route::PredictTokens => heads::predict_tokens_doc(),
        Route::FillMask => heads::fill_mask_doc(),
        Route::ZeroShot => heads::zero_shot_doc(),
        Route::QuestionAnswering => heads::answer_doc(),
        Route::Base => tei::base_doc(),
        Route::Rerank => openai::rerank_doc(),
        Route::Info => tei::info_doc(),
        Route::Models => openai::models_doc(),
        Route::Model => openai::model_doc(),
        Route::Health => health::health_doc(),
        Route::Ready => health::ready_doc(),
        Route::Metrics => metrics::doc(),
        Route::Page => status::page_doc(),
        Route::Status => status::counts_doc(),
        Route::OpenApi => openapi::doc(),
        // No path has this route, so the document does not contain it.
        Route::Unknown => RouteDoc::get("No route", Value::Null),
    }
}

/// Returns the table of all request fields.
pub(super) fn field_table() -> &'static FieldTable {
    static TABLE: LazyLock<FieldTable> = LazyLock::new(|| {
        let routes = Route::ALL.into_iter().map(|(route, ..)| route);
        FieldTable::new(routes.filter_map(|route| Some((route, documented(route).body?))))
    });
    &TABLE
}

/// Returns the OpenAPI document of a server. `public` are the routes that need no key.
pub(super) fn document(public: Public) -> Value {
    openapi::document(public, field_table(), documented)
}
