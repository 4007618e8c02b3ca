//! Layout of a figure, in pixels.

use super::{Figure, Kind};

/// Height of text.
pub(super) const TEXT: i32 = 13;
/// Height of the text of titles.
pub(super) const TITLE: i32 = 16;
/// Height of a line of a title.
pub(super) const TITLE_LINE: i32 = 22;
pub(super) const MARGIN: i32 = 14;
/// Width of the numbers next to the value axis.
pub(super) const TICK_WIDTH: i32 = 56;
/// Width of the sample of a series in the legend, including the space before the name.
pub(super) const KEY_WIDTH: i32 = 32;
/// Min width of a bar that has room for vertical text.
pub(super) const TURNED_WIDTH: i32 = 14;

/// Mean width of a sans-serif letter, as a fraction of its height; a high estimate.
const LETTER: f64 = 0.6;
const PLOT_HEIGHT: i32 = 340;
/// Minimum and maximum width inside the axes. A figure with many groups exceeds the maximum if its bars would otherwise be narrower than
/// the minimum width of a bar.
const MIN_WIDTH: i32 = 620;
const MAX_WIDTH: i32 = 1200;
const MIN_BAR: i32 = 5;
const MAX_BAR: i32 = 44;
/// Gap between the bars of two groups.
const GROUP_GAP: i32 = 12;
/// Minimum distance between two vertical labels.
const TURNED_PITCH: i32 = 18;
const LEGEND_LINE: i32 = 20;
/// Maximum number of characters of a label; longer labels are truncated.
const MAX_LETTERS: usize = 48;

/// Sizes and positions of the parts of a figure.
pub(super) struct Layout {
    pub width: i32,
    pub height: i32,
    /// Position and size of the area inside the axes.
    pub left: i32,
    pub top: i32,
    pub plot_width: i32,
    pub plot_height: i32,
    pub title: Vec<String>,
    /// Left edge and vertical center of each sample in the legend.
    pub legend: Vec<(i32, i32)>,
    /// Whether the labels of groups are vertical.
    pub turned: bool,
    /// Number of groups from one label to the next.
    pub label_step: usize,
    slot: i32,
    bar: i32,
    /// Number of adjacent bars in a group.
    n_bars: i32,
}

impl Layout {
    pub fn new(figure: &Figure) -> Self {
        let n_groups = figure.groups.len().max(1) as i32;
        let n_bars = match figure.kind {
            Kind::Bars => figure.series.len().max(1) as i32,
            Kind::Stacked | Kind::Lines => 1,
        };
        let widest_bar = match n_bars {
            ..=3 => MAX_BAR,
            _ => TURNED_WIDTH + 8,
        };
        let least_slot = match figure.kind {
            Kind::Lines => MAX_WIDTH / n_groups.max(12),
            Kind::Bars | Kind::Stacked => {
                let room = MAX_WIDTH / n_groups - GROUP_GAP;
                let bar = (room / n_bars).clamp(MIN_BAR, widest_bar);
                (n_bars * bar + GROUP_GAP).max(TURNED_PITCH)
            }
        };
        let slot = least_slot.max(MIN_WIDTH / n_groups).max(1);
        // If the slot of a group is wider than its bars need, widen the bars, but keep at least half of the gap between groups.
        let bar = ((slot - GROUP_GAP / 2) / n_bars).min(widest_bar);
        let labels = figure.groups.iter().map(|g| width_of(&shown(g), TEXT));
        let longest = labels.max().unwrap_or(0);
        let turned = longest + 10 > slot;
        let label_step = if turned {
            TURNED_PITCH.div_euclid(slot) as usize + usize::from(TURNED_PITCH % slot != 0)
        } else {
            1
        };
        let below = if turned { longest + 12 } else { TEXT + 14 };

        let plot_width = slot * n_groups;
        let left = MARGIN + TEXT + 12 + TICK_WIDTH;
        let width = left + plot_width + 2 * MARGIN;
        let title = wrap(&shown_up_to(&figure.title, 400), width - 2 * MARGIN);
        let legend_top = MARGIN + title.len() as i32 * TITLE_LINE + LEGEND_LINE / 2;
        let (legend, legend_height) = legend(figure, left, width - MARGIN, legend_top);
        let top = legend_top + legend_height;
        Self {
            width,
            height: top + PLOT_HEIGHT + below + TEXT + 12 + MARGIN,
            left,
            top,
            plot_width,
            plot_height: PLOT_HEIGHT,
            title,
            legend,
            turned,
            label_step: label_step.max(1),
            slot,
            bar,
            n_bars,
        }
    }

    pub fn size(&self) -> (u32, u32) {
        (self.width.unsigned_abs(), self.height.unsigned_abs())
    }

    pub fn title_top(&self) -> i32 {
        MARGIN
    }

    /// Returns the lower end of the value axis.
    pub fn lower(&self) -> i32 {
        self.top + self.plot_height
    }

    /// Returns the horizontal center of a group.
    pub fn middle_of(&self, group: usize) -> i32 {
        self.left + group as i32 * self.slot + self.slot / 2
    }

    /// Returns the left and right edges of a bar.
    pub fn bar_of(&self, group: usize, nth: usize) -> (i32, i32) {
        let first = self.middle_of(group) - self.n_bars * self.bar / 2;
        let from = first + nth as i32 * self.bar;
        (from, from + self.bar)
    }
}

/// Returns the positions of the legend's entries, in lines from `left` to `right`, and the total height of the lines.
fn legend(figure: &Figure, left: i32, right: i32, top: i32) -> (Vec<(i32, i32)>, i32) {
    let (mut x, mut y) = (left, top);
    let mut places = Vec::new();
    for series in &figure.series {
        let width = KEY_WIDTH + width_of(&shown(&series.name), TEXT) + 16;
        if x > left && x + width > right {
            (x, y) = (left, y + LEGEND_LINE);
        }
        places.push((x, y));
        x += width;
    }
    (places, y - top + LEGEND_LINE)
}

/// Estimates the width of a text.
pub(super) fn width_of(text: &str, size: i32) -> i32 {
    (text.chars().count() as f64 * f64::from(size) * LETTER).ceil() as i32
}

/// Prepares a label for drawing: removes characters that are invalid in XML, and truncates it.
pub(super) fn shown(text: &str) -> String {
    shown_up_to(text, MAX_LETTERS)
}

fn shown_up_to(text: &str, most: usize) -> String {
    let clean = |c: char| match c {
        c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => ' ',
        c => c,
    };
    let mut shown: String = text.chars().map(clean).take(most).collect();
    if text.chars().nth(most).is_some() {
        shown.pop();
        shown.push('…');
    }
    shown
}

/// Breaks a text into lines of at most `width`. A single word that is wider gets its own line.
fn wrap(text: &str, width: i32) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if width_of(line, TITLE) + width_of(word, TITLE) < width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}
