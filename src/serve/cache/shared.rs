//! Shared tier of the response cache: a cache server with Redis's protocol, which several gemmule servers share. One thread with one
//! connection sends the waiting lookups in batches.

use std::{
    sync::mpsc::{Receiver, SyncSender, TryRecvError, channel, sync_channel},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use redis::{Client, Connection, ConnectionLike};

use super::{Key, Lookup, from_bytes, to_bytes};
use crate::{EngineError, serve::Answer};

/// Time limit of a lookup. After the limit, the request is computed.
const WITHIN: Duration = Duration::from_millis(2);
/// Time between a failure and the next attempt to connect.
const REST: Duration = Duration::from_secs(1);
const CONNECT: Duration = Duration::from_secs(1);
/// Max number of queued lookups and answers. Further lookups count as failed, and further answers are dropped.
const MAX_QUEUED: usize = 4096;
/// Max number of lookups and answers that are sent in one batch.
const TOGETHER: usize = 256;

type Then = Box<dyn FnOnce(Option<Answer>, Lookup) + Send>;

enum Job {
    Get(Key, Then, Instant),
    Put(Key, Vec<u8>),
}

/// Shared tier of the response cache. If the cache server fails or is slow, requests are computed as if there were no cache.
pub struct SharedTier {
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl SharedTier {
    /// Starts the thread, which connects in the background.
    ///
    /// # Errors
    /// Returns an error if the URL is not valid, or the system cannot start a thread.
    pub fn start(url: &str) -> Result<Self, EngineError> {
        let client = Client::open(url).map_err(|e| EngineError::CacheAddress {
            url: url.to_owned(),
            problem: e.to_string(),
        })?;
        let (jobs, queue) = sync_channel(MAX_QUEUED);
        let thread = std::thread::Builder::new().name("shared cache".to_owned());
        let thread = thread.spawn(move || run(&client, &queue));
        let thread = thread.map_err(|e| EngineError::Threads {
            problem: e.to_string(),
        })?;
        Ok(Self {
            jobs: Some(jobs),
            thread: Some(thread),
        })
    }

    /// Looks up an answer, and passes it to `then`, usually on another thread.
    pub fn get(&self, key: Key, then: Then) {
        let job = Job::Get(key, then, Instant::now());
        let sent = self.jobs.as_ref().map(|jobs| jobs.try_send(job));
        if let Some(Err(error)) = sent {
            let job = match error {
                std::sync::mpsc::TrySendError::Full(job)
                | std::sync::mpsc::TrySendError::Disconnected(job) => job,
            };
            job.fail();
        }
    }

    /// Stores an answer, unless too many jobs are already waiting.
    pub fn put(&self, key: Key, answer: &Answer) {
        if let Some(jobs) = &self.jobs {
            let _ = jobs.try_send(Job::Put(key, to_bytes(&key, answer)));
        }
    }
}

impl Drop for SharedTier {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // The last handle may be dropped on this thread itself, by a lookup. In that case, do not wait for the thread.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

impl Job {
    fn fail(self) {
        if let Self::Get(_, then, _) = self {
            then(None, Lookup::Error);
        }
    }
}

/// State of the connection.
enum State {
    Connected(Connection),
    /// Another thread is connecting, because resolving the server's name may take long.
    Connecting(Receiver<Option<Connection>>),
    Resting(Instant),
}

fn run(client: &Client, queue: &Receiver<Job>) {
    let mut state = connecting(client);
    let mut is_told = false;
    while let Ok(first) = queue.recv() {
        let mut jobs = vec![first];
        while jobs.len() < TOGETHER
            && let Ok(job) = queue.try_recv()
        {
            jobs.push(job);
        }
        state = match state {
            State::Connecting(found) => match found.try_recv() {
                Ok(Some(connection)) => {
                    is_told = false;
                    State::Connected(connection)
                }
                Err(TryRecvError::Empty) => State::Connecting(found),
                Ok(None) | Err(TryRecvError::Disconnected) => {
                    if !std::mem::replace(&mut is_told, true) {
                        tracing::warn!(
                            "the shared cache cannot be reached; all requests are computed"
                        );
                    }
                    State::Resting(Instant::now() + REST)
                }
            },
            State::Resting(until) if Instant::now() >= until => connecting(client),
            other => other,
        };
        let State::Connected(connection) = &mut state else {
            jobs.into_iter().for_each(Job::fail);
            continue;
        };
        if let Err(problem) = ask(connection, jobs) {
            tracing::warn!("the shared cache failed and is not used for a second: {problem}");
            // Drop the connection. Otherwise, late replies would be mistaken for those of the next batch.
            state = State::Resting(Instant::now() + REST);
        }
    }
}

fn connecting(client: &Client) -> State {
    let (sender, found) = channel();
    let client = client.clone();
    let connect = move || {
        let connection = client.get_connection_with_timeout(CONNECT).ok();
        let connection = connection.filter(|connection| {
            let set = [
                connection.set_read_timeout(Some(WITHIN)),
                connection.set_write_timeout(Some(WITHIN)),
            ];
            set.iter().all(Result::is_ok)
        });
        let _ = sender.send(connection);
    };
    let thread = std::thread::Builder::new().name("shared cache".to_owned());
    // If the thread cannot start, the sender is dropped, and the receiver returns an error.
    let _ = thread.spawn(connect);
    State::Connecting(found)
}

/// Sends jobs in one batch, and passes the result of each lookup to its callback.
fn ask(connection: &mut Connection, jobs: Vec<Job>) -> Result<(), String> {
    let mut pipe = redis::pipe();
    let mut asked = Vec::new();
    for job in jobs {
        match job {
            // The time limit of the lookup has passed, so the request is computed.
            Job::Get(_, then, since) if since.elapsed() > WITHIN => then(None, Lookup::Error),
            Job::Get(key, then, _) => {
                pipe.cmd("GET").arg(name(&key));
                asked.push((key, then));
            }
            Job::Put(key, bytes) => {
                pipe.cmd("SET").arg(name(&key)).arg(bytes).ignore();
            }
        }
    }
    if pipe.is_empty() {
        return Ok(());
    }
    let found: Result<Vec<Option<Vec<u8>>>, _> = pipe.query(connection);
    match found {
        Ok(found) => {
            let mut found = found.into_iter();
            for (key, then) in asked {
                let bytes = found.next().flatten();
                let answer = bytes.and_then(|bytes| from_bytes(&key, &bytes));
                let lookup = match answer {
                    Some(_) => Lookup::Hit,
                    None => Lookup::Miss,
                };
                then(answer, lookup);
            }
            Ok(())
        }
        Err(error) => {
            for (_, then) in asked {
                then(None, Lookup::Error);
            }
            // Keep the connection if it still works. For example, a server that is out of memory refuses to store answers, but still
            // answers lookups.
            match error.is_io_error() || error.is_timeout() || !connection.is_open() {
                true => Err(error.to_string()),
                false => Ok(()),
            }
        }
    }
}

/// Returns the name under which the shared server stores a key.
fn name(key: &Key) -> Vec<u8> {
    [b"gemmule:".as_slice(), key].concat()
}
