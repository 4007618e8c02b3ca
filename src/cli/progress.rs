use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressStyle};

/// Progress bar of the current stage on standard error. It is hidden if standard error is not a
/// terminal.
#[derive(Default)]
pub struct Bars {
    current: Mutex<Option<(&'static str, ProgressBar)>>,
}

impl Bars {
    pub fn new() -> Self {
        Self::default()
    }

    /// Shows that `done` of `total` items of the stage `what` are finished.
    pub fn show(&self, what: &'static str, done: usize, total: usize) {
        // A poisoned lock means that another thread died while drawing. Continue without the bar.
        let Ok(mut current) = self.current.lock() else {
            return;
        };
        if current.as_ref().is_none_or(|(name, _)| *name != what) {
            let bar = ProgressBar::new(total as u64);
            if let Ok(style) = ProgressStyle::with_template("{prefix:>10} {wide_bar} {pos}/{len}") {
                bar.set_style(style);
            }
            bar.set_prefix(what);
            *current = Some((what, bar));
        }
        if let Some((_, bar)) = current.as_ref() {
            bar.set_position(done as u64);
            if done == total {
                bar.finish_and_clear();
            }
        }
    }
}
