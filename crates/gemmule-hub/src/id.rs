//! Names of models on the hub.

use std::fmt;

use crate::HubError;

/// The default revision.
const MAIN: &str = "main";

/// Maximum number of bytes of each part of a name.
const MAX_PART: usize = 96;

/// Maximum number of bytes of a revision.
const MAX_REVISION: usize = 200;

/// Maximum number of bytes of a file name.
const MAX_FILE: usize = 200;

/// The name of a model, `org/name` or `org/name@revision`. If a repository has several models, each in one file, the name of a file after a
/// colon selects one of them: `org/name:file`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelId {
    org: String,
    name: String,
    revision: Option<String>,
    file: Option<String>,
}

impl ModelId {
    /// Parses `org/name` or `org/name@revision`, optionally followed by `:file`. The revision is a branch, a tag or a
    /// commit. `file` is the name of a file or a part of it.
    ///
    /// # Errors
    /// Returns [`HubError::BadId`] for another form, or for characters that the hub does not allow.
    pub fn parse(text: &str) -> Result<Self, HubError> {
        let bad = |problem: &str| HubError::BadId {
            given: text.to_owned(),
            problem: problem.to_owned(),
        };
        let (repo, file) = match text.split_once(':') {
            Some((repo, file)) if repo.contains('/') => (repo, Some(file)),
            _ => (text, None),
        };
        let (repo, revision) = match repo.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision)),
            None => (repo, None),
        };
        let (org, name) = repo
            .split_once('/')
            .ok_or_else(|| bad("there is no `/` in it"))?;
        for part in [org, name] {
            check_part(part).map_err(bad)?;
        }
        if name.ends_with(".git") {
            return Err(bad("a name does not end in `.git`"));
        }
        if let Some(revision) = revision {
            check_revision(revision).map_err(bad)?;
        }
        if let Some(file) = file {
            check_file(file).map_err(bad)?;
        }
        Ok(Self {
            org: org.to_owned(),
            name: name.to_owned(),
            revision: revision.map(str::to_owned),
            file: file.map(str::to_owned),
        })
    }

    /// Returns `org/name`.
    pub fn repo(&self) -> String {
        format!("{}/{}", self.org, self.name)
    }

    /// Returns the part after the `/`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the revision, `main` by default.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(MAIN)
    }

    /// Returns the file name after the colon, which may be incomplete.
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// Returns the revision if it is a full commit, which never changes.
    pub(crate) fn commit(&self) -> Option<&str> {
        Some(self.revision()).filter(|revision| is_commit(revision))
    }

    /// Returns the model of a cache folder, which must have been named by [`folder`](Self::folder).
    pub(crate) fn of_folder(folder: &str) -> Option<Self> {
        let (org, name) = folder.strip_prefix("models--")?.split_once("--")?;
        let id = Self::parse(&format!("{org}/{name}")).ok()?;
        (id.folder() == folder).then_some(id)
    }

    /// Returns the name of the model's folder in the cache.
    pub(crate) fn folder(&self) -> String {
        format!("models--{}--{}", self.org, self.name)
    }
}

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.org, self.name)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        match &self.file {
            Some(file) => write!(f, ":{file}"),
            None => Ok(()),
        }
    }
}

/// Returns whether `text` is a full commit hash.
pub(crate) fn is_commit(text: &str) -> bool {
    is_hex(text, 40)
}

/// Returns whether `text` consists of `n` lowercase hexadecimal digits.
pub(crate) fn is_hex(text: &str, n: usize) -> bool {
    text.len() == n && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

fn check_part(part: &str) -> Result<(), &'static str> {
    let is_word = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_');
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if !part.chars().all(is_allowed) {
        return Err("only letters, digits, `-`, `_`, `.` and one `/` are allowed before an `@`");
    }
    if part.len() > MAX_PART {
        return Err("a part has more than 96 characters");
    }
    if !(is_word(part.chars().next()) && is_word(part.chars().next_back())) {
        return Err("both parts begin and end with a letter, a digit or `_`");
    }
    if part.contains("--") || part.contains("..") {
        return Err("`--` and `..` are not allowed");
    }
    Ok(())
}

