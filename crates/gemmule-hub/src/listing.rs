//! The list of a model's files, from the hub or from the cache.

use std::collections::{BTreeMap, HashSet};

use serde::Deserialize;

use crate::{HubError, hash::Hash, id::is_commit};

/// Maximum number of bytes of a list of files.
pub(crate) const MAX_BYTES: u64 = 32 << 20;

/// Maximum length in bytes of a file's name, and of each component of its path.
const MAX_NAME: usize = 1024;
const MAX_PART: usize = 255;

/// The files of a model at a commit.
#[derive(Debug)]
pub(crate) struct Listing {
    /// The name of the model on the hub. It differs from the requested name if the model was renamed.
    pub(crate) model: Option<String>,
    pub(crate) commit: String,
    pub(crate) files: Vec<Listed>,
}

/// A file on the hub.
#[derive(Clone, Debug)]
pub(crate) struct Listed {
    pub(crate) name: String,
    /// Size and hash; `None` if the hub does not state them.
    pub(crate) contents: Option<Contents>,
}

#[derive(Clone, Debug)]
pub(crate) struct Contents {
    pub(crate) size: u64,
    pub(crate) hash: Hash,
}

#[derive(Deserialize)]
struct Model {
    id: Option<String>,
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    #[serde(alias = "oid")]
    sha256: String,
    size: u64,
}

impl Listing {
    /// Parses the response of `/api/models/…/revision/…?blobs=true`.
    ///
    /// # Errors
    /// Returns an error if the JSON has another structure, or if [`check_name`] refuses a name.
    pub(crate) fn parse(url: &str, bytes: &[u8]) -> Result<Self, HubError> {
        let bad = |problem: String| HubError::BadListing {
            url: url.to_owned(),
            problem,
        };
        let model: Model = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
        if !is_commit(&model.sha) {
            return Err(bad(format!(
                "its `sha` is {:?}, which is no commit",
                model.sha
            )));
        }
        let mut seen = HashSet::new();
        let mut files = Vec::new();
        for sibling in model.siblings {
            check_name(&sibling.rfilename)?;
            if !seen.insert(sibling.rfilename.clone()) {
                return Err(bad(format!("it has `{}` twice", sibling.rfilename)));
            }
            let contents = match (&sibling.lfs, &sibling.blob_id, sibling.size) {
                (Some(lfs), ..) => Hash::sha256(&lfs.sha256).map(|hash| (lfs.size, hash)),
                (None, Some(id), Some(size)) => Hash::git(id).map(|hash| (size, hash)),
                _ => None,
            };
            files.push(Listed {
                name: sibling.rfilename,
                contents: contents.map(|(size, hash)| Contents { size, hash }),
            });
        }
        Ok(Self {
            model: model.id,
            commit: model.sha,
            files,
        })
    }
}

/// Returns the names in a file list from the cache, which newer versions of `huggingface_hub` store. Returns `None` if the list has another
/// structure or format version, or if [`check_name`] refuses a name.
pub(crate) fn cached_names(bytes: &[u8]) -> Option<Vec<String>> {
    #[derive(Deserialize)]
    struct Tree {
        format_version: u64,
        files: BTreeMap<String, serde::de::IgnoredAny>,
    }
    let tree: Tree = serde_json::from_slice(bytes).ok()?;
    let names: Vec<String> = tree.files.into_keys().collect();
    let is_usable = tree.format_version == 1 && names.iter().all(|name| check_name(name).is_ok());
    is_usable.then_some(names)
}

/// Refuses names that could point outside of the snapshot, contain control characters or are too long.
pub(crate) fn check_name(name: &str) -> Result<(), HubError> {
    let bad = |problem| {
        Err(HubError::BadName {
            name: name.chars().take(100).collect(),
            problem,
        })
    };
    if name.is_empty() {
        return bad("is empty");
    }
    if name.chars().any(char::is_control) {
        return bad("has control characters");
    }
    if name.contains('\\') {
        return bad("has a backslash");
    }
    if name.starts_with('/') || (cfg!(windows) && name.contains(':')) {
        return bad("is an absolute path");
    }
    let mut parts = name.split('/');
    if parts.clone().any(|part| matches!(part, "" | "." | "..")) {
        return bad("has an empty part, `.` or `..` in its path");
    }
    if name.len() > MAX_NAME || parts.any(|part| part.len() > MAX_PART) {
        return bad("is too long");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn listing(files: &str) -> Result<Listing, HubError> {
        let json = format!(r#"{{"id": "a/b", "sha": "{COMMIT}", "siblings": [{files}]}}"#);
        Listing::parse("http://hub.test/api", json.as_bytes())
    }

    #[test]
    fn sizes_and_hashes_are_of_lfs_or_of_git() {
        let sha256 = "a".repeat(64);
        let found = listing(&format!(
            r#"{{"rfilename": "x.json", "size": 7, "blobId": "{COMMIT}"}},
               {{"rfilename": "d/w.bin", "size": 9, "blobId": "{COMMIT}", "lfs": {{"sha256": "{sha256}", "size": 9, "pointerSize": 134}}}},
               {{"rfilename": "y"}}"#
        ))
        .unwrap();
        assert_eq!(found.commit, COMMIT);
        let of = |at: usize| found.files[at].contents.as_ref();
        assert_eq!(of(0).unwrap().hash, Hash::git(COMMIT).unwrap());
        assert_eq!((of(0).unwrap().size, of(1).unwrap().size), (7, 9));
        assert_eq!(of(1).unwrap().hash, Hash::sha256(&sha256).unwrap());
        assert!(of(2).is_none());
    }

    #[test]
    fn hostile_names_are_refused_by_name() {
        let long = "x".repeat(256);
        for name in [
            "../x",
            "a/../../x",
            "/etc/passwd",
            "a//b",
            "./a",
            "",
            "a\\b",
            "a\u{1b}[2J",
            "a\nb",
            long.as_str(),
        ] {
            let json = serde_json::json!({ "rfilename": name });
            let error = listing(&json.to_string()).expect_err(name);
            assert!(matches!(error, HubError::BadName { .. }), "{error}");
            assert!(
                error.to_string().chars().all(|c| !c.is_control()),
                "{error}"
            );
        }
    }

    #[test]
    fn other_json_is_no_listing() {
        for bad in [
            "",
            "[]",
            "{}",
            r#"{"sha": "../../x", "siblings": []}"#,
            r#"{"sha": "0123456789abcdef0123456789abcdef01234567"}"#,
        ] {
            let error = Listing::parse("http://hub.test", bad.as_bytes()).expect_err(bad);
            assert!(matches!(error, HubError::BadListing { .. }), "{error}");
        }
        let twice = r#"{"rfilename": "x"}, {"rfilename": "x"}"#;
        assert!(matches!(listing(twice), Err(HubError::BadListing { .. })));
    }

    #[test]
    fn names_of_a_cached_tree_are_read() {
        let tree = br#"{"format_version": 1, "files": {"a.json": {"size": 1, "blob_id": "x"}, "b/c": {}}}"#;
        let names = cached_names(tree).unwrap();
        assert_eq!(names, ["a.json", "b/c"]);
        assert_eq!(cached_names(br#"{"format_version": 2, "files": {}}"#), None);
        assert_eq!(
            cached_names(br#"{"format_version": 1, "files": {"../x": {}}}"#),
            None
        );
    }
}
