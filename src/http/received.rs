//! Reads request bodies within limits on size, time and memory.

use http_body_util::BodyExt;
use hyper::{Request, body::Body as _};

use super::{App, LARGE, error::Failure, gzip::Encoding, transfer::Upload};
use crate::serve::Held;

/// A body, and the memory that is reserved for it until its request is charged.
pub(super) struct Received {
    pub bytes: Vec<u8>,
    held: Vec<Held>,
}

impl Received {
    /// Returns the bytes and releases their reservation. The caller must have charged the request for them.
    pub fn charged(self) -> Vec<u8> {
        self.held.into_iter().for_each(Held::end);
        self.bytes
    }
}

impl App {
    /// Reads the body of a request, within its size and time limits.
    pub(super) async fn body(
        &self,
        request: Request<Upload>,
        encoding: Encoding,
    ) -> Result<Received, Failure> {
        let max = self.choice.max_body;
        let length = request.body().size_hint();
        if length.lower() > max as u64 {
            return Err(Failure::large_body(max));
        }
        let inflated = match encoding {
            Encoding::Identity => 0,
            Encoding::Gzip => max as u64,
        };
        let bytes = length.exact().unwrap_or(LARGE as u64);
        let held = self.memory.body(bytes + inflated).await;
        let mut received = Received {
            bytes: Vec::with_capacity(length.exact().map_or(0, |length| length as usize)),
            held: vec![held],
        };
        let reading = self.read(request.into_body(), &mut received, length.exact().is_some());
        match tokio::time::timeout(self.choice.body_time, reading).await {
            Ok(read) => read.map(|()| received),
            Err(_) => Err(Failure::slow_body(self.choice.body_time)),
        }
    }

    async fn read(
        &self,
        mut body: Upload,
        into: &mut Received,
        is_charged: bool,
    ) -> Result<(), Failure> {
        let max = self.choice.max_body;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| Failure::broken_body(&error.to_string()))?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            let length = into.bytes.len() + data.len();
            if length > max {
                return Err(Failure::large_body(max));
            }
            if !is_charged && length > LARGE && into.held.len() == 1 {
                // The length of a chunked body is not known, so reserve the maximum.
                into.held.push(self.memory.body(max as u64).await);
            }
            into.bytes.extend_from_slice(&data);
        }
        Ok(())
    }
}
