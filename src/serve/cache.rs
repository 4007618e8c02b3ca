//! Response cache with up to three tiers: memory, a file, and a cache server that is shared with other gemmule servers. It is off by
//! default.
//!
//! A key is a digest of everything that determines an answer: the model (see [`digest`]), the input as it was sent, and the options of the
//! request. A hit therefore also saves tokenizing. Equal requests share one computation ([`Coalescer`]). Errors are never cached.

mod file;
#[cfg(feature = "shared-cache")]
mod shared;

use std::{
    collections::{HashMap, hash_map},
    fs,
    io::{self, Read},
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use quick_cache::{Weighter, sync};
use sha2::{Digest, Sha256};

use super::{Answer, Submit, Text};
use crate::{Engine, EngineError, runtime::weights::ModelFiles};

pub(super) use file::FileTier;
#[cfg(feature = "shared-cache")]
pub(super) use shared::SharedTier;

/// Digest of everything that determines an answer.
pub(super) type Key = [u8; 32];

/// Options of the response cache.
#[derive(Clone, Debug, Default)]
pub struct CacheChoice {
    /// Max bytes of answers in memory.
    pub memory_bytes: u64,
    /// Path and max size in bytes of the cache file.
    pub file: Option<(PathBuf, u64)>,
    /// URL of a server with Redis's protocol, such as `redis://host:6379/0`. Other gemmule servers may share this server.
    #[cfg(feature = "shared-cache")]
    pub shared: Option<String>,
}

/// Tier of the response cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    Memory,
    File,
    Shared,
}

/// Result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    Hit,
    Miss,
    /// An equal request was already being computed.
    Joined,
    /// The tier failed or timed out. This counts as a miss.
    Error,
}

