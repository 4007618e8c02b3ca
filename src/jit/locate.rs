//! The search for NVRTC.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::ffi::{Api, Loaded};
use super::{JitError, Looked, Origin, Outcome};
use crate::files::trust::{self, Distrust, Writers};

/// Arguments that make the interpreter print its import path. `-I` excludes the current folder and
/// PYTHONPATH, but also the user's own packages, so the script adds these.
const PYTHON_ARGUMENTS: [&str; 3] = [
    "-I",
    "-c",
    "import site, sys; print('\\n'.join([*sys.path, site.getusersitepackages()]))",
];
/// Reason for skipping a relative path.
const RELATIVE: &str =
    "not searched, because a relative path depends on the current folder; make it absolute";

/// Inputs of the search for NVRTC.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// The value of `GEMMULE_NVRTC`.
    pub choice: Option<PathBuf>,
    /// Reason for skipping the dynamic loader's own search; `None` if it is not skipped.
    pub loader_refused: Option<String>,
    /// File names that the dynamic loader searches for.
    pub loader_names: Vec<PathBuf>,
    /// Roots of CUDA toolkits. Relative paths are reported but not searched.
    pub cuda: Vec<PathBuf>,
    /// Environment variables that name Python environments, with their values. Relative paths are reported but not searched.
    pub environments: Vec<(&'static str, Option<PathBuf>)>,
    /// Absolute path of the Python interpreter.
    pub python: Option<PathBuf>,
}

impl Surroundings {
    /// Reads the inputs from the environment of this process.
    pub fn of_this_process() -> Surroundings {
        let variable = |name| {
            env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let mut cuda: Vec<PathBuf> = ["CUDA_PATH", "CUDA_HOME"]
            .into_iter()
            .filter_map(variable)
            .collect();
        cuda.push("/usr/local/cuda".into());
        cuda.extend(versioned(Path::new("/usr/local"), "cuda-", ""));
        cuda.push("/opt/cuda".into());
        unique(&mut cuda);

        Surroundings {
            choice: variable("GEMMULE_NVRTC"),
            loader_refused: trust::planted_library(),
            loader_names: ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
                .map(Into::into)
                .into(),
            cuda,
            environments: ["VIRTUAL_ENV", "CONDA_PREFIX"]
                .map(|name| (name, variable(name)))
                .into(),
            python: in_path("python3", &env::var_os("PATH").unwrap_or_default()),
        }
    }
}

/// Returns the first usable NVRTC, and every place that was searched.
pub(super) fn search(surroundings: &Surroundings) -> Result<(Loaded, Vec<Looked>), JitError> {
    let mut search = Search { looked: Vec::new() };
    if let Some(value) = &surroundings.choice {
        let found = search.choice(value);
        return match found {
            Some(loaded) => Ok((loaded, search.looked)),
            None => Err(JitError::NvrtcChoice {
                value: value.clone(),
                looked: search.looked,
            }),
        };
    }
    search.note(&Origin::Choice, Path::new(""), Outcome::NotSet);
    match search.everywhere(surroundings) {
        Some(loaded) => Ok((loaded, search.looked)),
        None => Err(JitError::NvrtcMissing {
            looked: search.looked,
        }),
    }
}

struct Search {
    looked: Vec<Looked>,
}

impl Search {
    fn note(&mut self, origin: &Origin, place: &Path, outcome: Outcome) {
        let (origin, place) = (origin.clone(), place.to_owned());
        self.looked.push(Looked {
            origin,
            place,
            outcome,
        });
    }

    fn choice(&mut self, value: &Path) -> Option<Loaded> {
        if value.is_relative() {
            let why = "a relative path depends on the current folder; make it absolute".to_owned();
            self.note(&Origin::Choice, value, Outcome::Refused(why));
            None
        } else if value.is_dir() {
            let mut within = vec![value.to_owned(), value.join("lib64")];
            within.extend(in_environment(value));
            self.folder(&Origin::Choice, value, &within)
        } else if value.exists() {
            self.file(&Origin::Choice, value)
        } else {
            self.note(&Origin::Choice, value, Outcome::Absent);
            None
        }
    }

