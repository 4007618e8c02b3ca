//! Metrics in Prometheus's text format.

use std::{
    collections::BTreeMap,
    fmt::Write,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use hyper::{Response, StatusCode};

use super::{
    App, Body, Route, of_type,
    schema::{RouteDoc, text},
};
use crate::serve::{Histogram, Kind, Lookup, Model, Tier};

const CODES: [u16; 17] = [
    200, 204, 400, 401, 403, 404, 405, 408, 413, 415, 422, 424, 429, 500, 503, 504, 0,
];

/// Number of responses by route and status.
type Table = Vec<[AtomicU64; CODES.len()]>;

/// Returns a default value for each route, including [`Route::Unknown`].
fn by_route<T: Default>() -> Vec<T> {
    (0..=Route::ALL.len()).map(|_| T::default()).collect()
}

/// Responses by model, route and status.
pub(super) struct Counts {
    /// Responses to requests for which no model was found or needed.
    others: Table,
    /// Tables by model name. Models that are no longer served keep their tables, because counters
    /// must not decrease.
    models: RwLock<BTreeMap<String, Arc<Table>>>,
    seconds: Vec<Histogram>,
}

impl Default for Counts {
    fn default() -> Self {
        Self {
            others: by_route(),
            models: RwLock::default(),
            seconds: by_route(),
        }
    }
}

impl Counts {
    pub fn add(&self, route: Route, model: Option<&str>, status: StatusCode, took: Duration) {
        let route = route as usize;
        let known = CODES.iter().position(|&code| code == status.as_u16());
        let code = known.unwrap_or(CODES.len() - 1);
        let add = |table: &Table| table[route][code].fetch_add(1, Ordering::Relaxed);
        match model {
            None => add(&self.others),
            Some(name) => add(&self.of_model(name)),
        };
        self.seconds[route].add(took.as_secs_f64());
    }

    fn of_model(&self, name: &str) -> Arc<Table> {
        let models = self.models.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(table) = models.get(name) {
            return Arc::clone(table);
        }
        drop(models);
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        let new = || Arc::new(by_route());
        Arc::clone(models.entry(name.to_owned()).or_insert_with(new))
    }

    /// Calls `see` with each table and the name of its model, if any.
    fn each(&self, mut see: impl FnMut(Option<&str>, &Table)) {
        see(None, &self.others);
        let models = self.models.read().unwrap_or_else(PoisonError::into_inner);
        for (name, table) in models.iter() {
            see(Some(name), table);
        }
    }
}

/// Number of responses by status, and a histogram of request durations as [`Histogram::read`] returns it.
type OfRequests = (Vec<(u16, u64)>, (Vec<(f64, u64)>, u64, f64));

impl Counts {
    /// Returns the counts of requests, except those of routes for load balancers, monitoring and
    /// the status page.
    pub fn of_requests(&self) -> OfRequests {
        let routes = Route::ALL.iter().map(|(route, ..)| *route);
        let routes: Vec<Route> = routes
            .filter(|route| !route.is_monitoring())
            .chain([Route::Unknown])
            .collect();
        let mut answers = CODES.map(|code| (code, 0));
        self.each(|_, table| {
            for (at, (_, n)) in answers.iter_mut().enumerate() {
                let own = routes.iter().map(|&route| &table[route as usize][at]);
                *n += own.map(|n| n.load(Ordering::Relaxed)).sum::<u64>();
            }
        });
        let answers = answers.into_iter().filter(|&(_, n)| n > 0).collect();
        let (mut ends, mut count, mut sum) = Histogram::default().read();
        for route in routes {
            let of = self.seconds[route as usize].read();
            ends.iter_mut()
                .zip(of.0)
                .for_each(|(all, own)| all.1 += own.1);
            (count, sum) = (count + of.1, sum + of.2);
        }
        (answers, (ends, count, sum))
    }
}

struct Page(String);

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(
            self.0,
            "# HELP gemmule_{name} {help}\n# TYPE gemmule_{name} {kind}"
        );
    }

    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        let labels: Vec<String> = labels
            .iter()
            .map(|(name, value)| format!("{name}=\"{}\"", escaped(value)))
            .collect();
        let labels = match labels.is_empty() {
            true => String::new(),
            false => format!("{{{}}}", labels.join(",")),
        };
        let _ = writeln!(self.0, "gemmule_{name}{labels} {value}");
    }

    fn histogram(&mut self, name: &str, labels: &[(&str, &str)], of: &Histogram) {
        let (ends, count, sum) = of.read();
        let with = |end: &str, page: &mut Self, n: u64| {
            let mut labels = labels.to_vec();
            labels.push(("le", end));
            page.line(&format!("{name}_bucket"), &labels, n as f64);
        };
        for (end, n) in ends {
            with(&end.to_string(), self, n);
        }
        with("+Inf", self, count);
        self.line(&format!("{name}_sum"), labels, sum);
        self.line(&format!("{name}_count"), labels, count as f64);
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

pub(super) fn response(app: &App) -> Response<Body> {
    let models = app.models.all();
    let mut page = Page(String::new());
    page.head(
        "requests_total",
        "counter",
        "Responses by route, model and status.",
    );
    let routes = || {
        Route::ALL
            .iter()
            .map(|(route, ..)| *route)
            .chain([Route::Unknown])
    };
    app.counts.each(|model, table| {
        for route in routes() {
            for (code, n) in CODES.iter().zip(&table[route as usize]) {
                let n = n.load(Ordering::Relaxed);
                if n == 0 {
                    continue;
                }
                let code = code.to_string();
                let labels = [("route", route.label()), ("code", &code)];
                let labels = labels.into_iter().chain(model.map(|name| ("model", name)));
                page.line("requests_total", &labels.collect::<Vec<_>>(), n as f64);
            }
        }
    });
    page.head(
        "request_seconds",
        "histogram",
        "Time until the head of a response.",
    );
    for route in routes() {
        let seconds = &app.counts.seconds[route as usize];
        if seconds.read().1 > 0 {
            page.histogram("request_seconds", &[("route", route.label())], seconds);
        }
    }
    page.head(
        "stage_seconds",
        "histogram",
        "Time of requests and batches by stage.",
    );
    for model in models.iter() {
        let metrics = model.metrics();
        let stages = [
            ("tokenize", &metrics.tokenize),
            ("queue", &metrics.queue),
            ("device", &metrics.device),
            ("serialize", &metrics.serialize),
        ];
        for (stage, histogram) in stages {
            let labels = [("model", model.name.as_str()), ("stage", stage)];
            page.histogram("stage_seconds", &labels, histogram);
        }
    }
    page.head(
        "batch_seconds",
        "histogram",
        "Time of batches by device, without the time that they wait for other batches.",
    );
    for model in models.iter() {
        for lane in &model.metrics().lanes {
            let labels = [("model", model.name.as_str()), ("device", &lane.device)];
            page.histogram("batch_seconds", &labels, &lane.seconds);
        }
    }
    page.head("batch_tokens", "histogram", "Tokens of batches.");
    for model in models.iter() {
        let labels = [("model", model.name.as_str())];
        page.histogram("batch_tokens", &labels, &model.metrics().batch_tokens);
    }
    page.head(
        "memory_bytes",
        "gauge",
        "Bytes of weights, of the KV cache, and the limit of a batch's intermediate tensors.",
    );
    for model in models.iter() {
        for lane in &model.metrics().lanes {
            for (kind, bytes) in [
                ("weights", &lane.weight_bytes),
                ("cache", &lane.cache_bytes),
                ("batch", &lane.batch_bytes),
            ] {
                let labels = [
                    ("model", model.name.as_str()),
                    ("device", &lane.device),
                    ("kind", kind),
                ];
                let bytes = bytes.load(Ordering::Relaxed);
                if bytes > 0 {
                    page.line("memory_bytes", &labels, bytes as f64);
                }
            }
        }
    }
    type Value = fn(&Model) -> &AtomicU64;
    let values: [(&str, &str, &str, Value); 8] = [
        (
            "tokens_total",
            "counter",
            "Tokens that were computed or generated.",
            |m| &m.metrics().tokens,
        ),
        ("batches_total", "counter", "Batches that ran.", |m| {
            &m.metrics().batches
        }),
        (
            "batch_sequences_total",
            "counter",
            "Sequences in these batches.",
            |m| &m.metrics().batch_sequences,
        ),
        (
            "failed_batches_total",
            "counter",
            "Batches that failed.",
            |m| &m.metrics().failed_batches,
        ),
        (
            "cancelled_total",
            "counter",
            "Inputs and generations whose clients left before the response.",
            |m| &m.metrics().cancelled,
        ),
        ("queue_tokens", "gauge", "Waiting tokens.", |m| {
            &m.metrics().queue_tokens
        }),
        ("queue_requests", "gauge", "Waiting inputs.", |m| {
            &m.metrics().queue_requests
        }),
        (
            "estimate_permille",
            "gauge",
            "Time of the last batch divided by its estimate, in thousandths.",
            |m| &m.metrics().estimate_ratio,
        ),
    ];
    for (name, kind, help, value) in values {
        page.head(name, kind, help);
        for model in models.iter() {
            let value = value(model).load(Ordering::Relaxed);
            page.line(name, &[("model", &model.name)], value as f64);
        }
    }
    page.head("refused_total", "counter", "Refused inputs by reason.");
    for model in models.iter() {
        let metrics = model.metrics();
        let reasons = [
            ("expired", &metrics.expired),
            ("hopeless", &metrics.hopeless),
            ("too_large", &metrics.too_large),
            ("overloaded", &metrics.overloaded),
        ];
        for (reason, n) in reasons {
            let labels = [("model", model.name.as_str()), ("reason", reason)];
            page.line("refused_total", &labels, n.load(Ordering::Relaxed) as f64);
        }
    }
    page.head(
        "queue_oldest_seconds",
        "gauge",
        "Waiting time of the oldest input in the queue.",
    );
    for model in app.models.all().iter() {
        if let Kind::Service(service) = &model.kind {
            let oldest = service.oldest().as_secs_f64();
            page.line("queue_oldest_seconds", &[("model", &model.name)], oldest);
        }
    }
    cache(&mut page, app);
    page.head("ready", "gauge", "Whether the server accepts new requests.");
    page.line(
        "ready",
        &[],
        f64::from(u8::from(app.models.not_ready().is_none())),
    );
    of_type(
        StatusCode::OK,
        "text/plain; version=0.0.4",
        page.0.into_bytes(),
    )
}

pub(super) fn doc() -> RouteDoc {
    RouteDoc::get_as("Metrics for Prometheus", "text/plain", text())
}

/// Adds the metrics of the response cache, if any model has one.
fn cache(page: &mut Page, app: &App) {
    let models = app.models.all();
    let services = || {
        models.iter().filter_map(|model| match &model.kind {
            Kind::Service(service) => Some((model, service.cache()?)),
            Kind::Generation(_) => None,
        })
    };
    let Some((_, cache)) = services().next() else {
        return;
    };
    page.head(
        "cache_requests_total",
        "counter",
        "Cache lookups of inputs.",
    );
    for (model, _) in services() {
        for (tier, name) in Tier::ALL {
            for (lookup, result) in Lookup::ALL {
                let n = model.metrics().cache.read(tier, lookup);
                let labels = [
                    ("model", model.name.as_str()),
                    ("tier", name),
                    ("result", result),
                ];
                // Counters that are 0 are omitted. Tiers that are not configured therefore have no
                // lines.
                if n > 0 {
                    page.line("cache_requests_total", &labels, n as f64);
                }
            }
        }
    }
    page.head("cache_bytes", "gauge", "Bytes of cached responses.");
    for (tier, name) in [Tier::ALL[0], Tier::ALL[1]] {
        page.line("cache_bytes", &[("tier", name)], cache.bytes(tier) as f64);
    }
}
