//! Arguments that specify a model: its name or file, its folder, or its name on the Hugging Face hub.

use std::{
    cell::OnceCell,
    io::{IsTerminal as _, stderr},
    path::{Path, PathBuf},
    sync::Mutex,
};

use indicatif::{ProgressBar, ProgressStyle};

use super::{manual::model_completer, say};
use crate::{
    EngineError,
    engine::hub::{self, Event, Files, Hub, ModelId},
    model::Description,
    runtime::weights::is_local,
};

#[derive(clap::Args)]
#[group(skip)]
pub(super) struct Location {
    /// A model on the Hugging Face hub (ORG/NAME or ORG/NAME@REVISION; with several GGUF files, ORG/NAME:Q8_0 or :FILE selects one), a
    /// checkpoint folder or GGUF file, a built-in description (see `gemmule models`), or a RON file. Commands that run a model without
    /// generating text also take an artifact of `gemmule compile`. With --weights alone, the description that fits the checkpoint is used
    #[arg(required_unless_present_any = ["weights", "named"], add = model_completer())]
    model: Option<String>,
    /// Another way to give MODEL
    #[arg(long = "model", value_name = "MODEL", conflicts_with = "model", add = model_completer())]
    named: Option<String>,
    /// Checkpoint folder, or a GGUF file
    #[arg(long, value_name = "PATH")]
    weights: Option<PathBuf>,
    /// Path of the folder or file of a model on the hub, after it has been fetched.
    #[arg(skip)]
    fetched: OnceCell<PathBuf>,
}

impl Location {
    fn given(&self) -> Option<&str> {
        self.model.as_deref().or(self.named.as_deref())
    }

    /// Returns MODEL if it is the name of a description or the path of a file. Returns `None` if MODEL is missing, a checkpoint, or a model
    /// on the hub.
    pub(super) fn model(&self) -> Option<&str> {
        let is_own = |name: &&str| on_hub(name).is_none() && local(name).is_none();
        self.given().filter(is_own)
    }

    /// Returns MODEL, or else the path of `--weights`.
    pub(super) fn name(&self) -> &str {
        let folder = || self.weights.as_deref().and_then(Path::to_str);
        let given = self.given().or_else(folder);
        given.unwrap_or("the checkpoint")
    }

    /// Returns the path of the checkpoint's folder or GGUF file, if there is one. For a model on the hub, the first call fetches `files`.
    pub(super) fn folder(&self, files: Files) -> Result<Option<&Path>, EngineError> {
        let given = self.given();
        let (path, id) = (given.and_then(local), given.and_then(on_hub));
        if let (Some(model), true) = (
            given,
            self.weights.is_some() && (path.is_some() || id.is_some()),
        ) {
            let model = model.to_owned();
            return Err(EngineError::TwoModels { model });
        }
        let Some(id) = id else {
            return match self.weights.as_deref().or(path) {
                Some(folder) => checked(folder).map(Some),
                None => Ok(None),
            };
        };
        if let Some(folder) = self.fetched.get() {
            return Ok(Some(folder));
        }
        let folder = fetch(&id, files)?;
        Ok(Some(self.fetched.get_or_init(|| folder)))
    }
}

/// Returns the model on the hub that `name` refers to. Paths and built-in descriptions take precedence.
pub(super) fn on_hub(name: &str) -> Option<ModelId> {
    let is_file = Path::new(name).exists() || name.ends_with(".ron");
    if is_file || Description::shipped(name).is_some() {
        return None;
    }
    ModelId::parse(name).ok()
}

/// Returns the path of the folder or GGUF file that `name` refers to. Built-in descriptions take precedence.
pub(super) fn local(name: &str) -> Option<&Path> {
    let path = Path::new(name);
    (Description::shipped(name).is_none() && is_local(path)).then_some(path)
}

/// Returns `folder`. Returns an error if it does not exist and is named like a model on the hub.
pub(super) fn checked(folder: &Path) -> Result<&Path, EngineError> {
    let name = folder.to_str().filter(|_| !folder.exists());
    match name.and_then(|name| ModelId::parse(name).ok()) {
        Some(id) => Err(EngineError::FolderOnHub {
            model: id.to_string(),
        }),
        None => Ok(folder),
    }
}

/// Fetches a model. Progress is shown as a bar on a terminal, and as lines elsewhere.
pub(super) fn fetch(id: &ModelId, files: Files) -> Result<PathBuf, EngineError> {
    let shown = Shown::default();
    let hub = Hub::from_env()?;
    hub::fetch_described(&hub, id, files, &|event| shown.show(event))
}

/// Min size in bytes of a fetch whose progress is shown.
const SHOWN_BYTES: u64 = 1_000_000;

/// Progress on standard error.
#[derive(Default)]
struct Shown(Mutex<State>);

#[derive(Default)]
enum State {
    #[default]
    Quiet,
    Bar(ProgressBar),
    /// Lines of text, at most one for each tenth of the fetch. Contains the last tenth that was shown.
    Lines(u64),
}

impl Shown {
    fn show(&self, event: &Event<'_>) {
        // A poisoned lock means that another thread died while drawing. Continue without progress.
        let Ok(mut state) = self.0.lock() else {
            return;
        };
        match (event, &mut *state) {
            (Event::Fetching { bytes, .. }, _) if *bytes < SHOWN_BYTES => *state = State::Quiet,
            (Event::Fetching { bytes, .. }, _) => {
                say(&event.to_string());
                *state = match stderr().is_terminal() {
                    true => State::Bar(started(*bytes)),
                    false => State::Lines(0),
                };
            }
            (Event::Received { done, .. }, State::Bar(bar)) => bar.set_position(*done),
            (Event::Received { done, total }, State::Lines(shown)) => {
                let tenths = done.saturating_mul(10).checked_div(*total).unwrap_or(10);
                if tenths > *shown && tenths < 10 {
                    *shown = tenths;
                    say(&event.to_string());
                }
            }
            (Event::Fetched, State::Bar(bar)) => {
                bar.finish_and_clear();
                say(&event.to_string());
            }
            (Event::Received { .. } | Event::Fetched, State::Quiet) => {}
            (_, State::Bar(bar)) => bar.suspend(|| say(&event.to_string())),
            _ => say(&event.to_string()),
        }
    }
}

fn started(bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    let template = "{prefix:>10} {wide_bar} {bytes}/{total_bytes}, {bytes_per_sec}, {eta} left";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_prefix("fetching");
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_built_in_descriptions_come_before_the_hub() {
        let repo = |name: &str| on_hub(name).map(|id| id.to_string());
        assert_eq!(repo("org/name").as_deref(), Some("org/name"));
        assert_eq!(repo("org/name@v1").as_deref(), Some("org/name@v1"));
        // Tests run in the project's root folder.
        for other in [
            "bert",
            "src/cli",
            "models/missing.ron",
            "./org/name",
            "a/b/c",
        ] {
            assert_eq!(repo(other), None, "{other}");
        }
        assert_eq!(local("src/cli"), Some(Path::new("src/cli")));
        assert_eq!(local("models/bert.ron"), None);
        assert_eq!(local("missing.gguf"), None);
        assert_eq!(
            repo("org/name-GGUF@v1:Q4_K_M").as_deref(),
            Some("org/name-GGUF@v1:Q4_K_M")
        );
        assert!(checked(Path::new("src/cli")).is_ok());
        assert!(checked(Path::new("missing")).is_ok());
        let error = checked(Path::new("org/name")).unwrap_err().to_string();
        assert!(error.contains("there is no folder `org/name`"), "{error}");
    }
}
