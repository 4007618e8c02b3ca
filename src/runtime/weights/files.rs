//! The files of a model, in a folder or in a GGUF file.

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use gemmule_weights::gguf::{Gguf, folder::Folder};

use super::found::WEIGHTS;
use crate::files::{self, Kind, ReadError, up_to};

/// Extension of the files of llama.cpp.
const ENDING: &str = "gguf";
/// File name prefix of the part of a model that processes images or sound.
const PROJECTOR: &str = "mmproj";
/// Maximum number of files into which a model is split.
const MAX_PARTS: u32 = 1000;
/// If a folder contains one of these files, it has its own weights or refers to the folder with the weights.
const OWN: [&str; 2] = ["adapter_config.json", "modules.json"];

/// The files of a model, by the file names that Hugging Face transformers uses when it saves a model to a folder.
#[derive(Clone, Debug)]
pub enum ModelFiles {
    /// A folder, such as a model downloaded from the Hugging Face hub.
    Folder(PathBuf),
    /// A GGUF file of llama.cpp, whose contents are presented as the files of a folder.
    Gguf(Arc<Folder>),
}

impl ModelFiles {
    /// Opens a folder or a GGUF file, which is detected by its extension or its first bytes. If a folder has no other
    /// weights, its only GGUF file is opened.
    ///
    /// A model that is split into several GGUF files counts as one file. It is opened through its first part.
    ///
    /// # Errors
    /// Returns an error if a GGUF file cannot be read or converted, or if the folder has several GGUF models.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        if is_gguf(path) && !path.is_dir() || begins_as_gguf(path) {
            return Self::gguf(path);
        }
        let is_there = |name: &&str| path.join(name).is_file();
        if WEIGHTS.iter().chain(&OWN).any(is_there) {
            return Ok(Self::Folder(path.to_owned()));
        }
        let entries = std::fs::read_dir(path).into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let names: Vec<String> = names.collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        match gguf_models(&names).as_slice() {
            [] => Ok(Self::Folder(path.to_owned())),
            [one] => Self::gguf(&path.join(one)),
            several => Err(ReadError::SeveralGguf {
                folder: path.to_owned(),
                files: several.iter().map(|name| format!("`{name}`")).collect(),
            }),
        }
    }

    fn gguf(path: &Path) -> Result<Self, ReadError> {
        let opened = Gguf::open(path).and_then(Folder::new)?;
        Ok(Self::Gguf(Arc::new(opened)))
    }

    /// Returns the path of the folder or of the file.
    pub fn path(&self) -> &Path {
        match self {
            Self::Folder(folder) => folder,
            Self::Gguf(folder) => folder.gguf().path(),
        }
    }

    /// Returns the path of the file `name`, for error messages. If the model is a GGUF file, the path does not exist.
    pub fn name(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Returns the files of a subfolder. A GGUF file has no subfolders, so the same file is returned.
    #[must_use]
    pub fn below(&self, folder: &str) -> Self {
        match self {
            Self::Folder(root) => Self::Folder(root.join(folder)),
            Self::Gguf(_) => self.clone(),
        }
    }

    /// Reads a text file of limited size; `None` if it does not exist.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or exceeds the size limit of its kind.
    pub fn text(&self, name: &str, kind: Kind) -> Result<Option<String>, ReadError> {
        match self {
            Self::Folder(folder) => {
                let file = folder.join(name);
                let is_there = file.exists();
                is_there.then(|| files::text(&file, kind)).transpose()
            }
            Self::Gguf(folder) => Ok(folder.json(name)?.map(|json| json.to_string())),
        }
    }

    /// Returns the error for the required file `name`, which is missing.
    pub fn missing(&self, name: &str) -> ReadError {
        let file = self.name(name);
        let source = match std::fs::metadata(&file) {
            Err(error) => error,
            Ok(_) => io::ErrorKind::NotFound.into(),
        };
        ReadError::Io { file, source }
    }

    /// Returns whether there is a file of this name.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::Folder(folder) => folder.join(name).exists(),
            Self::Gguf(folder) => folder.json(name).is_ok_and(|json| json.is_some()),
        }
    }

    /// Returns the paths on disk: the entries of the folder, or the GGUF files.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be listed.
    pub fn paths(&self) -> io::Result<Vec<PathBuf>> {
        match self {
            Self::Folder(folder) => std::fs::read_dir(folder)?
                .map(|entry| Ok(entry?.path()))
                .collect(),
            Self::Gguf(folder) => Ok(folder.gguf().paths().map(Path::to_owned).collect()),
        }
    }
}

