//! Calls route handlers without connections, for fuzzing (`fuzz/`).

use std::{future::poll_fn, io};

use hyper::Method;
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};

use super::{App, Body, HttpChoice, Public, RequestContext, Route, dispatch, request::Fields};
use crate::serve::{Models, Submit};

/// Handlers of the routes whose requests have a body, with the models that they use.
pub struct Bodies {
    runtime: Runtime,
    app: App,
    document: Value,
}

impl Bodies {
    /// Creates handlers that use `models`.
    ///
    /// # Errors
    /// Returns an error if the system cannot start a runtime.
    pub fn new(models: Models) -> io::Result<Self> {
        Ok(Self {
            runtime: Builder::new_current_thread().enable_all().build()?,
            app: App::new(models, HttpChoice::default()),
            document: dispatch::document(Public::All),
        })
    }

    /// Returns the paths of the routes whose requests have a body.
    pub fn paths() -> impl Iterator<Item = &'static str> {
        let routes = Route::ALL.into_iter();
        let posts = routes.filter(|(.., method)| *method == Method::POST);
        posts.map(|(_, path, _)| path)
    }

    /// Handles a request body, and returns the status and the body of the response.
    ///
    /// # Panics
    /// Panics if the OpenAPI document does not list the response's status, or if a JSON response is not valid JSON.
    pub fn post(&self, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
        let (route, ..) = Route::of(path, &Method::POST);
        let submit = Submit::default();
        self.runtime.block_on(async {
            let asking = RequestContext::of(&self.app);
            let answered = match Fields::read(self.app.fields, route, body.to_vec()) {
                Ok(fields) => asking.of_body(route, fields, submit, false).await,
                Err(failure) => Err(failure),
            };
            let response = answered.unwrap_or_else(|failure| failure.response(route.style()));
            let status = response.status().as_u16();
            let told = &self.document["paths"][path]["post"]["responses"];
            assert!(told[status.to_string()].is_object(), "{path} gave {status}");
            let bytes = match response.into_body() {
                Body::Whole(bytes) => {
                    let bytes = bytes.map_or_else(Vec::new, |bytes| bytes.to_vec());
                    assert!(serde_json::from_slice::<Value>(&bytes).is_ok());
                    bytes
                }
                Body::Events(mut events) => {
                    let mut bytes = Vec::new();
                    while let Some(part) = poll_fn(|context| events.poll(context)).await {
                        bytes.extend(part);
                    }
                    bytes
                }
            };
            (status, bytes)
        })
    }
}
