//! Draws a plan as an SVG: the place and the lifetime of each tensor.

use std::collections::HashMap;

use svg::Document;
use svg::node::element::{Group, Line, Path, Rectangle, Text, Title, path::Data};

use super::{Plan, UsageRecord, lower_bound};

#[cfg(test)]
mod tests;

const LEFT: f64 = 84.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 64.0;
/// Gap between two lanes (the bands of two chunks). It contains the heading of the lower lane.
const LANE_GAP: f64 = 28.0;
/// Height that all lanes together share in proportion to their bytes. A lane whose part is less than [`MIN_LANE_HEIGHT`] gets this minimum.
const LANES_HEIGHT: f64 = 520.0;
const MIN_LANE_HEIGHT: f64 = 56.0;
const LOAD_HEIGHT: f64 = 72.0;
const AXIS_HEIGHT: f64 = 46.0;
const KEY_LINE: f64 = 12.0;
const KEY_COLUMN: f64 = 300.0;

/// Font sizes of labels in rectangles. Smaller text would not be legible.
const LABEL_SIZES: [f64; 5] = [10.0, 9.0, 8.0, 7.0, 6.0];
/// Estimate of the mean width of a sans-serif letter, as a fraction of the font size. It errs on the large side.
const LETTER: f64 = 0.62;

/// Fill colors that are light enough for black text and distinguishable in grayscale.
const FILLS: [&str; 10] = [
    "#a6cee3", "#fdd0a2", "#b2df8a", "#dadaeb", "#fbb4ae", "#fff2ae", "#ccebc5", "#e5d8bd",
    "#99d8c9", "#f1b6da",
];

/// Draws the plan as a lifetime chart. The x axis shows the operators, and each chunk has a lane that shows its bytes from bottom to top. A
/// tensor is a rectangle as wide as its lifetime and as high as its size. Below the lanes is the load: the bytes alive at each operator.
/// The peak of the load is the lower bound. If a rectangle is too small for its tensor's name, it shows the record's index, and a key at
/// the bottom lists the names.
///
/// `names` holds the names of the tensors in the order of `records`; a missing name is replaced by the index. Tensors whose names differ
/// only in numbers, such as those of different layers, have the same color. For a plan that [`Plan::validate`] rejects, only tensors with a
/// placement are drawn.
pub fn svg(names: &[String], records: &[UsageRecord], plan: &Plan) -> String {
    let names: Vec<String> = (0..records.len())
        .map(|record| {
            names
                .get(record)
                .map_or_else(|| format!("#{record}"), |name| printable(name))
        })
        .collect();
    let x = Operators::new(records);
    let lanes = lanes(plan);
    let mut y = TOP;
    let mut body = Group::new();
    let mut key = Vec::new();
    let fills = fills(&names);

    for lane in &lanes {
        let bottom = y + LANE_GAP + lane.height;
        body = body.add(lane_frame(lane, &x, bottom));
        let tensors = records.iter().zip(&plan.placements).zip(&names).enumerate();
        for (record, ((usage, place), name)) in tensors {
            if place.chunk as usize != lane.chunk {
                continue;
            }
            let scale = lane.height / lane.bytes as f64;
            let height = (usage.bytes as f64 * scale).max(1.0);
            let tensor = Tensor {
                record,
                name,
                fill: fills[record],
                left: x.at(usage.first_op),
                width: x.at(usage.last_op) + x.step - x.at(usage.first_op),
                top: bottom - place.offset as f64 * scale - height,
                height,
                tip: format!(
                    "{name}: {}, operators {} to {}, chunk {} from byte {}",
                    bytes_text(usage.bytes),
                    usage.first_op,
                    usage.last_op,
                    place.chunk,
                    place.offset,
                ),
            };
            let (drawn, is_named) = tensor.draw();
            body = body.add(drawn);
            if !is_named {
                key.push(record);
            }
        }
        y = bottom;
    }

    let bottom = y + LANE_GAP + LOAD_HEIGHT;
    body = body.add(load(records, &x, bottom));
    body = body.add(operator_axis(&x, bottom));
    y = bottom + AXIS_HEIGHT;

    key.sort_unstable();
    let n_columns = (((LEFT + x.width + RIGHT - 2.0 * RIGHT) / KEY_COLUMN) as usize).max(1);
    let n_lines = key.len().div_ceil(n_columns);
    for (at, &record) in key.iter().enumerate() {
        let (column, line) = (at / n_lines, at % n_lines);
        let UsageRecord {
            first_op,
            last_op,
            bytes,
        } = records[record];
        let size = bytes_text(bytes);
        let text = format!(
            "{record}: {}, {size}, operators {first_op} to {last_op}",
            names[record]
        );
        let (left, base) = (
            RIGHT + column as f64 * KEY_COLUMN,
            y + line as f64 * KEY_LINE,
        );
        body = body.add(text_at(text, left, base, 8.0).set("class", "key"));
    }
    y += n_lines as f64 * KEY_LINE + 8.0;

    let width = LEFT + x.width + RIGHT;
    Document::new()
        .set("viewBox", (0, 0, width.ceil() as u64, y.ceil() as u64))
        .set("width", width.ceil())
        .set("height", y.ceil())
        .set("font-family", "Helvetica, Arial, 'DejaVu Sans', sans-serif")
        .add(Title::new(
            "Lifetimes and positions of the intermediate tensors",
        ))
        .add(
            Rectangle::new()
                .set("width", "100%")
                .set("height", "100%")
                .set("fill", "white"),
        )
        .add(caption(records, plan))
        .add(body)
        .to_string()
}

