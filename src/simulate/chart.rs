//! SVG charts that plot results of schedulers against the arrival rate.

use svg::Document;
use svg::node::element::{Circle, Group, Line as Stroke, Polyline, Rectangle, Text, Title};

const WIDTH: f64 = 520.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 76.0;
const TOP: f64 = 48.0;
const GAP: f64 = 64.0;
const KEY_LINE: f64 = 20.0;
const KEY_COLUMN: f64 = 130.0;

/// Colors that differ in lightness as well as in hue.
const INKS: [&str; 13] = [
    "#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#7f3c8d",
    "#7a7a7a", "#b22222", "#2f5d00", "#00526b", "#a05195",
];
const DASHES: [&str; 3] = ["none", "7 4", "2 4"];

/// A named series of values, one per arrival rate.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    pub name: String,
    /// One value per arrival rate; `None` if there is no value or if the value is unbounded.
    pub values: Vec<Option<f64>>,
}

/// One panel of a chart, with its own value axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Panel {
    /// Description of the values, with their unit.
    pub title: String,
    pub lines: Vec<Line>,
    /// Whether the value axis is logarithmic. A logarithmic axis omits values that are not
    /// positive.
    pub log: bool,
}

/// Draws panels side by side. The horizontal axis of each panel is logarithmic and shows the arrival rates `loads`, in requests per second.
/// Lines of the same name have the same style in all panels.
pub fn chart(title: &str, loads: &[f64], panels: &[Panel]) -> String {
    let names: Vec<&str> = panels
        .first()
        .map(|panel| panel.lines.iter().map(|line| line.name.as_str()).collect())
        .unwrap_or_default();
    let width = LEFT + panels.len().max(1) as f64 * (WIDTH + GAP);
    let n_columns = ((width / KEY_COLUMN) as usize).max(1);
    let n_lines = names.len().div_ceil(n_columns);
    let height = TOP + HEIGHT + 64.0 + n_lines as f64 * KEY_LINE;
    let mut body = Group::new();
    for (at, panel) in panels.iter().enumerate() {
        let left = LEFT + at as f64 * (WIDTH + GAP);
        body = body.add(draw(panel, loads, left));
    }
    for (i, name) in names.iter().enumerate() {
        let x = 16.0 + (i % n_columns) as f64 * KEY_COLUMN;
        let y = TOP + HEIGHT + 64.0 + (i / n_columns) as f64 * KEY_LINE;
        body = body
            .add(path(&[(x, y - 4.0), (x + 24.0, y - 4.0)], i))
            .add(dot(x + 12.0, y - 4.0, i))
            .add(text(name, x + 30.0, y, "start"));
    }
    Document::new()
        .set("viewBox", (0, 0, width as u64, height as u64))
        .set("width", width)
        .set("height", height)
        .set("font-family", "Helvetica, Arial, 'DejaVu Sans', sans-serif")
        .set("font-size", 12)
        .add(Title::new(title))
        .add(
            Rectangle::new()
                .set("width", "100%")
                .set("height", "100%")
                .set("fill", "white"),
        )
        .add(text(title, width / 2.0, 20.0, "middle").set("font-weight", "bold"))
        .add(body)
        .to_string()
}

