//! Fetches single files into the cache.

use std::{
    fs::{self, File},
    io::{self, Read, Seek as _, SeekFrom, Write as _},
    path::Path,
    time::Duration,
};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use ureq::http::{HeaderMap, StatusCode, header};

use crate::{
    Event, HubError, ModelId, Progress,
    cache::Repo,
    hash::Hasher,
    http::{Client, Failure, Retries, problem},
    listing::{Contents, Listed},
};

/// Characters that are escaped in one component of a URL's path.
const IN_PART: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');
/// Characters that are escaped in a whole path: those of [`IN_PART`] except the slash.
const IN_PATH: &AsciiSet = &IN_PART.remove(b'/');

/// Number of received bytes after which a broken connection does not count as a failed attempt.
const PROGRESS: u64 = 1 << 20;

/// Size of the read buffer in bytes.
const PIECE: usize = 256 << 10;

/// Escapes one component of a URL's path.
pub(crate) fn escaped(part: &str) -> String {
    utf8_percent_encode(part, IN_PART).to_string()
}

/// Fetches files of a model at one commit.
pub(crate) struct Fetch<'a> {
    pub(crate) client: &'a Client<'a>,
    pub(crate) repo: &'a Repo<'a>,
    pub(crate) id: &'a ModelId,
    pub(crate) endpoint: &'a str,
    pub(crate) network: &'a crate::Network,
    pub(crate) has_token: bool,
    pub(crate) commit: &'a str,
    pub(crate) progress: Progress<'a>,
}

/// The incomplete file of a blob, which contains the first `have` bytes.
struct Partial {
    file: File,
    hasher: Hasher,
    have: u64,
    /// Whether some of the bytes were received by an earlier connection.
    resumed: bool,
}

impl Fetch<'_> {
    /// Fetches a file and links it. `received` is called with each change of the number of received bytes.
    pub(crate) fn file(&self, listed: &Listed, received: &dyn Fn(i64)) -> Result<(), HubError> {
        let name = &listed.name;
        let Some(contents) = &listed.contents else {
            return Err(HubError::NoHash { file: name.clone() });
        };
        let lock = self.repo.lock(&contents.hash, || {
            (self.progress)(&Event::Waiting { file: name });
        })?;
        let blob = self.repo.blob(&contents.hash);
        match has_size(&blob, contents.size) {
            true => received(i64::try_from(contents.size).unwrap_or(i64::MAX)),
            false => self.blob(name, contents, received)?,
        }
        self.repo.link(self.commit, name, &contents.hash)?;
        drop(lock);
        Ok(())
    }

    fn blob(
        &self,
        name: &str,
        contents: &Contents,
        received: &dyn Fn(i64),
    ) -> Result<(), HubError> {
        let path = self.repo.incomplete(&contents.hash);
        let failed = self.failed(&path, contents.size, 0);
        let mut partial = Partial::open(&path, contents).map_err(&failed)?;
        received(signed(partial.have));
        loop {
            self.rest(name, &path, contents, &mut partial, received)?;
            let Partial {
                file,
                hasher,
                resumed,
                ..
            } = partial;
            let found = hasher.finish();
            if found == contents.hash {
                // Sync the file, so that a blob is complete or missing after a power failure.
                file.sync_data().map_err(&failed)?;
                let blob = self.repo.blob(&contents.hash);
                return fs::rename(&path, &blob).map_err(HubError::io(&blob, "written"));
            }
            if !resumed {
                let _ = fs::remove_file(&path);
                return Err(HubError::WrongHash {
                    file: name.to_owned(),
                    expected: contents.hash.to_string(),
                    found: found.to_string(),
                });
            }
            // The bytes of an earlier connection may belong to other contents, so start again without them.
            received(-signed(contents.size));
            partial = Partial {
                file,
                hasher: contents.hash.hasher(contents.size),
                have: 0,
                resumed: false,
            };
            partial.restart(contents).map_err(&failed)?;
        }
    }

    /// Fetches the missing bytes.
    fn rest(
        &self,
        name: &str,
        path: &Path,
        contents: &Contents,
        partial: &mut Partial,
        received: &dyn Fn(i64),
    ) -> Result<(), HubError> {
        let url = self.url(name);
        let mut retries = Retries::new(self.network, self.network.attempts);
        while partial.have < contents.size {
            let before = partial.have;
            let done = self.once(name, path, &url, contents, partial, received);
            let (error, pause) = match done {
                Ok(()) => continue,
                Err(Failure::Passing { error, pause }) => (error, pause),
                Err(Failure::Refused(refusal)) => {
                    return Err(self.refused(name, &refusal));
                }
                Err(Failure::Final(error)) => return Err(error),
            };
            partial.resumed |= partial.have > 0;
            if partial.have >= before + PROGRESS {
                retries.renew();
            }
            retries.wait(name, error, pause, self.progress)?;
        }
        Ok(())
    }

    /// Sends one request, and appends the bytes of the response.
    fn once(
        &self,
        name: &str,
        path: &Path,
        url: &str,
        contents: &Contents,
        partial: &mut Partial,
        received: &dyn Fn(i64),
    ) -> Result<(), Failure> {
        // The URL names a commit, so the file at the URL never changes and `If-Range` is not needed. The hash is verified at the end.
        let response = self.client.get(url, partial.have)?;
        let size = contents.size;
        let continues = response.status() == StatusCode::PARTIAL_CONTENT
            && continues(response.headers(), partial.have, size);
        if !continues && partial.have > 0 {
            received(-signed(partial.have));
            let restarted = partial.restart(contents);
            restarted.map_err(|e| Failure::Final(self.failed(path, size, 0)(e)))?;
        }
        if !continues && response.status() != StatusCode::OK {
            return Err(broken(
                url,
                format!("it answers {}", response.status().as_u16()),
            ));
        }
        let wrong = |found: String| {
            let _ = fs::remove_file(path);
            Failure::Final(HubError::WrongSize {
                file: name.to_owned(),
                url: url.to_owned(),
                expected: size,
                found,
            })
        };
        let mut body = response
            .into_body()
            .into_with_config()
            .limit(u64::MAX)
            .reader();
        let mut piece = vec![0; PIECE];
        loop {
            let n = match body.read(&mut piece) {
                Ok(n) => n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    let error = ureq::Error::from(error);
                    return Err(broken(url, problem(&error)));
                }
            };
            if n == 0 {
                break;
            }
            if partial.have + n as u64 > size {
                return Err(wrong(format!("more than {size}")));
            }
            let written = partial.append(&piece[..n]);
            written.map_err(|e| Failure::Final(self.failed(path, size, partial.have)(e)))?;
            received(signed(n as u64));
        }
        match partial.have < size {
            true => Err(broken(
                url,
                format!(
                    "the connection ended after {} of {size} bytes",
                    partial.have
                ),
            )),
            false => Ok(()),
        }
    }

    fn url(&self, name: &str) -> String {
        let path = utf8_percent_encode(name, IN_PATH);
        format!(
            "{}/{}/resolve/{}/{path}",
            self.endpoint,
            self.id.repo(),
            self.commit
        )
    }

    fn refused(&self, name: &str, refusal: &crate::http::Refusal) -> HubError {
        refusal.error(self.id, self.endpoint, self.has_token, || {
            HubError::NoFile {
                model: self.id.repo(),
                file: name.to_owned(),
                commit: self.commit.to_owned(),
            }
        })
    }

    /// Returns a function that converts errors of writing a blob of `size` bytes to the file `path`. The first `have` bytes are already
    /// stored, and the error for a full disk states how many are missing.
    fn failed(&self, path: &Path, size: u64, have: u64) -> impl Fn(io::Error) -> HubError + use<> {
        let otherwise = HubError::io(path, "written");
        move |error| match otherwise(error) {
            HubError::DiskFull { path, .. } => HubError::DiskFull {
                path,
                bytes: Some(size.saturating_sub(have)),
            },
            other => other,
        }
    }
}