/// The horizontal axis: one column per operator, from the first with a tensor to the last.
struct Operators {
    first: u32,
    last: u32,
    step: f64,
    width: f64,
}

impl Operators {
    fn new(records: &[UsageRecord]) -> Self {
        let first = records
            .iter()
            .map(|usage| usage.first_op)
            .min()
            .unwrap_or(0);
        let last = records
            .iter()
            .map(|usage| usage.last_op)
            .max()
            .unwrap_or(0)
            .max(first);
        let n_ops = f64::from(last - first) + 1.0;
        let width = (n_ops * 13.0).clamp(760.0, 1800.0);
        Operators {
            first,
            last,
            step: width / n_ops,
            width,
        }
    }

    /// Returns the left edge of the column of `op`.
    fn at(&self, op: u32) -> f64 {
        LEFT + (f64::from(op) - f64::from(self.first)) * self.step
    }
}

/// The lane of one chunk: a horizontal band that shows its tensors.
struct Lane {
    chunk: usize,
    bytes: u64,
    height: f64,
}

fn lanes(plan: &Plan) -> Vec<Lane> {
    let total = plan.footprint() as f64;
    let used = plan
        .chunks
        .iter()
        .enumerate()
        .filter(|&(_, &bytes)| bytes > 0);
    used.map(|(chunk, &bytes)| Lane {
        chunk,
        bytes,
        height: (LANES_HEIGHT * bytes as f64 / total).max(MIN_LANE_HEIGHT),
    })
    .collect()
}

fn lane_frame(lane: &Lane, x: &Operators, bottom: f64) -> Group {
    let heading = format!("chunk {} ({})", lane.chunk, bytes_text(lane.bytes));
    let back = Rectangle::new()
        .set("x", px(LEFT))
        .set("y", px(bottom - lane.height))
        .set("width", px(x.width))
        .set("height", px(lane.height))
        .set("fill", "#f2f2f2")
        .set("stroke", "#888888")
        .set("stroke-width", 0.8);
    Group::new()
        .set("class", "lane")
        .add(text_at(heading, LEFT, bottom - lane.height - 6.0, 11.0).set("font-weight", "bold"))
        .add(back)
        .add(byte_axis("offset", lane.bytes, bottom, lane.height))
}