fn draw(panel: &Panel, loads: &[f64], left: f64) -> Group {
    let is_shown = |v: &f64| v.is_finite() && (!panel.log || *v > 0.0) && *v >= 0.0;
    let values = || {
        let all = panel.lines.iter().flat_map(|line| &line.values);
        all.flatten().copied().filter(is_shown)
    };
    let most = values().fold(0.0, f64::max).max(f64::MIN_POSITIVE) * 1.05;
    let least = match panel.log {
        true => values().fold(most, f64::min) / 1.1,
        false => 0.0,
    };
    let bottom = TOP + HEIGHT;
    let y_of = |v: f64| {
        let share = match panel.log {
            true => (v / least).ln() / (most / least).ln().max(f64::MIN_POSITIVE),
            false => v / most,
        };
        bottom - share.clamp(0.0, 1.0) * HEIGHT
    };
    let (first, last) = (
        loads.iter().copied().fold(f64::INFINITY, f64::min),
        loads.iter().copied().fold(0.0, f64::max),
    );
    let x_of = |load: f64| match last > first {
        true => left + (load / first).ln() / (last / first).ln() * WIDTH,
        false => left + WIDTH / 2.0,
    };
    let mut group = Group::new().add(text(&panel.title, left, TOP - 10.0, "start"));
    for tick in ticks(least, most, panel.log) {
        let y = y_of(tick);
        group = group
            .add(stroke((left, y), (left + WIDTH, y), "#dddddd"))
            .add(text(&number(tick), left - 6.0, y + 4.0, "end"));
    }
    for tick in ticks(first, last, true) {
        let x = x_of(tick);
        group = group
            .add(stroke((x, bottom), (x, bottom + 4.0), "#000000"))
            .add(text(&number(tick), x, bottom + 18.0, "middle"));
    }
    group = group
        .add(stroke((left, bottom), (left + WIDTH, bottom), "#000000"))
        .add(stroke((left, TOP), (left, bottom), "#000000"))
        .add(text(
            "requests a second that arrive",
            left + WIDTH / 2.0,
            bottom + 36.0,
            "middle",
        ));
    for (i, line) in panel.lines.iter().enumerate() {
        let points: Vec<Option<(f64, f64)>> = loads
            .iter()
            .zip(&line.values)
            .map(|(&load, value)| Some((x_of(load), y_of(value.filter(is_shown)?))))
            .collect();
        // A missing value interrupts the line.
        for run in points.split(Option::is_none) {
            let run: Vec<(f64, f64)> = run.iter().flatten().copied().collect();
            group = group.add(path(&run, i));
            for (x, y) in run {
                group = group.add(dot(x, y, i));
            }
        }
    }
    group
}

/// Returns up to about a dozen round values for the ticks of an axis.
fn ticks(least: f64, most: f64, log: bool) -> Vec<f64> {
    let round = |step: f64| {
        let unit = 10_f64.powf(step.log10().floor());
        let digits = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * unit);
        digits
            .into_iter()
            .find(|&s| s >= step)
            .unwrap_or(10.0 * unit)
    };
    if !log || most / least.max(f64::MIN_POSITIVE) < 3.0 {
        let step = round((most - least).max(most * 1e-6) / 8.0);
        let first = (least / step).ceil() as i64;
        return (first..first + 12)
            .map(|i| i as f64 * step)
            .take_while(|&v| v <= most)
            .collect();
    }
    let decades = (least.log10().floor() as i32)..=(most.log10().ceil() as i32);
    let digits: &[f64] = match (most / least).log10() > 4.0 {
        true => &[1.0],
        false => &[1.0, 2.0, 5.0],
    };
    decades
        .flat_map(|e| digits.iter().map(move |d| d * 10_f64.powi(e)))
        .filter(|v| (least..=most).contains(v))
        .collect()
}

fn number(value: f64) -> String {
    let text = match value {
        v if v >= 100.0 || v == v.round() => format!("{v:.0}"),
        v if v >= 1.0 => format!("{v:.1}"),
        v => format!("{v:.3}"),
    };
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

fn text(words: &str, x: f64, y: f64, anchor: &str) -> Text {
    Text::new(words)
        .set("x", tenth(x))
        .set("y", tenth(y))
        .set("text-anchor", anchor)
}

fn stroke(from: (f64, f64), to: (f64, f64), ink: &str) -> Stroke {
    Stroke::new()
        .set("x1", tenth(from.0))
        .set("y1", tenth(from.1))
        .set("x2", tenth(to.0))
        .set("y2", tenth(to.1))
        .set("stroke", ink)
}

fn path(points: &[(f64, f64)], line: usize) -> Polyline {
    let points = points
        .iter()
        .map(|&(x, y)| format!("{},{}", tenth(x), tenth(y)));
    Polyline::new()
        .set("points", points.collect::<Vec<_>>().join(" "))
        .set("fill", "none")
        .set("stroke", INKS[line % INKS.len()])
        .set("stroke-width", 2)
        .set("stroke-dasharray", DASHES[line / 5 % DASHES.len()])
}

fn dot(x: f64, y: f64, line: usize) -> Circle {
    Circle::new()
        .set("cx", tenth(x))
        .set("cy", tenth(y))
        .set("r", 3)
        .set("fill", INKS[line % INKS.len()])
}

/// Rounds a coordinate to a tenth of a unit. This makes the chart independent of small floating-point differences between machines.
fn tenth(v: f64) -> f64 {
    (v * 10.0).round() / 10.0
}