    fn everywhere(&mut self, surroundings: &Surroundings) -> Option<Loaded> {
        match &surroundings.loader_refused {
            Some(why) => {
                let why = Outcome::Refused(format!("not searched: {why}"));
                self.note(&Origin::Loader, Path::new(""), why);
            }
            None => {
                for name in &surroundings.loader_names {
                    if let Some(loaded) = self.by_loader(name) {
                        return Some(loaded);
                    }
                }
            }
        }
        for root in &surroundings.cuda {
            let within = [root.join("lib64"), root.join("lib")];
            if let Some(loaded) = self.folder(&Origin::Cuda, root, &within) {
                return Some(loaded);
            }
        }
        for (name, root) in &surroundings.environments {
            let origin = Origin::Environment(name);
            let Some(root) = root else {
                self.note(&origin, Path::new(""), Outcome::NotSet);
                continue;
            };
            if let Some(loaded) = self.folder(&origin, root, &in_environment(root)) {
                return Some(loaded);
            }
        }
        // The interpreter comes last, because it starts a process.
        self.python(surroundings.python.as_deref()?)
    }

    fn python(&mut self, interpreter: &Path) -> Option<Loaded> {
        let origin = Origin::Python(interpreter.to_owned());
        // The interpreter must not be in a folder that others may write to. It is started in `/`, because some Python launchers look in
        // the current folder for a file that selects the Python version.
        if interpreter.exists()
            && let Err(why) = trust::resolve(interpreter, Writers::Nobody)
        {
            self.note(&origin, Path::new(""), refused("not started", &why));
            return None;
        }
        let output = Command::new(interpreter)
            .args(PYTHON_ARGUMENTS)
            .current_dir("/")
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output();
        let paths = match output {
            Ok(output) if output.status.success() => output.stdout,
            Ok(output) => {
                let why = format!("failed to print its import paths ({})", output.status);
                self.note(&origin, Path::new(""), Outcome::Unusable(why));
                return None;
            }
            Err(_) => {
                self.note(&origin, Path::new(""), Outcome::Absent);
                return None;
            }
        };
        let mut packages: Vec<PathBuf> = String::from_utf8_lossy(&paths)
            .lines()
            .map(PathBuf::from)
            .filter(|folder| folder.ends_with("site-packages") || folder.ends_with("dist-packages"))
            .collect();
        unique(&mut packages);
        if packages.is_empty() {
            self.note(&origin, Path::new(""), Outcome::Nothing);
        }
        packages
            .iter()
            .find_map(|folder| self.folder(&origin, folder, &in_packages(folder)))
    }

    /// Tries every NVRTC in the folders `within`. If none of the folders contains an NVRTC, the log reports them as a single place,
    /// `place`.
    fn folder(&mut self, origin: &Origin, place: &Path, within: &[PathBuf]) -> Option<Loaded> {
        if place.is_relative() {
            self.note(origin, place, Outcome::Refused(RELATIVE.to_owned()));
            return None;
        }
        if !place.is_dir() {
            self.note(origin, place, Outcome::Absent);
            return None;
        }
        let files: Vec<PathBuf> = within.iter().flat_map(|folder| libraries(folder)).collect();
        if files.is_empty() {
            self.note(origin, place, Outcome::Nothing);
        }
        files.iter().find_map(|file| self.file(origin, file))
    }

    /// Loads `file` if only the user and root can change it.
    fn file(&mut self, origin: &Origin, file: &Path) -> Option<Loaded> {
        // A file that the user named may be writable by the user's group, which often contains only
        // the user.
        let besides = match origin {
            Origin::Choice => Writers::Group,
            _ => Writers::Nobody,
        };
        match trust::resolve(file, besides) {
            Ok(real) => self.load(origin, file, Api::load_as(file, &real, besides)),
            Err(why) => {
                self.note(origin, file, refused("not opened", &why));
                None
            }
        }
    }

