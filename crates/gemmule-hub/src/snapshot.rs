//! Fetches selected files of a model.

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering},
    },
    thread,
};

use crate::{
    Event, Hub, HubError, ModelId, Progress,
    cache::Repo,
    fetch::{Fetch, escaped, has_size},
    http::{Client, Failure, Refusal},
    listing::{self, Listed, Listing},
};

/// Maximum number of rounds in which a caller may request more files.
const MAX_ROUNDS: usize = 8;

impl Hub {
    /// Fetches the files whose names `select` accepts, and returns their folder. Files that are already in the cache are not fetched.
    ///
    /// If the hub cannot be reached, limits requests or fails with a status of 500 or above, files in the cache are used if they are
    /// complete, and `progress` receives [`Event::Cached`].
    ///
    /// # Errors
    /// Returns an error if the model, the revision or a file does not exist or cannot be fetched; see [`HubError`].
    pub fn snapshot(
        &self,
        id: &ModelId,
        select: impl Fn(&str) -> bool,
        progress: Progress<'_>,
    ) -> Result<PathBuf, HubError> {
        let wanted = |names: &[&str], _: &Path| {
            let wanted = names.iter().filter(|name| select(name));
            wanted.map(|&name| name.to_owned()).collect()
        };
        self.snapshot_by(id, wanted, progress)
    }

    /// Like [`snapshot`](Self::snapshot), for files that name other files, such as the index of a sharded checkpoint.
    ///
    /// `wanted` receives the names of all files of the model, and the folder with the files fetched so far. It returns the names of the
    /// files to fetch. After these are fetched, `wanted` is called again, until it returns no new names, but at most 8 times.
    ///
    /// # Errors
    /// Returns an error if the model, the revision or a file does not exist or cannot be fetched; see [`HubError`].
    pub fn snapshot_by(
        &self,
        id: &ModelId,
        wanted: impl Fn(&[&str], &Path) -> Vec<String>,
        progress: Progress<'_>,
    ) -> Result<PathBuf, HubError> {
        let repo = Repo::new(self, id);
        if self.offline {
            return self.cached(&repo, id, &wanted);
        }
        let error = match self.fetched(&repo, id, &wanted, progress) {
            Err(error) if error.is_network() => error,
            done => return done,
        };
        // Use the snapshot in the cache only if it is complete.
        let (Ok(folder), Some(commit)) = (self.cached(&repo, id, &wanted), repo.commit(id)) else {
            return Err(error);
        };
        progress(&Event::Cached {
            model: &id.to_string(),
            commit: &commit,
            problem: &error.to_string(),
        });
        Ok(folder)
    }

    /// Returns the folder of a complete snapshot in the cache.
    fn cached(
        &self,
        repo: &Repo<'_>,
        id: &ModelId,
        wanted: &impl Fn(&[&str], &Path) -> Vec<String>,
    ) -> Result<PathBuf, HubError> {
        let missing = || HubError::Offline {
            model: id.to_string(),
            cache: self.cache.clone(),
        };
        let commit = repo.commit(id).ok_or_else(missing)?;
        let folder = repo.snapshot(&commit);
        let names = repo.names(&commit);
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        if names.is_empty() || !folder.is_dir() {
            return Err(missing());
        }
        let mut n_wanted = 0;
        for _ in 0..MAX_ROUNDS {
            let wanted = wanted(&names, &folder);
            let absent = wanted.iter().find(|name| !folder.join(name).is_file());
            if let Some(file) = absent {
                return Err(HubError::OfflineFile {
                    model: id.to_string(),
                    file: file.clone(),
                    cache: self.cache.clone(),
                });
            }
            if wanted.len() == n_wanted {
                break;
            }
            n_wanted = wanted.len();
        }
        Ok(folder)
    }

    fn fetched(
        &self,
        repo: &Repo<'_>,
        id: &ModelId,
        wanted: &impl Fn(&[&str], &Path) -> Vec<String>,
        progress: Progress<'_>,
    ) -> Result<PathBuf, HubError> {
        let client = Client::new(self)?;
        let listing = self.listing(&client, repo, id, progress)?;
        let repo_name = id.repo();
        if let Some(new) = listing.model.as_deref().filter(|new| *new != repo_name)
            && let Ok(new) = ModelId::parse(new)
        {
            progress(&Event::Renamed {
                from: &repo_name,
                to: &new.to_string(),
            });
        }
        repo.create()?;
        let folder = repo.snapshot(&listing.commit);
        fs::create_dir_all(&folder).map_err(HubError::io(&folder, "created"))?;
        let fetch = Fetch {
            client: &client,
            repo,
            id,
            endpoint: &self.endpoint,
            network: &self.network,
            has_token: self.token.is_some(),
            commit: &listing.commit,
            progress,
        };
        let names: Vec<&str> = listing.files.iter().map(|file| &*file.name).collect();
        for _ in 0..MAX_ROUNDS {
            let wanted = wanted(&names, &folder);
            let files = listing.files.iter().filter(|f| wanted.contains(&f.name));
            let missing: Vec<&Listed> = files.filter(|file| !is_there(&folder, file)).collect();
            if missing.is_empty() {
                break;
            }
            self.all(&fetch, &missing)?;
        }
        // Store the commit last, so that a reference never names an incomplete snapshot.
        repo.refer(id, &listing.commit)?;
        Ok(folder)
    }