/// Draws ticks at round numbers of bytes, spaced so that labels are legible.
fn byte_axis(what: &str, bytes: u64, bottom: f64, height: f64) -> Group {
    let most = (height / 26.0).max(1.0);
    let mut step = 1u64;
    while bytes as f64 / step as f64 > most {
        step *= 2;
    }
    let (x, middle) = (22.0, bottom - height / 2.0);
    let mut axis = Group::new().set("class", "bytes").add(
        text_at(what, x, middle, 10.0)
            .set("text-anchor", "middle")
            .set("transform", format!("rotate(-90 {} {})", px(x), px(middle))),
    );
    for tick in (0..=bytes / step).map(|n| n * step) {
        let y = bottom - height * tick as f64 / bytes.max(1) as f64;
        axis = axis
            .add(line(LEFT - 4.0, y, LEFT, y))
            .add(text_at(bytes_text(tick), LEFT - 7.0, y + 3.0, 9.0).set("text-anchor", "end"));
    }
    axis
}

fn operator_axis(x: &Operators, bottom: f64) -> Group {
    let mut axis = Group::new().set("class", "operators");
    let n_ops = u64::from(x.last - x.first) + 1;
    let mut step = 1u64;
    for factor in [2, 5, 2].into_iter().cycle().take(28) {
        if (n_ops / step) as f64 * 30.0 <= x.width {
            break;
        }
        step = step * factor / if factor == 5 { 2 } else { 1 };
    }
    let first = u64::from(x.first).next_multiple_of(step);
    for op in (first..=u64::from(x.last)).step_by(step as usize) {
        let middle = x.at(op as u32) + x.step / 2.0;
        axis = axis
            .add(line(middle, bottom, middle, bottom + 4.0))
            .add(text_at(op.to_string(), middle, bottom + 14.0, 9.0).set("text-anchor", "middle"));
    }
    let middle = LEFT + x.width / 2.0;
    axis.add(
        text_at(
            "operator, in topological order",
            middle,
            bottom + 29.0,
            10.0,
        )
        .set("text-anchor", "middle"),
    )
}

/// Draws the bytes alive at each operator as a step function, with its peak.
fn load(records: &[UsageRecord], x: &Operators, bottom: f64) -> Group {
    let peak = lower_bound(records);
    let mut changes: Vec<(u64, i128)> = Vec::with_capacity(2 * records.len());
    for usage in records {
        let bytes = i128::from(super::aligned(usage.bytes));
        changes.push((u64::from(usage.first_op), bytes));
        changes.push((u64::from(usage.last_op) + 1, -bytes));
    }
    changes.sort_unstable();
    let column = |op: u64| LEFT + (op as f64 - f64::from(x.first)) * x.step;
    let level = |alive: i128| bottom - LOAD_HEIGHT * (alive as f64 / peak.max(1) as f64);
    let mut outline = Data::new().move_to((px(LEFT), px(bottom)));
    let mut alive = 0i128;
    for same_op in changes.chunk_by(|a, b| a.0 == b.0) {
        let at = column(same_op[0].0);
        outline = outline.line_to((px(at), px(level(alive))));
        alive += same_op.iter().map(|&(_, bytes)| bytes).sum::<i128>();
        outline = outline.line_to((px(at), px(level(alive))));
    }
    let area = Path::new()
        .set(
            "d",
            outline.line_to((px(LEFT + x.width), px(bottom))).close(),
        )
        .set("fill", "#d9d9d9")
        .set("stroke", "#555555")
        .set("stroke-width", 0.8);
    let top = bottom - LOAD_HEIGHT;
    let heading = format!(
        "bytes alive (the peak, {}, is the lower bound)",
        bytes_text(peak)
    );
    Group::new()
        .set("class", "load")
        .add(text_at(heading, LEFT, top - 6.0, 11.0).set("font-weight", "bold"))
        .add(area)
        .add(line(LEFT, top, LEFT + x.width, top).set("stroke-dasharray", "5 3"))
        .add(line(LEFT, bottom, LEFT + x.width, bottom))
        .add(byte_axis("load", peak, bottom, LOAD_HEIGHT))
}

fn caption(records: &[UsageRecord], plan: &Plan) -> Group {
    let (footprint, bound) = (plan.footprint(), lower_bound(records));
    let n_chunks = plan.chunks.iter().filter(|&&bytes| bytes > 0).count();
    let ratio = match bound {
        0 => String::new(),
        _ => format!(", {:.2} × the lower bound", footprint as f64 / bound as f64),
    };
    let title = format!(
        "Lifetimes and positions of {}",
        counted(records.len(), "intermediate tensor"),
    );
    let text = format!(
        "lower bound {}, footprint {} in {}{ratio}",
        bytes_text(bound),
        bytes_text(footprint),
        counted(n_chunks, "chunk"),
    );
    Group::new()
        .set("class", "caption")
        .add(text_at(title, RIGHT, 26.0, 16.0).set("font-weight", "bold"))
        .add(text_at(text, RIGHT, 46.0, 12.0))
}