impl Tier {
    pub const ALL: [(Self, &'static str); 3] = [
        (Self::Memory, "memory"),
        (Self::File, "file"),
        (Self::Shared, "shared"),
    ];
}

impl Lookup {
    pub const ALL: [(Self, &'static str); 4] = [
        (Self::Hit, "hit"),
        (Self::Miss, "miss"),
        (Self::Joined, "joined"),
        (Self::Error, "error"),
    ];
}

/// Number of lookups, by tier and result.
#[derive(Debug, Default)]
pub struct Lookups([[AtomicU64; 4]; 3]);

impl Lookups {
    pub(super) fn add(&self, tier: Tier, lookup: Lookup) {
        self.0[tier as usize][lookup as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub fn read(&self, tier: Tier, lookup: Lookup) -> u64 {
        self.0[tier as usize][lookup as usize].load(Ordering::Relaxed)
    }
}

/// Response cache of a process, shared by all its models.
pub struct Cache {
    memory: sync::Cache<Key, Arc<Answer>, Weight>,
    file: Option<FileTier>,
    #[cfg(feature = "shared-cache")]
    shared: Option<SharedTier>,
}

/// Weighs answers by their bytes.
#[derive(Clone)]
struct Weight;

/// Bytes of an answer in addition to its values: the key, and the overhead of the map and the allocator.
const OVERHEAD: u64 = 160;

fn weight(answer: &Answer) -> u64 {
    4 * (answer.values.len() + answer.entries.len()) as u64 + OVERHEAD
}

impl Weighter<Key, Arc<Answer>> for Weight {
    fn weight(&self, _: &Key, answer: &Arc<Answer>) -> u64 {
        weight(answer)
    }
}

impl Cache {
    /// Opens the configured tiers. If the file has another format, it is renamed and a warning is logged. If the shared server cannot be
    /// reached, the cache tries again later.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened, is locked by another process or has too small a max size, if the URL is not valid, or
    /// if the system cannot start threads.
    pub fn open(choice: &CacheChoice) -> Result<Self, EngineError> {
        // This estimate only determines the initial size of the map.
        let entries = (choice.memory_bytes / 2048).clamp(16, 1 << 20) as usize;
        let file = match &choice.file {
            Some((path, bytes)) => Some(FileTier::open(path, *bytes)?),
            None => None,
        };
        Ok(Self {
            memory: sync::Cache::with_weighter(entries, choice.memory_bytes, Weight),
            file,
            #[cfg(feature = "shared-cache")]
            shared: match &choice.shared {
                Some(url) => Some(SharedTier::start(url)?),
                None => None,
            },
        })
    }

    /// Returns the bytes of the answers in a tier, or 0 for the shared tier, whose size is not known.
    pub fn bytes(&self, tier: Tier) -> u64 {
        match tier {
            Tier::Memory => self.memory.weight(),
            Tier::File => self.file.as_ref().map_or(0, FileTier::bytes),
            Tier::Shared => 0,
        }
    }

    pub(super) fn in_memory(&self, key: &Key) -> Option<Arc<Answer>> {
        self.memory.get(key)
    }

    /// Returns whether the cache has a slower tier than memory.
    pub(super) fn is_deep(&self) -> bool {
        #[cfg(feature = "shared-cache")]
        if self.shared.is_some() {
            return true;
        }
        self.file.is_some()
    }

    /// Looks up a key in the file and then in the shared server, and passes the result to `then`, possibly on another thread. An answer
    /// that is found is also stored in the faster tiers.
    pub(super) fn look_deep(
        self: &Arc<Self>,
        key: Key,
        lookups: &Lookups,
        then: impl FnOnce(Option<Arc<Answer>>, Deep) + Send + 'static,
    ) {
        if let Some(file) = &self.file {
            let (found, lookup) = file.get(&key);
            lookups.add(Tier::File, lookup);
            if let Some(answer) = found {
                let answer = Arc::new(answer);
                self.memory.insert(key, Arc::clone(&answer));
                return then(Some(answer), Deep::File);
            }
        }
        #[cfg(feature = "shared-cache")]
        if let Some(shared) = &self.shared {
            let cache = Arc::clone(self);
            shared.get(
                key,
                Box::new(move |found, lookup| {
                    let found = found.map(Arc::new);
                    if let Some(answer) = &found {
                        cache.memory.insert(key, Arc::clone(answer));
                        if let Some(file) = &cache.file {
                            file.put(key, answer);
                        }
                    }
                    then(found, Deep::Shared(lookup));
                }),
            );
            return;
        }
        then(None, Deep::File);
    }

    /// Stores an answer in all tiers.
    pub(super) fn keep(&self, key: Key, answer: &Answer) {
        self.memory.insert(key, Arc::new(answer.clone()));
        if let Some(file) = &self.file {
            file.put(key, answer);
        }
        #[cfg(feature = "shared-cache")]
        if let Some(shared) = &self.shared {
            shared.put(key, answer);
        }
    }
}

/// Tier in which a lookup ended after a miss in memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Deep {
    File,
    #[cfg_attr(
        not(feature = "shared-cache"),
        expect(dead_code, reason = "nobody shares")
    )]
    Shared(Lookup),
}

/// Returns the digest of everything that determines the bits of a model's results, apart from the request: gemmule's version, the device,
/// the output, the program, the default prompt, the task whose adapter is added to the weights, and the files of the model's folder.
///
/// # Errors
/// Returns an error if a file cannot be read.
pub(super) fn digest(
    engine: &Engine,
    files: &ModelFiles,
    output: &str,
    [default_prompt, task]: [&str; 2],
) -> Result<Key, EngineError> {
    let mut digest = Sha256::new();
    let read = |source| EngineError::Read {
        file: files.path().to_owned(),
        source,
    };
    let program = postcard::to_stdvec(engine.program());
    let program = program.map_err(|e| read(io::Error::other(e.to_string())))?;
    for part in [
        env!("CARGO_PKG_VERSION").as_bytes(),
        engine.device().to_string().as_bytes(),
        output.as_bytes(),
        &program,
        default_prompt.as_bytes(),
        task.as_bytes(),
    ] {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    let added = files
        .paths()
        .and_then(|paths| add_files(&mut digest, paths, 0));
    added.map_err(read)?;
    Ok(digest.finalize().into())
}

/// Adds the names and contents of files and folders to a digest, ordered by path. Hidden files, such as download metadata, and the contents
/// of folders below the fourth level are skipped.
fn add_files(digest: &mut Sha256, mut paths: Vec<PathBuf>, depth: u8) -> io::Result<()> {
    paths.sort_unstable();
    let mut buffer = vec![0; 1 << 20];
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with('.') {
            continue;
        }
        digest.update((name.len() as u64).to_le_bytes());
        digest.update(name.as_bytes());
        if path.is_dir() {
            if depth < 4 {
                let below = fs::read_dir(&path)?.map(|entry| Ok(entry?.path()));
                add_files(digest, below.collect::<io::Result<_>>()?, depth + 1)?;
            }
            continue;
        }
        let mut file = fs::File::open(&path)?;
        let mut n_bytes = 0_u64;
        loop {
            let n = file.read(&mut buffer)?;
            if n == 0 {
                break;
            }
            n_bytes += n as u64;
            digest.update(&buffer[..n]);
        }
        digest.update(n_bytes.to_le_bytes());
    }
    Ok(())
}

/// Returns the key of the answer to `text` with the options `submit`. `model` is the digest of the model.
pub(super) fn key(model: &Key, text: &Text, submit: Submit) -> Key {
    let mut digest = Sha256::new();
    digest.update(model);
    digest.update([u8::from(submit.truncate), submit.wanted.code()]);
    let side = submit.cut_side.map_or(0, |side| 1 + side as u8);
    digest.update([side]);
    let prompt = submit.prompt.map_or(0, |prompt| 1 + prompt as u64);
    digest.update(prompt.to_le_bytes());
    let mut part = |kind: u8, bytes: &[u8]| {
        digest.update([kind]);
        digest.update((bytes.len() as u64).to_le_bytes());
        digest.update(bytes);
    };
    match text {
        Text::One(text) => part(0, text.as_bytes()),
        Text::Prompted(prompt, text) => {
            part(4, prompt.as_bytes());
            part(0, text.as_bytes());
        }
        Text::Pair(a, b) => {
            part(1, a.as_bytes());
            part(2, b.as_bytes());
        }
        Text::Ids(ids) => {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            part(3, &bytes);
        }
        Text::Encoded(encoded) => {
            let bytes =
                |ids: &[u32]| -> Vec<u8> { ids.iter().flat_map(|id| id.to_le_bytes()).collect() };
            part(5, &bytes(&encoded.ids));
            part(6, &bytes(encoded.types.as_deref().unwrap_or_default()));
            part(8, &bytes(&[encoded.left_out as u32]));
            part(7, &[u8::from(encoded.is_cut)]);
        }
    }
    digest.finalize().into()
}

/// Size in bytes of the checksum that follows an answer.
const CHECK: usize = 8;
/// Version of the format. The checksum includes it, so answers in another format are rejected.
const FORM: u8 = 2;

fn check(key: &Key, bytes: &[u8]) -> [u8; CHECK] {
    let digest = Sha256::new().chain_update([FORM]).chain_update(key);
    let digest = digest.chain_update(bytes);
    let mut check = [0; CHECK];
    check.copy_from_slice(&digest.finalize()[..CHECK]);
    check
}

/// Serializes an answer for storage outside the process. The format is the number of tokens, the number of entries, the entries, the
/// values, and a checksum that includes the key.
fn to_bytes(key: &Key, answer: &Answer) -> Vec<u8> {
    let (entries, values) = (&answer.entries, &answer.values);
    let mut bytes = Vec::with_capacity(8 + 4 * (entries.len() + values.len()) + CHECK);
    bytes.extend_from_slice(&(answer.tokens as u32).to_le_bytes());
    bytes.extend_from_slice(&(entries.len() as u32).to_le_bytes());
    bytes.extend(entries.iter().flat_map(|entry| entry.to_le_bytes()));
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    let check = check(key, &bytes);
    bytes.extend_from_slice(&check);
    bytes
}

/// Parses a stored answer. Returns `None` if `bytes` do not end with the checksum of `key` and the preceding bytes.
fn from_bytes(key: &Key, bytes: &[u8]) -> Option<Answer> {
    let (bytes, found) = bytes.split_at_checked(bytes.len().checked_sub(CHECK)?)?;
    if found != check(key, bytes) {
        return None;
    }
    let numbers = bytes.chunks_exact(4);
    let mut numbers = numbers.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let (tokens, n_entries) = (numbers.next()? as usize, numbers.next()? as usize);
    Some(Answer {
        tokens,
        entries: numbers.by_ref().take(n_entries).collect(),
        values: numbers.map(f32::from_bits).collect(),
    })
}

/// Coalesces equal requests: the first request for a key (the leader) is computed. Later requests for the key (the followers) wait for the
/// leader's answer. `L` identifies a leader, and `F` is a follower.
pub(super) struct Coalescer<L, F> {
    flights: Mutex<HashMap<Key, InFlight<L, F>>>,
}

/// Role of a request among equal requests.
#[derive(Debug, PartialEq)]
pub(super) enum Role<L, F> {
    /// The request waits for the answer to the request of this leader.
    Follower(Arc<L>),
    /// The request is computed, and others may join it.
    Leader(F),
    /// The request is computed separately from the computation in progress.
    Alone(F),
}

struct InFlight<L, F> {
    lead: Arc<L>,
    joined: Vec<F>,
    /// Number of clients that are still waiting, including the leader.
    waiting: usize,
}

impl<L, F> Default for Coalescer<L, F> {
    fn default() -> Self {
        Self {
            flights: Mutex::new(HashMap::new()),
        }
    }
}

impl<L, F> Coalescer<L, F> {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, InFlight<L, F>>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// If no computation of `key` is in progress, makes `lead` the leader of a new one. Otherwise, calls `serves` with the current leader.
    /// If `serves` returns true, adds `follower` to the computation. If it returns false, returns [`Role::Alone`].
    pub fn join(
        &self,
        key: Key,
        lead: &Arc<L>,
        follower: F,
        serves: impl FnOnce(&L) -> bool,
    ) -> Role<L, F> {
        match self.lock().entry(key) {
            hash_map::Entry::Occupied(flight) if !serves(&flight.get().lead) => {
                Role::Alone(follower)
            }
            hash_map::Entry::Occupied(mut flight) => {
                let flight = flight.get_mut();
                flight.joined.push(follower);
                flight.waiting += 1;
                Role::Follower(Arc::clone(&flight.lead))
            }
            hash_map::Entry::Vacant(place) => {
                place.insert(InFlight {
                    lead: Arc::clone(lead),
                    joined: Vec::new(),
                    waiting: 1,
                });
                Role::Leader(follower)
            }
        }
    }