impl Partial {
    /// Opens the incomplete file of an earlier attempt, or creates one.
    fn open(path: &Path, contents: &Contents) -> io::Result<Self> {
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let file = options.open(path)?;
        let have = file.metadata()?.len();
        let mut partial = Self {
            file,
            hasher: contents.hash.hasher(contents.size),
            have: 0,
            resumed: false,
        };
        if have > contents.size {
            partial.restart(contents)?;
            return Ok(partial);
        }
        let mut piece = vec![0; PIECE];
        while partial.have < have {
            let most = usize::try_from(have - partial.have).unwrap_or(PIECE);
            match partial.file.read(&mut piece[..most.min(PIECE)]) {
                Ok(0) => break,
                Ok(n) => {
                    partial.hasher.update(&piece[..n]);
                    partial.have += n as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        partial.resumed = partial.have > 0;
        Ok(partial)
    }

    /// Removes all bytes from the file.
    fn restart(&mut self, contents: &Contents) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        self.hasher = contents.hash.hasher(contents.size);
        self.have = 0;
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.hasher.update(bytes);
        self.have += bytes.len() as u64;
        Ok(())
    }
}

pub(crate) fn has_size(path: &Path, size: u64) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() == size)
}

/// Returns whether the body of a response starts at byte `from` of a file of `size` bytes, according to `Content-Range`.
fn continues(headers: &HeaderMap, from: u64, size: u64) -> bool {
    let range = headers.get(header::CONTENT_RANGE);
    let range = range.and_then(|v| v.to_str().ok()?.strip_prefix("bytes "));
    let Some((range, total)) = range.and_then(|range| range.split_once('/')) else {
        return false;
    };
    let begins = range
        .split_once('-')
        .and_then(|(begin, _)| begin.parse().ok());
    let is_whole = total == "*" || total.parse() == Ok(size);
    is_whole && begins == Some(from)
}

fn broken(url: &str, problem: String) -> Failure {
    Failure::Passing {
        error: HubError::Unreachable {
            url: url.to_owned(),
            problem,
        },
        pause: None::<Duration>,
    }
}

fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_continues_only_where_the_file_ends() {
        let says = |value: &str, from, size| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_RANGE, value.parse().unwrap());
            continues(&headers, from, size)
        };
        assert!(says("bytes 5-9/10", 5, 10));
        assert!(says("bytes 5-9/*", 5, 10));
        for bad in [
            "bytes 4-9/10",
            "bytes 5-9/11",
            "bytes */10",
            "5-9/10",
            "bytes 5",
            "",
        ] {
            assert!(!says(bad, 5, 10), "{bad}");
        }
        assert!(!continues(&HeaderMap::new(), 0, 0));
    }

    #[test]
    fn names_are_escaped() {
        assert_eq!(escaped("refs/pr/1"), "refs%2Fpr%2F1");
        let path = utf8_percent_encode("a b/c?#é.json", IN_PATH).to_string();
        assert_eq!(path, "a%20b/c%3F%23%C3%A9.json");
    }
}