/// The rectangle of one tensor.
struct Tensor<'a> {
    record: usize,
    name: &'a str,
    fill: &'a str,
    left: f64,
    width: f64,
    top: f64,
    height: f64,
    tip: String,
}

impl Tensor<'_> {
    /// Draws the rectangle with its label. Also returns whether the label is the tensor's name.
    fn draw(&self) -> (Group, bool) {
        let rectangle = Rectangle::new()
            .set("x", px(self.left))
            .set("y", px(self.top))
            .set("width", px(self.width))
            .set("height", px(self.height))
            .set("fill", self.fill)
            .set("stroke", "#404040")
            .set("stroke-width", 0.6)
            .add(Title::new(self.tip.as_str()));
        let (label, is_named) = self.label();
        let tensor = Group::new()
            .set("class", "tensor")
            .set("data-record", self.record);
        (tensor.add(rectangle).add(label), is_named)
    }

    /// Returns the label. This is the name if it fits, in the largest possible font size, rotated if necessary. Otherwise, it is the index.
    /// If a rectangle is too small even for the index, the label is above the rectangle. Also returns whether the label is the name.
    fn label(&self) -> (Text, bool) {
        let (x, y) = (self.left + self.width / 2.0, self.top + self.height / 2.0);
        let number = self.record.to_string();
        for (text, is_name) in [(self.name, true), (number.as_str(), false)] {
            for size in LABEL_SIZES {
                let length = (text.chars().count() as f64 * LETTER + 0.5) * size;
                let line = size * 1.15;
                let label = text_at(text, x, y + 0.35 * size, size).set("text-anchor", "middle");
                if length <= self.width && line <= self.height {
                    return (label, is_name);
                }
                if length <= self.height && line <= self.width {
                    let turn = format!("rotate(-90 {} {})", px(x), px(y));
                    return (label.set("transform", turn), is_name);
                }
            }
        }
        let above = text_at(number, x, self.top - 1.5, 6.0).set("text-anchor", "middle");
        (above, false)
    }
}

/// Returns the color of each tensor. Names that differ only in digits have the same color. Colors are assigned in order of appearance.
fn fills(names: &[String]) -> Vec<&'static str> {
    let mut kinds: HashMap<String, usize> = HashMap::new();
    names
        .iter()
        .map(|name| {
            let kind = name.chars().filter(|c| !c.is_ascii_digit()).collect();
            let n_kinds = kinds.len();
            FILLS[*kinds.entry(kind).or_insert(n_kinds) % FILLS.len()]
        })
        .collect()
}

fn line(x1: f64, y1: f64, x2: f64, y2: f64) -> Line {
    Line::new()
        .set("x1", px(x1))
        .set("y1", px(y1))
        .set("x2", px(x2))
        .set("y2", px(y2))
        .set("stroke", "#404040")
        .set("stroke-width", 0.8)
}

fn text_at(text: impl Into<String>, x: f64, y: f64, size: f64) -> Text {
    Text::new(text)
        .set("x", px(x))
        .set("y", px(y))
        .set("font-size", size)
}

/// Rounds to a hundredth of a pixel, so that the output is the same on every machine.
fn px(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// Replaces control characters, which are invalid in XML.
fn printable(name: &str) -> String {
    name.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

fn counted(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// Formats a number of bytes with at most two decimals, in the largest unit that does not exceed the number.
fn bytes_text(bytes: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|&(_, shift)| bytes >> shift > 0) {
        None => format!("{bytes} B"),
        Some((unit, shift)) => {
            let text = format!("{:.2}", bytes as f64 / (1u64 << shift) as f64);
            format!(
                "{} {unit}",
                text.trim_end_matches('0').trim_end_matches('.')
            )
        }
    }
}