    /// Removes a client that gives up waiting for the computation of `lead`. Returns whether no client waits for this computation any more.
    pub fn leave(&self, key: &Key, lead: &Arc<L>) -> bool {
        let mut flights = self.lock();
        let Some(flight) = flights.get_mut(key) else {
            return true;
        };
        // The key may belong to a newer computation, which began after the computation of `lead` had ended.
        if !Arc::ptr_eq(&flight.lead, lead) {
            return true;
        }
        flight.waiting -= 1;
        let is_last = flight.waiting == 0;
        if is_last {
            flights.remove(key);
        }
        is_last
    }

    /// Ends the computation of `lead` and returns its followers. If `lead` is no longer the leader for `key`, returns an empty list.
    pub fn complete(&self, key: &Key, lead: &Arc<L>) -> Vec<F> {
        let mut flights = self.lock();
        match flights.get(key) {
            Some(flight) if Arc::ptr_eq(&flight.lead, lead) => {}
            _ => return Vec::new(),
        }
        flights.remove(key).map_or_else(Vec::new, |f| f.joined)
    }

    /// Removes and returns the follower with the highest rank. The caller queues it in place of `lead`, which failed for a reason that does
    /// not concern the followers. If there is no follower, ends the computation and returns `None`. Also returns `None` if `lead` is no
    /// longer the leader for `key`.
    pub fn promote<R: Ord>(&self, key: &Key, lead: &Arc<L>, rank: impl Fn(&F) -> R) -> Option<F> {
        let mut flights = self.lock();
        let flight = flights.get_mut(key)?;
        if !Arc::ptr_eq(&flight.lead, lead) {
            return None;
        }
        let next = (0..flight.joined.len()).max_by_key(|&at| rank(&flight.joined[at]));
        match next {
            Some(at) => Some(flight.joined.swap_remove(at)),
            None => {
                flights.remove(key);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{CutSide, OutputKind},
        *,
    };

    #[test]
    fn serialized_answers_round_trip_and_damage_is_detected() {
        let key = key(&[7; 32], &Text::One("x".to_owned()), Submit::default());
        let answer = Answer {
            values: vec![0.1, -0.0, f32::MIN_POSITIVE / 2.0, 3e38],
            entries: vec![3, 1 << 31],
            tokens: 9,
        };
        let bytes = to_bytes(&key, &answer);
        let found = from_bytes(&key, &bytes).unwrap();
        assert_eq!((found.tokens, &found.entries), (9, &answer.entries));
        let bits = |a: &Answer| a.values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&found), bits(&answer));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert_eq!(from_bytes(&key, &damaged), None);
        }
        for n in 0..bytes.len() {
            assert_eq!(from_bytes(&key, &bytes[..n]), None);
        }
        assert_eq!(from_bytes(&[1; 32], &bytes), None);
    }

