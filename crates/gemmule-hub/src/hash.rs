//! Hashes that identify the contents of files.

use std::fmt;

use sha1::{Digest as _, Sha1};
use sha2::Sha256;

use crate::id::is_hex;

/// The hash of a file's contents, which is also its ETag and the name of its blob.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Hash {
    /// SHA-256 of a file in Git LFS.
    Sha256(String),
    /// SHA-1 of a Git blob: its header and its contents.
    Git(String),
}

impl Hash {
    /// Returns the hash of a file in Git LFS, in hexadecimal digits.
    pub(crate) fn sha256(hex: &str) -> Option<Self> {
        let hex = hex.to_ascii_lowercase();
        is_hex(&hex, 64).then_some(Self::Sha256(hex))
    }

    /// Returns the hash of a Git blob, in hexadecimal digits.
    pub(crate) fn git(hex: &str) -> Option<Self> {
        let hex = hex.to_ascii_lowercase();
        is_hex(&hex, 40).then_some(Self::Git(hex))
    }

    /// Returns the hexadecimal digits.
    pub(crate) fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::Git(hex) => hex,
        }
    }

    /// Returns a hasher of this kind for a file of `size` bytes.
    pub(crate) fn hasher(&self, size: u64) -> Hasher {
        match self {
            Self::Sha256(_) => Hasher::Sha256(Sha256::new()),
            Self::Git(_) => {
                let mut sha1 = Sha1::new();
                sha1.update(format!("blob {size}\0"));
                Hasher::Git(sha1)
            }
        }
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sha256(hex) => write!(f, "SHA-256 {hex}"),
            Self::Git(hex) => write!(f, "Git SHA-1 {hex}"),
        }
    }
}

/// Computes a [`Hash`].
pub(crate) enum Hasher {
    Sha256(Sha256),
    Git(Sha1),
}

impl Hasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::Git(hasher) => hasher.update(bytes),
        }
    }

    pub(crate) fn finish(self) -> Hash {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect();
        match self {
            Self::Sha256(hasher) => Hash::Sha256(hex(&hasher.finalize())),
            Self::Git(hasher) => Hash::Git(hex(&hasher.finalize())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_git_and_sha256sum() {
        // Computed by `printf hello | git hash-object --stdin` and `printf hello | sha256sum`.
        let git = Hash::git("b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0").unwrap();
        let lfs = Hash::sha256("2CF24DBA5FB0A30E26E83B2AC5B9E29E1B161E5C1FA7425E73043362938B9824");
        for hash in [git, lfs.unwrap()] {
            let mut hasher = hash.hasher(5);
            hasher.update(b"hel");
            hasher.update(b"lo");
            assert_eq!(hasher.finish(), hash);
        }
        assert_eq!(Hash::git("../../x"), None);
        assert_eq!(Hash::sha256("00"), None);
    }
}