    fn listing(
        &self,
        client: &Client<'_>,
        repo: &Repo<'_>,
        id: &ModelId,
        progress: Progress<'_>,
    ) -> Result<Listing, HubError> {
        let url = format!(
            "{}/api/models/{}/revision/{}?blobs=true",
            self.endpoint,
            id.repo(),
            escaped(id.revision())
        );
        // If the model is in the cache, use at most two attempts, because the cached files can be used instead.
        let attempts = match repo.commit(id) {
            Some(commit) if repo.snapshot(&commit).is_dir() => self.network.attempts.min(2),
            _ => self.network.attempts,
        };
        let attempt = || {
            let mut response = client.get(&url, 0)?;
            let body = response.body_mut().with_config().limit(u64::MAX).reader();
            let mut bytes = Vec::new();
            let read = body.take(listing::MAX_BYTES + 1).read_to_end(&mut bytes);
            read.map_err(|error| Failure::Passing {
                error: HubError::Unreachable {
                    url: url.clone(),
                    problem: crate::http::problem(&ureq::Error::from(error)),
                },
                pause: None,
            })?;
            match bytes.len() as u64 > listing::MAX_BYTES {
                true => Err(Failure::Final(HubError::TooLarge {
                    url: url.clone(),
                    limit: listing::MAX_BYTES,
                })),
                false => Ok(bytes),
            }
        };
        let answer = client.retry(&id.to_string(), attempts, progress, attempt)?;
        let bytes = answer.map_err(|refusal| {
            let no_revision = || HubError::NoRevision {
                model: id.repo(),
                revision: id.revision().to_owned(),
                endpoint: self.endpoint.clone(),
            };
            match refusal.code.as_str() {
                "RevisionNotFound" => no_revision(),
                _ => refusal.error(id, &self.endpoint, self.token.is_some(), || {
                    HubError::NoModel {
                        model: id.repo(),
                        endpoint: self.endpoint.clone(),
                    }
                }),
            }
        })?;
        Listing::parse(&url, &bytes)
    }

    /// Fetches several files at a time. After an error, files in progress are completed and no others are started.
    fn all(&self, fetch: &Fetch<'_>, files: &[&Listed]) -> Result<(), HubError> {
        let sizes = files.iter().filter_map(|f| Some(f.contents.as_ref()?.size));
        let total = sizes.fold(0, u64::saturating_add);
        (fetch.progress)(&Event::Fetching {
            model: &fetch.id.to_string(),
            files: files.len(),
            bytes: total,
        });
        let done = AtomicI64::new(0);
        let received = |change: i64| {
            let before = done.fetch_add(change, Ordering::Relaxed);
            let done = before.wrapping_add(change);
            (fetch.progress)(&Event::Received {
                done: u64::try_from(done).unwrap_or(0),
                total,
            });
        };
        let next = AtomicUsize::new(0);
        let stopped = AtomicBool::new(false);
        let failure = Mutex::new(None);
        let work = || {
            while !stopped.load(Ordering::Relaxed) {
                let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) else {
                    return;
                };
                if let Err(error) = fetch.file(file, &received) {
                    stopped.store(true, Ordering::Relaxed);
                    if let Ok(mut failure) = failure.lock() {
                        failure.get_or_insert(error);
                    }
                }
            }
        };
        let n = self.network.connections.clamp(1, files.len().max(1));
        thread::scope(|scope| {
            for _ in 1..n {
                scope.spawn(work);
            }
            work();
        });
        if let Ok(Some(error)) = failure.into_inner() {
            return Err(error);
        }
        (fetch.progress)(&Event::Fetched);
        Ok(())
    }
}

impl Refusal {
    /// Returns the error for a refused request. `missing` creates the error that is returned if the requested item does not exist.
    pub(crate) fn error(
        &self,
        id: &ModelId,
        endpoint: &str,
        has_token: bool,
        missing: impl FnOnce() -> HubError,
    ) -> HubError {
        let model = id.repo();
        let is_bad_token = self.message.contains("Invalid credentials");
        match (self.status, self.code.as_str()) {
            (_, "GatedRepo") => HubError::Gated {
                model,
                endpoint: endpoint.to_owned(),
                has_token,
            },
            (_, "RevisionNotFound") => HubError::NoRevision {
                model,
                revision: id.revision().to_owned(),
                endpoint: endpoint.to_owned(),
            },
            (401, _) if is_bad_token && has_token => HubError::TokenRefused {
                endpoint: endpoint.to_owned(),
            },
            // Without read access, the hub does not reveal whether the model exists.
            (401, _) | (_, "RepoNotFound") => HubError::NoModel {
                model,
                endpoint: endpoint.to_owned(),
            },
            (403, _) => HubError::Forbidden {
                model,
                reason: match self.message.is_empty() {
                    true => "it does not say why".to_owned(),
                    false => self.message.clone(),
                },
            },
            (404 | 410, _) => missing(),
            (status, _) => HubError::Status {
                url: self.url.clone(),
                status,
                expected: "file",
            },
        }
    }
}

/// Returns whether a file of the snapshot exists with the expected size. A different size means that the cache is damaged.
fn is_there(folder: &Path, file: &Listed) -> bool {
    let path = folder.join(&file.name);
    match &file.contents {
        Some(contents) => has_size(&path, contents.size),
        None => path.is_file(),
    }
}