    #[test]
    fn keys_differ_with_everything_that_determines_answers() {
        let whole = Submit::default();
        let cut = Submit {
            truncate: true,
            ..whole
        };
        let sparse = Submit {
            wanted: OutputKind::Sparse,
            ..whole
        };
        let left = Submit {
            cut_side: Some(CutSide::Left),
            ..cut
        };
        let right = Submit {
            cut_side: Some(CutSide::Right),
            ..cut
        };
        let prompted = |prompt| Submit {
            prompt: Some(prompt),
            ..whole
        };
        let model = [1; 32];
        let one = |text: &str| Text::One(text.to_owned());
        let pair = |a: &str, b: &str| Text::Pair(a.to_owned(), b.to_owned());
        let keys = [
            key(&model, &one("ab"), whole),
            key(&model, &one("ab"), cut),
            key(&model, &one("ab"), left),
            key(&model, &one("ab"), right),
            key(&model, &one("ab"), prompted(0)),
            key(&model, &one("ab"), prompted(1)),
            key(&model, &one("ab"), sparse),
            key(&[2; 32], &one("ab"), whole),
            key(&model, &one("abc"), whole),
            key(&model, &Text::Prompted("a".into(), "b".to_owned()), whole),
            key(&model, &Text::Prompted("".into(), "ab".to_owned()), whole),
            key(&model, &pair("a", "b"), whole),
            key(&model, &pair("ab", ""), whole),
            key(&model, &pair("", "ab"), whole),
            key(&model, &Text::Ids(vec![97, 98]), whole),
            key(&model, &Text::Ids(vec![0x6261]), whole),
        ];
        for (at, key) in keys.iter().enumerate() {
            assert!(!keys[..at].contains(key), "{at}");
        }
    }

