//! The identity of a model, for runs that are resumed.

use std::{path::Path, time::UNIX_EPOCH};

use super::{Choices, Runnable};

impl Runnable {
    /// Returns a text that identifies the model and the options that change its outputs. An interrupted run resumes only if the text is the
    /// same. The model is MODEL, or else `--weights`, as an absolute path if it is a file or folder. Options at their defaults are left
    /// out. The contents of the folder are not included.
    pub(in crate::cli) fn identity(&self) -> String {
        let mut parts = vec![absolute(Path::new(self.name()))];
        if let Some(file) = self.location.model().map(Path::new).filter(|f| f.is_file()) {
            parts.push(format!("file {}", changed(file)));
        }
        if let Some(file) = &self.config {
            parts.push(format!("config {} {}", absolute(file), changed(file)));
        }
        if let Some(seed) = self.random_weights {
            parts.push(format!("random weights {seed} {}", self.weights_deviation));
        }
        let Choices {
            outputs: _,
            without,
            attention,
            invariant,
            no_fused_launches,
            max_context,
        } = &self.choices;
        if !without.is_empty() {
            parts.push(format!("without {}", without.join(" and ")));
        }
        if let Some(kind) = attention {
            parts.push(format!("{kind} attention"));
        }
        if let Some(n) = max_context {
            parts.push(format!("contexts of up to {n} tokens"));
        }
        let flags = [
            (*invariant, "invariant"),
            (*no_fused_launches, "no fused launches"),
            (self.dequantize, "dequantized"),
        ];
        let given = flags.iter().filter(|(is_given, _)| *is_given);
        parts.extend(given.map(|(_, name)| (*name).to_owned()));
        parts.join(", ")
    }
}

/// Returns the absolute path without symbolic links; the path as given if there is no such file, as for a model on the hub.
fn absolute(path: &Path) -> String {
    let absolute = path.canonicalize();
    let absolute = absolute.unwrap_or_else(|_| path.to_owned());
    absolute.display().to_string()
}

/// Describes the size and the modification time of a file.
pub(in crate::cli) fn changed(file: &Path) -> String {
    let Ok(data) = file.metadata() else {
        return "absent".to_owned();
    };
    let since = data.modified().ok();
    let since = since.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    format!(
        "{} {}",
        data.len(),
        since.map_or(0, |since| since.as_nanos())
    )
}