    fn by_loader(&mut self, name: &Path) -> Option<Loaded> {
        self.load(&Origin::Loader, name, Api::load(name))
    }

    fn load(
        &mut self,
        origin: &Origin,
        file: &Path,
        loaded: Result<Loaded, String>,
    ) -> Option<Loaded> {
        match loaded {
            Ok(loaded) => {
                let (major, minor) = loaded.version;
                self.note(origin, &loaded.path, Outcome::Taken(major, minor));
                Some(loaded)
            }
            Err(why) => {
                self.note(origin, file, Outcome::Unusable(why));
                None
            }
        }
    }
}

/// Returns the NVRTC libraries in `folder`, newest first: `libnvrtc.so.13`, `libnvrtc.so.12`,
/// `libnvrtc.so`.
fn libraries(folder: &Path) -> Vec<PathBuf> {
    let mut files = versioned(folder, "libnvrtc.so.", "");
    let bare = folder.join("libnvrtc.so");
    if bare.exists() {
        files.push(bare);
    }
    files
}

/// Returns the folders of a Python or Conda environment that may contain NVRTC.
fn in_environment(root: &Path) -> Vec<PathBuf> {
    let lib = root.join("lib");
    let mut folders: Vec<PathBuf> = versioned(&lib, "python", "site-packages")
        .iter()
        .flat_map(|packages| in_packages(packages))
        .collect();
    folders.push(lib);
    folders
}

/// Returns the folders in which NVIDIA's wheels install NVRTC: `nvidia/cu13/lib` since CUDA 13, `nvidia/cuda_nvrtc/lib`
/// before.
fn in_packages(packages: &Path) -> Vec<PathBuf> {
    let nvidia = packages.join("nvidia");
    let mut folders = versioned(&nvidia, "cu", "lib");
    folders.push(nvidia.join("cuda_nvrtc/lib"));
    folders
}

/// Returns every `folder/<prefix><version>/<below>`, highest version first. A version consists of numbers separated by dots, so
/// `libnvrtc.so.13.alt` and `cuda_runtime` are excluded.
fn versioned(folder: &Path, prefix: &str, below: &str) -> Vec<PathBuf> {
    let Ok(entries) = folder.read_dir() else {
        return Vec::new();
    };
    let mut found: Vec<(Vec<u32>, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            let numbers = name
                .to_str()?
                .strip_prefix(prefix)?
                .split('.')
                .map(str::parse);
            Some((numbers.collect::<Result<_, _>>().ok()?, entry.path()))
        })
        .collect();
    found.sort();
    let join = |path: PathBuf| {
        if below.is_empty() {
            path
        } else {
            path.join(below)
        }
    };
    found
        .into_iter()
        .rev()
        .map(|(_, path)| join(path))
        .collect()
}

/// Returns the path of the program `name` in the first folder of `paths` that contains it. Skips
/// relative folders and empty entries, which mean the current folder.
fn in_path(name: &str, paths: &OsStr) -> Option<PathBuf> {
    env::split_paths(paths)
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(name))
        .find(|program| is_program(program))
}

fn is_program(file: &Path) -> bool {
    let Ok(metadata) = file.metadata() else {
        return false;
    };
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        metadata.is_file() && metadata.permissions().mode() & 0o111 != 0
    }
    #[cfg(not(unix))]
    metadata.is_file()
}

fn refused(what: &str, why: &Distrust) -> Outcome {
    Outcome::Refused(format!("{what}: {why}"))
}

/// Removes duplicate paths, keeping the first of each.
fn unique(paths: &mut Vec<PathBuf>) {
    let mut seen = BTreeSet::new();
    paths.retain(|path| seen.insert(path.clone()));
}

#[cfg(test)]
mod tests;