    #[test]
    fn a_computation_ends_when_its_last_client_leaves() {
        let flights: Coalescer<u8, u8> = Coalescer::default();
        let (key, lead, other) = ([0; 32], Arc::new(1), Arc::new(2));
        let joins = |lead: &Arc<_>| Role::Follower(Arc::clone(lead));
        let join = |own, follower| flights.join(key, own, follower, |_| true);
        assert_eq!(join(&lead, 10), Role::Leader(10));
        assert_eq!(join(&other, 11), joins(&lead));
        assert_eq!(join(&other, 12), joins(&lead));
        // A request with an earlier deadline is computed alone, and does not affect the computation in progress.
        assert_eq!(flights.join(key, &other, 9, |_| false), Role::Alone(9));
        assert!(!flights.leave(&key, &lead));
        assert_eq!(flights.promote(&key, &lead, |&f| f), Some(12));
        assert!(!flights.leave(&key, &lead));
        assert!(flights.leave(&key, &lead));
        // All clients of the first computation have left, so a new request starts its own computation.
        assert_eq!(join(&other, 13), Role::Leader(13));
        assert!(flights.complete(&key, &lead).is_empty());
        assert_eq!(join(&lead, 14), joins(&other));
        assert_eq!(flights.complete(&key, &other), [14]);
    }
}
