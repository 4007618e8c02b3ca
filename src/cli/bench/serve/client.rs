//! HTTP/1.1 client with persistent connections.

use std::{
    net::{SocketAddr, ToSocketAddrs},
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use http_body_util::{BodyExt, Full};
use hyper::{Request, Uri, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use miette::{Report, miette};
use serde_json::{Value, json};
use tokio::{net::TcpStream, sync::Semaphore};

use super::{
    Answered, Target,
    inputs::{Input, Inputs},
};
use crate::{
    EngineError,
    files::{self, Kind},
};

/// Route to test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Route {
    Embeddings,
    Completions,
}

/// A server, and the idle connections to it.
#[derive(Clone)]
pub(super) struct Server(Arc<Shared>);

struct Shared {
    address: SocketAddr,
    host: String,
    key: Option<String>,
    route: Route,
    model: Option<String>,
    inputs: Inputs,
    new: u32,
    whole: bool,
    deadline_ms: Option<u64>,
    idle: Mutex<Vec<Sender>>,
    places: Semaphore,
}

type Sender = http1::SendRequest<Full<Bytes>>;

impl Server {
    pub fn new(url: &str, args: &super::Args) -> Result<Self, Report> {
        let wrong = |problem: &str| {
            miette!("`{url}` {problem}; expected a server's address, such as http://127.0.0.1:8080")
        };
        let uri: Uri = url.parse().map_err(|_| wrong("is not a URL"))?;
        if uri.scheme_str() != Some("http") {
            return Err(wrong(
                "does not begin with http://, the only supported scheme",
            ));
        }
        let host = uri.authority().ok_or_else(|| wrong("names no host"))?;
        let name = host.host().trim_matches(['[', ']']);
        let found = (name, uri.port_u16().unwrap_or(80)).to_socket_addrs();
        let found = found.ok().and_then(|mut all| all.next());
        let address = found.ok_or_else(|| wrong("names a host that cannot be resolved"))?;
        let key = match &args.key_file {
            Some(file) => {
                let text = files::text(file, Kind::Config).map_err(EngineError::from)?;
                Some(text.trim().to_owned())
            }
            None => None,
        };
        Ok(Self(Arc::new(Shared {
            address,
            host: host.to_string(),
            key,
            route: args.route,
            model: args.model.clone(),
            inputs: Inputs::of(&args.inputs)?,
            new: args.new,
            whole: args.whole,
            deadline_ms: args.deadline_ms,
            idle: Mutex::new(Vec::new()),
            places: Semaphore::new(args.connections),
        })))
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Sender>> {
        self.0.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connection(&self) -> Result<Sender, String> {
        loop {
            let Some(mut sender) = self.idle().pop() else {
                break;
            };
            // The server may have closed a connection that was idle for long.
            if sender.ready().await.is_ok() {
                return Ok(sender);
            }
        }
        let stream = TcpStream::connect(self.0.address).await;
        let stream = stream.map_err(|e| format!("no connection: {e}"))?;
        let _ = stream.set_nodelay(true);
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| format!("no connection: {e}"))?;
        tokio::spawn(connection);
        Ok(sender)
    }

    fn body(&self, number: u64, tokens: u32) -> Vec<u8> {
        let shared = &self.0;
        // Tokenizers add one special token at the beginning and one at the end.
        let marks = if shared.route == Route::Embeddings {
            2
        } else {
            0
        };
        let input: Value = match shared.inputs.get(number, tokens, marks) {
            Input::Ids(ids) => ids.into(),
            Input::Text(text) => text.into(),
        };
        let mut body = match shared.route {
            Route::Embeddings => {
                json!({"input": input, "encoding_format": "base64", "truncate": true})
            }
            Route::Completions => json!({"prompt": input, "max_tokens": shared.new}),
        };
        if shared.route == Route::Completions && !shared.whole {
            body["stream"] = true.into();
            body["stream_options"] = json!({"include_usage": true});
        }
        if let Some(model) = &shared.model {
            body["model"] = model.as_str().into();
        }
        body.to_string().into_bytes()
    }

    async fn asked(&self, number: u64, tokens: u32) -> Result<Answered, String> {
        let shared = &self.0;
        let path = match shared.route {
            Route::Embeddings => "/v1/embeddings",
            Route::Completions => "/v1/completions",
        };
        let body = self.body(number, tokens);
        let place = shared.places.try_acquire();
        let has_waited = place.is_err();
        let _place = match place {
            Ok(place) => Ok(place),
            Err(_) => shared.places.acquire().await,
        };
        let mut sender = self.connection().await?;
        let mut request = Request::post(path)
            .header("host", &shared.host)
            .header("content-type", "application/json");
        if let Some(key) = &shared.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        if let Some(ms) = shared.deadline_ms {
            request = request.header("x-request-timeout-ms", ms);
        }
        let request = request
            .body(Full::new(Bytes::from(body)))
            .map_err(|e| format!("no request: {e}"))?;
        let broken = |e: hyper::Error| format!("the connection broke: {e}");
        let response = sender.send_request(request).await.map_err(broken)?;
        let mut answered = Answered {
            status: response.status().as_u16(),
            has_waited,
            ..Answered::default()
        };
        let mut body = response.into_body();
        let mut bytes = Vec::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(broken)?;
            if let Some(data) = frame.data_ref() {
                answered.first.get_or_insert_with(Instant::now);
                bytes.extend_from_slice(data);
            }
        }
        self.idle().push(sender);
        if answered.status != 200 {
            let text: String = String::from_utf8_lossy(&bytes).chars().take(200).collect();
            answered.problem = Some(format!("{}: {text}", answered.status));
            return Ok(answered);
        }
        let usage = usage(&bytes);
        match shared.route {
            Route::Embeddings => {
                answered.first = None;
                answered.tokens = usage.map_or(0, |(prompt, _)| prompt);
            }
            Route::Completions => match usage {
                Some((_, written)) => answered.tokens = written,
                None => {
                    let end = bytes.len().saturating_sub(200);
                    let text = String::from_utf8_lossy(&bytes[end..]).into_owned();
                    answered.problem = Some(format!("a text without an end: {text}"));
                    answered.status = 0;
                }
            },
        }
        Ok(answered)
    }
}

impl Target for Server {
    async fn ask(&self, number: u64, tokens: u32) -> Answered {
        match self.asked(number, tokens).await {
            Ok(answered) => answered,
            Err(problem) => Answered {
                problem: Some(problem),
                ..Answered::default()
            },
        }
    }
}

/// Returns the number of tokens of the prompt and of the text. Only the `usage` object of the response is parsed.
fn usage(bytes: &[u8]) -> Option<(u64, u64)> {
    const KEY: &[u8] = b"\"usage\":{";
    let at = bytes.windows(KEY.len()).rposition(|w| w == KEY)? + KEY.len() - 1;
    let end = bytes[at..].iter().position(|&b| b == b'}')? + at + 1;
    let usage: Value = serde_json::from_slice(&bytes[at..end]).ok()?;
    let n = |name: &str| usage[name].as_u64().unwrap_or(0);
    Some((n("prompt_tokens"), n("completion_tokens")))
}
