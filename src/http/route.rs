//! Routes of the server, with their paths, methods and error styles.

use hyper::Method;

/// Format of an error response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// `{"error": {"message", "type", "param", "code"}}`
    OpenAi,
    /// `{"error", "error_type"}`, with TEI's codes.
    Tei,
    /// `{"message"}`
    Cohere,
}

/// The text that an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// An input of the request.
    Input,
    /// The query of the request together with an input, because the model reads them as one sequence.
    Pair,
    /// The query of the request.
    Query,
}

/// Route of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Embeddings,
    MultiVector,
    Completions,
    ChatCompletions,
    Translate,
    Embed,
    EmbedAll,
    EmbedSparse,
    Predict,
    TeiRerank,
    Similarity,
    Tokenize,
    Decode,
    Rerank,
    RerankV2,
    EmbedV2,
    TokenClassification,
    PredictTokens,
    FillMask,
    ZeroShot,
    QuestionAnswering,
    Info,
    Models,
    Model,
    Health,
    Ready,
    Metrics,
    OpenApi,
    Page,
    Base,
    Status,
    Unknown,
}

impl Route {
    pub(super) const ALL: [(Route, &'static str, Method); 31] = [
        (Route::Embeddings, "/v1/embeddings", Method::POST),
        (Route::MultiVector, "/v1/multi-vector", Method::POST),
        (Route::Completions, "/v1/completions", Method::POST),
        (Route::ChatCompletions, "/v1/chat/completions", Method::POST),
        (Route::Translate, "/v1/translate", Method::POST),
        (Route::Embed, "/embed", Method::POST),
        (Route::EmbedAll, "/embed_all", Method::POST),
        (Route::EmbedSparse, "/embed_sparse", Method::POST),
        (Route::Predict, "/predict", Method::POST),
        (Route::TeiRerank, "/rerank", Method::POST),
        (Route::Similarity, "/similarity", Method::POST),
        (Route::Tokenize, "/tokenize", Method::POST),
        (Route::Decode, "/decode", Method::POST),
        (Route::Rerank, "/v1/rerank", Method::POST),
        (Route::RerankV2, "/v2/rerank", Method::POST),
        (Route::EmbedV2, "/v2/embed", Method::POST),
        (
            Route::TokenClassification,
            "/v1/token-classification",
            Method::POST,
        ),
        (Route::PredictTokens, "/predict_tokens", Method::POST),
        (Route::FillMask, "/v1/fill-mask", Method::POST),
        (
            Route::ZeroShot,
            "/v1/zero-shot-classification",
            Method::POST,
        ),
        (
            Route::QuestionAnswering,
            "/v1/question-answering",
            Method::POST,
        ),
        (Route::Info, "/info", Method::GET),
        (Route::Models, "/v1/models", Method::GET),
        (Route::Model, "/v1/models/{model}", Method::GET),
        (Route::Health, "/health", Method::GET),
        (Route::Ready, "/ready", Method::GET),
        (Route::Metrics, "/metrics", Method::GET),
        (Route::OpenApi, "/openapi.json", Method::GET),
        (Route::Page, "/", Method::GET),
        (Route::Base, "/", Method::POST),
        (Route::Status, "/status.json", Method::GET),
    ];

    /// Compares `path` with the path `known` of a route. Returns the part that the variable of `known` matches, which is empty if `known`
    /// has no variable. Returns `None` if the paths do not match.
    fn matched<'p>(known: &str, path: &'p str) -> Option<&'p str> {
        match known.split_once('{') {
            None => (known == path).then_some(""),
            Some((before, _)) => path.strip_prefix(before).filter(|rest| !rest.is_empty()),
        }
    }

    /// Returns the routes of a path. Each has its method and the value of the path's variable, such as `{model}`.
    pub(super) fn all_of(path: &str) -> impl Iterator<Item = (Self, Method, &str)> {
        Self::ALL
            .into_iter()
            .filter_map(move |(route, known, method)| {
                Some((route, method, Self::matched(known, path)?))
            })
    }

    /// Finds the route for a path and a method. Returns the route, its method, and the value of the path's variable. If the path does not
    /// support the method, returns the first route of the path. If no route has the path, returns [`Route::Unknown`].
    pub(super) fn of<'p>(path: &'p str, method: &Method) -> (Self, Method, &'p str) {
        let exact = Self::all_of(path).find(|(_, own, _)| own == method);
        let found = exact.or_else(|| Self::all_of(path).next());
        found.unwrap_or((Self::Unknown, Method::GET, ""))
    }

    pub(super) fn name(self) -> &'static str {
        let found = Self::ALL.iter().find(|(route, ..)| *route == self);
        found.map_or("other", |(_, name, _)| name)
    }

    /// Returns the label of the route in metrics. It is unique, unlike `name`.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Base => "POST /",
            route => route.name(),
        }
    }

    pub(super) fn style(self) -> Style {
        match self {
            Self::Embed
            | Self::EmbedAll
            | Self::EmbedSparse
            | Self::Predict
            | Self::PredictTokens
            | Self::TeiRerank
            | Self::Similarity
            | Self::Tokenize
            | Self::Decode
            | Self::Base
            | Self::Info => Style::Tei,
            Self::RerankV2 | Self::EmbedV2 => Style::Cohere,
            _ => Style::OpenAi,
        }
    }

    /// Returns the request field that contains input `index`, and the name of this input in errors.
    pub(super) fn input(self, subject: Subject, index: usize) -> (&'static str, String) {
        let (param, name) = match self {
            Self::Embed
            | Self::EmbedAll
            | Self::EmbedSparse
            | Self::Predict
            | Self::Tokenize
            | Self::TokenClassification
            | Self::PredictTokens
            | Self::FillMask => ("inputs", format!("input {index}")),
            Self::Similarity => match index.checked_sub(1) {
                None => (
                    "inputs.source_sentence",
                    "`inputs.source_sentence`".to_owned(),
                ),
                Some(at) => (
                    "inputs.sentences",
                    format!("item {at} of `inputs.sentences`"),
                ),
            },
            Self::TeiRerank | Self::EmbedV2 => ("texts", format!("text {index}")),
            Self::Rerank | Self::RerankV2 => ("documents", format!("document {index}")),
            Self::ZeroShot => ("inputs", format!("pair {index} of a text and a label")),
            Self::QuestionAnswering => ("context", format!("part {index} of the context")),
            _ => ("input", format!("input {index}")),
        };
        match subject {
            Subject::Input => (param, name),
            Subject::Pair => (param, format!("the query together with {name}")),
            Subject::Query => ("query", "the query".to_owned()),
        }
    }

    /// Returns the JSON of the request field and the value that make the route truncate inputs; `None` if the route has no such field.
    pub(super) fn truncation(self) -> Option<&'static str> {
        match self {
            Self::EmbedV2 => Some(r#""truncate": "END""#),
            Self::Similarity => Some(r#""parameters": {"truncate": true}"#),
            Self::Embeddings
            | Self::MultiVector
            | Self::Embed
            | Self::EmbedAll
            | Self::EmbedSparse
            | Self::Predict
            | Self::TeiRerank
            | Self::Rerank
            | Self::TokenClassification
            | Self::PredictTokens
            | Self::FillMask
            | Self::ZeroShot => Some(r#""truncate": true"#),
            _ => None,
        }
    }

    /// Returns whether the route is for load balancers and monitoring.
    pub(super) fn is_monitoring(self) -> bool {
        matches!(
            self,
            Self::Health | Self::Ready | Self::Metrics | Self::OpenApi | Self::Page | Self::Status
        )
    }
}
