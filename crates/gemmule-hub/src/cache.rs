//! The folder of a model in the cache.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
};

use crate::{
    Hub, HubError, ModelId,
    hash::Hash,
    id::is_commit,
    listing::{self, cached_names, check_name},
};

/// Maximum depth of folders in a snapshot.
const MAX_DEPTH: usize = 16;

/// Content of CACHEDIR.TAG, which makes backup programs skip the cache.
const TAG: &str = "Signature: 8a477f597d28d172789f06886806bc55\n# This is a cache of models from the Hugging Face hub.\n";

/// Returns the names of the models with snapshots in the cache, sorted.
pub(crate) fn models(cache: &Path) -> Vec<String> {
    let entries = fs::read_dir(cache).into_iter().flatten().flatten();
    let models = entries.filter_map(|entry| {
        let folder = entry.file_name().into_string().ok()?;
        let id = ModelId::of_folder(&folder)?;
        let has_snapshots = entry.path().join("snapshots").is_dir();
        has_snapshots.then(|| id.to_string())
    });
    let mut models: Vec<String> = models.collect();
    models.sort_unstable();
    models
}

/// A model's folder in the cache.
pub(crate) struct Repo<'h> {
    cache: &'h Path,
    root: PathBuf,
    locks: PathBuf,
}

impl<'h> Repo<'h> {
    pub(crate) fn new(hub: &'h Hub, id: &ModelId) -> Self {
        Self {
            cache: &hub.cache,
            root: hub.cache.join(id.folder()),
            locks: hub.cache.join(".locks").join(id.folder()),
        }
    }

    /// Creates the folders of the model's blobs and locks, and writes CACHEDIR.TAG if the cache does not have this file.
    pub(crate) fn create(&self) -> Result<(), HubError> {
        for folder in [&self.root.join("blobs"), &self.locks] {
            fs::create_dir_all(folder).map_err(HubError::io(folder, "created"))?;
        }
        let tag = self.cache.join("CACHEDIR.TAG");
        if !tag.exists() {
            // The tag is optional, so an error is ignored.
            let _ = fs::write(&tag, TAG);
        }
        Ok(())
    }

    pub(crate) fn blob(&self, hash: &Hash) -> PathBuf {
        self.root.join("blobs").join(hash.hex())
    }

    /// Returns the path of a blob's incomplete file.
    pub(crate) fn incomplete(&self, hash: &Hash) -> PathBuf {
        let name = format!("{}.incomplete", hash.hex());
        self.root.join("blobs").join(name)
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// Returns the revision itself if it is a full commit, else the commit of the branch or tag at its last fetch. Returns `None` if the
    /// branch or tag was never fetched.
    pub(crate) fn commit(&self, id: &ModelId) -> Option<String> {
        if let Some(commit) = id.commit() {
            return Some(commit.to_owned());
        }
        let file = File::open(self.reference(id.revision())).ok()?;
        let mut commit = String::new();
        file.take(64).read_to_string(&mut commit).ok()?;
        let commit = commit.trim();
        is_commit(commit).then(|| commit.to_owned())
    }

    fn reference(&self, revision: &str) -> PathBuf {
        self.root.join("refs").join(revision)
    }

    /// Stores the commit of a revision.
    pub(crate) fn refer(&self, id: &ModelId, commit: &str) -> Result<(), HubError> {
        if self.commit(id).as_deref() == Some(commit) {
            return Ok(());
        }
        let file = self.reference(id.revision());
        let failed = HubError::io(&file, "written");
        let folder = file.parent().unwrap_or(&self.root);
        fs::create_dir_all(folder).map_err(&failed)?;
        let mut unfinished = tempfile::Builder::new();
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            // Let the umask decide whether other users may share the cache.
            unfinished.permissions(fs::Permissions::from_mode(0o666));
        }
        let mut unfinished = unfinished.tempfile_in(folder).map_err(&failed)?;
        unfinished.write_all(commit.as_bytes()).map_err(&failed)?;
        unfinished.persist(&file).map_err(|e| failed(e.error))?;
        Ok(())
    }

    /// Returns the names of the model's files at a commit: all names if the cache has a list, else the names of the fetched files.
    pub(crate) fn names(&self, commit: &str) -> Vec<String> {
        let list = self.root.join("trees").join(format!("{commit}.json"));
        if let Ok(file) = File::open(list) {
            let mut bytes = Vec::new();
            let read = file.take(listing::MAX_BYTES).read_to_end(&mut bytes);
            if let (Ok(_), Some(names)) = (read, cached_names(&bytes)) {
                return names;
            }
        }
        let mut names = Vec::new();
        walk(&self.snapshot(commit), "", 0, &mut names);
        names.sort_unstable();
        names
    }

    /// Links a name in the snapshot to a blob.
    pub(crate) fn link(&self, commit: &str, name: &str, hash: &Hash) -> Result<(), HubError> {
        let link = self.snapshot(commit).join(name);
        let failed = HubError::io(&link, "linked");
        let folder = link.parent().unwrap_or(&self.root);
        fs::create_dir_all(folder).map_err(&failed)?;
        // Create the link elsewhere and rename it, so that readers always find a link at its path.
        let depth = name.split('/').count() + 1;
        let target = format!("{}blobs/{}", "../".repeat(depth), hash.hex());
        if fs::read_link(&link).is_ok_and(|found| found == Path::new(&target)) {
            return Ok(());
        }
        let aside = tempfile::Builder::new().tempdir_in(&self.root);
        let aside = aside.map_err(&failed)?;
        let made = aside.path().join("link");
        match symlink(Path::new(&target), &made) {
            Ok(()) => {}
            // The file system does not support links, so copy the blob.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported
                ) =>
            {
                fs::copy(self.blob(hash), &made).map_err(&failed)?;
            }
            Err(error) => return Err(failed(error)),
        }
        fs::rename(&made, &link).map_err(&failed)
    }

    /// Locks a blob against other processes and threads. `waiting` is called if the lock is held elsewhere.
    pub(crate) fn lock(&self, hash: &Hash, waiting: impl FnOnce()) -> Result<Lock, HubError> {
        let path = self.locks.join(format!("{}.lock", hash.hex()));
        let failed = HubError::io(&path, "locked");
        let mut options = File::options();
        let file = match options.create(true).truncate(false).write(true).open(&path) {
            // Another user created the file. Read access is sufficient for locking.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => File::open(&path),
            opened => opened,
        };
        let file = file.map_err(&failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                waiting();
                file.lock().map_err(&failed)?;
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        Ok(Lock { _file: file })
    }
}

/// A lock that is released on drop. The lock file remains, as with `huggingface_hub`.
pub(crate) struct Lock {
    _file: File,
}

/// Lists the files below a folder, except for unreadable entries and broken links.
fn walk(folder: &Path, prefix: &str, depth: usize, names: &mut Vec<String>) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let Ok(part) = entry.file_name().into_string() else {
            continue;
        };
        let name = match prefix {
            "" => part,
            _ => format!("{prefix}/{part}"),
        };
        match fs::metadata(entry.path()) {
            Ok(found) if found.is_file() && check_name(&name).is_ok() => names.push(name),
            Ok(found) if found.is_dir() && depth < MAX_DEPTH => {
                walk(&entry.path(), &name, depth + 1, names);
            }
            _ => {}
        }
    }
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(not(unix))]
fn symlink(_target: &Path, _link: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