/// Returns whether a path has the extension of llama.cpp's files.
pub fn is_gguf(path: &Path) -> bool {
    path.extension()
        .is_some_and(|ending| ending.eq_ignore_ascii_case(ENDING))
}

/// Returns whether a path is a folder or a GGUF file.
pub fn is_local(path: &Path) -> bool {
    path.is_dir() || path.is_file() && is_gguf(path) || begins_as_gguf(path)
}

/// Returns whether the path is a regular file that begins like a GGUF file, such as a blob of Ollama.
fn begins_as_gguf(path: &Path) -> bool {
    const MAGIC: &[u8] = b"GGUF";
    let begins = || up_to(path, 3).is_ok_and(|bytes| bytes == MAGIC);
    path.is_file() && begins()
}

/// Returns the names of the GGUF models among `names`, sorted. A model that is split into several files has the name of its first file.
pub fn gguf_models<'n>(names: &[&'n str]) -> Vec<&'n str> {
    let is_model = |name: &&str| {
        let file = name.rsplit('/').next().unwrap_or(name);
        is_gguf(Path::new(name)) && !file.starts_with(PROJECTOR)
    };
    let models = names.iter().copied().filter(is_model);
    let models = models.filter(|name| split(name).is_none_or(|(_, index, _)| index == 1));
    models.collect::<BTreeSet<&str>>().into_iter().collect()
}

/// Returns the names of all files of the GGUF model with the first file `name`.
pub fn gguf_parts(name: &str) -> Vec<String> {
    match split(name) {
        Some((stem, _, count)) => (1..=count.min(MAX_PARTS))
            .map(|index| format!("{stem}-{index:05}-of-{count:05}.{ENDING}"))
            .collect(),
        None => vec![name.to_owned()],
    }
}

/// Returns the name of a GGUF file without the extension and without the part numbers.
pub fn gguf_stem(name: &str) -> &str {
    match split(name) {
        Some((stem, ..)) => stem,
        None => name.strip_suffix(".gguf").unwrap_or(name),
    }
}

/// Returns the stem and the two numbers of a name like `NAME-00001-of-00003.gguf`.
fn split(name: &str) -> Option<(&str, u32, u32)> {
    const DIGITS: usize = 5;
    let number = |text: &str| match text.len() == DIGITS && text.bytes().all(|b| b.is_ascii_digit())
    {
        true => text.parse::<u32>().ok(),
        false => None,
    };
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, index) = rest.rsplit_once('-')?;
    Some((stem, number(index)?, number(count)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_named_by_their_first_file() {
        let names = [
            "README.md",
            "b-Q8_0.gguf",
            "mmproj-F16.gguf",
            "big/c-00001-of-00002.gguf",
            "big/c-00002-of-00002.gguf",
            "a.GGUF",
        ];
        let expected = ["a.GGUF", "b-Q8_0.gguf", "big/c-00001-of-00002.gguf"];
        assert_eq!(gguf_models(&names), expected);
        assert_eq!(gguf_parts("big/c-00001-of-00002.gguf"), names[3..5]);
        assert_eq!(gguf_parts("b-Q8_0.gguf"), ["b-Q8_0.gguf"]);
    }

    #[test]
    fn a_folder_with_several_models_is_refused() {
        let folder = tempfile::tempdir().expect("room for a folder");
        let write = |name: &str| std::fs::write(folder.path().join(name), "").expect("written");
        let open = || ModelFiles::open(folder.path());
        assert!(matches!(open(), Ok(ModelFiles::Folder(_))));
        write("a.gguf");
        let error = open().unwrap_err().to_string();
        assert!(error.contains("a.gguf: it is no GGUF file"), "{error}");
        write("b.gguf");
        let error = open().unwrap_err().to_string();
        let expected = "has 2 GGUF files: `a.gguf`, `b.gguf`; give the path of one of them";
        assert!(error.contains(expected), "{error}");
        write("model.safetensors");
        assert!(matches!(open(), Ok(ModelFiles::Folder(_))));
    }
}