/// Checks a revision by Git's rules for reference names. The revision is also a path in the cache.
fn check_revision(revision: &str) -> Result<(), &'static str> {
    let is_bad = |c: char| c.is_control() || c.is_whitespace() || "\\~^:?*[@{}<>|\"'".contains(c);
    if revision.is_empty() {
        return Err("there is no revision after the `@`");
    }
    if revision.len() > MAX_REVISION {
        return Err("the revision has more than 200 bytes");
    }
    if revision.contains(is_bad) || revision.contains("..") {
        return Err("the revision has characters that no branch, tag or commit has");
    }
    let is_part = |part: &str| !(part.is_empty() || part.starts_with('.') || part.ends_with('.'));
    if !revision.split('/').all(is_part) {
        return Err("each part of a revision has a name that neither begins nor ends with `.`");
    }
    Ok(())
}

/// Checks a file name. The checks are few, because the name is only compared with names that the hub lists.
fn check_file(file: &str) -> Result<(), &'static str> {
    if file.is_empty() {
        return Err("there is no name of a file after the `:`");
    }
    if file.len() > MAX_FILE {
        return Err("the name of the file has more than 200 bytes");
    }
    match file.chars().any(|c| c.is_control() || ":\\".contains(c)) {
        true => Err("the name of the file has characters that no file on the hub has"),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_revisions_are_parsed() {
        let id = ModelId::parse("sentence-transformers/all-MiniLM-L6-v2").unwrap();
        assert_eq!(id.repo(), "sentence-transformers/all-MiniLM-L6-v2");
        assert_eq!(id.name(), "all-MiniLM-L6-v2");
        assert_eq!(id.revision(), "main");
        assert_eq!(id.commit(), None);
        assert_eq!(
            id.folder(),
            "models--sentence-transformers--all-MiniLM-L6-v2"
        );
        let id = ModelId::parse("a_/b.c-d@refs/pr/1").unwrap();
        assert_eq!(
            (id.revision(), id.to_string().as_str()),
            ("refs/pr/1", "a_/b.c-d@refs/pr/1")
        );
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let id = ModelId::parse(&format!("a/b@{commit}")).unwrap();
        assert_eq!(id.commit(), Some(commit));
        assert_eq!(ModelId::parse("a/b@0123abc").unwrap().commit(), None);
        let id = ModelId::parse("a/b@v1:big/c@Q8_0.gguf").unwrap();
        assert_eq!((id.revision(), id.file()), ("v1", Some("big/c@Q8_0.gguf")));
        assert_eq!(id.to_string(), "a/b@v1:big/c@Q8_0.gguf");
    }

    #[test]
    fn other_forms_are_refused() {
        let long = format!("a/{}", "b".repeat(97));
        for bad in [
            "",
            "bert",
            "a/",
            "/b",
            "a/b/c",
            "../b",
            "a/..",
            "./b",
            "a/.b",
            "a/b-",
            "a--b/c",
            "a/b..c",
            "a b/c",
            "a/b\n",
            "a\\b/c",
            "é/b",
            "a/b.git",
            "a/b@",
            "a/b@../../x",
            "a/b@/x",
            "a/b@x/",
            "a/b@x//y",
            "a/b@.x",
            "a/b@x y",
            "a/b@x\\y",
            "a/b@x@y",
            "a/b@x\u{7f}",
            "a/b:",
            "a/b:c:d",
            "a/b:c\n",
            "https://hub/a/b",
            long.as_str(),
        ] {
            let error = ModelId::parse(bad).expect_err(bad);
            assert!(matches!(error, HubError::BadId { .. }), "{bad}");
        }
    }
}
