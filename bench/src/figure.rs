//! SVG charts of benchmark results, for web pages and print.

mod draw;
mod layout;
mod palette;
mod scale;
#[cfg(test)]
mod tests;

use std::ops::Range;

use miette::{IntoDiagnostic, Report, miette};
use plotters::{
    coord::{combinators::LogCoord, ranged1d::Ranged, types::RangedCoordf64},
    prelude::*,
};

use draw::{Area, Look, bar, line, mark, point_at, write};
use layout::{Layout, TEXT, width_of};
use palette::{MAX_SERIES, Paint, paint};
use scale::{floor_125, linear_ticks, log_ticks, number};

/// Maximum value that is drawn. It exceeds any measurement, and sums of such values are finite.
const MAX_VALUE: f64 = 1e30;
/// Maximum ratio of the largest value to the lower end of a logarithmic axis, before this lower end is rounded down. Values below the lower
/// end are drawn at the lower end.
const MAX_SPAN: f64 = 1e12;

/// Kind of a [`Figure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Adjacent bars in every group, one for each series.
    Bars,
    /// One bar in every group, which stacks the series.
    Stacked,
    /// A line for each series; the groups are evenly spaced points.
    Lines,
}

/// A chart of several series over several groups.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub title: String,
    /// Description of the groups.
    pub x_label: String,
    /// Description of the values, with their unit.
    pub y_label: String,
    /// Names of the groups, from left to right.
    pub groups: Vec<String>,
    pub series: Vec<Series>,
    pub kind: Kind,
    /// Whether the value axis is logarithmic. Zero is then drawn at its lower end.
    pub log_y: bool,
}

/// The values of one implementation, or of one part of the stacked bars.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub name: String,
    /// One non-negative finite value for each group; `None` if it was not measured.
    pub values: Vec<Option<f64>>,
    /// Indices of the groups whose bar has a mark under it.
    pub marked: Vec<usize>,
}

impl Series {
    pub(crate) fn new(name: impl Into<String>, values: Vec<Option<f64>>) -> Self {
        Self {
            name: name.into(),
            values,
            marked: Vec::new(),
        }
    }
}

impl Figure {
    /// Draws the chart as SVG. Text is at least 12 pixels high. Series differ in lightness as well
    /// as in hue, and lines also in their markers.
    ///
    /// # Errors
    /// Returns an error for a value that is negative, not finite or above 1e30, a series whose number of values differs from the number of
    /// groups, more than 16 series, or a stack on a logarithmic axis.
    pub(crate) fn svg(&self) -> Result<String, Report> {
        self.check()?;
        let layout = Layout::new(self);
        let mut svg = String::new();
        {
            let root = SVGBackend::with_string(&mut svg, layout.size()).into_drawing_area();
            root.fill(&WHITE).into_diagnostic()?;
            self.surroundings(&root, &layout)?;
            self.plot(&root, &layout)?;
            root.present().into_diagnostic()?;
        }
        Ok(svg)
    }

    fn check(&self) -> Result<(), Report> {
        if self.kind == Kind::Stacked && self.log_y {
            return Err(miette!(
                "`{}`: a stacked figure needs a linear axis, because its parts add up",
                self.title
            ));
        }
        if self.series.len() > MAX_SERIES {
            return Err(miette!(
                "`{}` has {} series; the maximum is {MAX_SERIES}",
                self.title,
                self.series.len()
            ));
        }
        for series in &self.series {
            if series.values.len() != self.groups.len() {
                return Err(miette!(
                    "`{}`: the series `{}` has {} values; expected one for each of {} groups",
                    self.title,
                    series.name,
                    series.values.len(),
                    self.groups.len()
                ));
            }
            for (group, value) in self.groups.iter().zip(&series.values) {
                if let Some(value) = value.filter(|v| !(0.0..=MAX_VALUE).contains(v)) {
                    return Err(miette!(
                        "`{}`: the series `{}` has the value {value} at `{group}`; expected a number from 0 to {MAX_VALUE:e}",
                        self.title,
                        series.name
                    ));
                }
            }
        }
        Ok(())
    }

    fn values(&self) -> impl Iterator<Item = f64> {
        self.series
            .iter()
            .flat_map(|s| &s.values)
            .flatten()
            .copied()
    }

    /// Returns the range of the value axis, with room for the label of the largest value.
    fn range(&self) -> Range<f64> {
        let largest = match self.kind {
            Kind::Stacked => (0..self.groups.len())
                .map(|g| self.series.iter().filter_map(|s| s.values[g]).sum())
                .fold(0.0, f64::max),
            Kind::Bars | Kind::Lines => self.values().fold(0.0, f64::max),
        };
        if largest == 0.0 {
            return if self.log_y { 0.1..10.0 } else { 0.0..1.0 };
        }
        if self.log_y {
            let positive = self.values().filter(|v| *v > 0.0);
            let least = positive.fold(f64::INFINITY, f64::min);
            // Start below the smallest value, so that the shortest bar is visible.
            let from = floor_125(least.max(largest / MAX_SPAN) / 1.5);
            let to = largest * 1.2;
            // A label takes about a seventh of the height.
            return from..(to * (to / from).powf(0.15));
        }
        let room = if self.kind == Kind::Bars { 1.17 } else { 1.05 };
        0.0..largest * room
    }

    /// Draws the title, the legend and the axis labels.
    fn surroundings(&self, root: &Area, layout: &Layout) -> Result<(), Report> {
        for (i, line) in layout.title.iter().enumerate() {
            let y = layout.title_top() + i as i32 * layout::TITLE_LINE;
            write(root, line, (layout.width / 2, y), Look::title())?;
        }
        for (i, series) in self.series.iter().enumerate() {
            let (x, y) = layout.legend[i];
            self.key(root, (x, y), &paint(i))?;
            let at = (x + layout::KEY_WIDTH, y);
            write(root, &layout::shown(&series.name), at, Look::legend())?;
        }
        let middle = layout.left + layout.plot_width / 2;
        let at = (middle, layout.height - layout::MARGIN);
        write(root, &layout::shown(&self.x_label), at, Look::above())?;
        let at = (layout::MARGIN, layout.top + layout.plot_height / 2);
        write(root, &layout::shown(&self.y_label), at, Look::axis())
    }

    /// Draws the sample of a series in the legend: a line with a marker, or a small bar. `(x, y)` is the left end of its area.
    fn key(&self, root: &Area, (x, y): (i32, i32), paint: &Paint) -> Result<(), Report> {
        if self.kind == Kind::Lines {
            line(root, vec![(x, y), (x + 24, y)], paint)?;
            mark(root, (x + 12, y), paint)
        } else {
            bar(root, (x + 8, y - 6), (x + 24, y + 6), paint)
        }
    }

    fn plot(&self, root: &Area, layout: &Layout) -> Result<(), Report> {
        let (lower, right) = (layout.lower(), layout.left + layout.plot_width);
        let range = self.range();
        let pixels = (lower, layout.top);
        let (ticks, scale): (_, Box<dyn Fn(f64) -> i32>) = if self.log_y {
            let axis = LogCoord::from(range.clone().log_scale());
            let least = range.start;
            let scale = move |v: f64| axis.map(&v.max(least), pixels);
            (log_ticks(&range), Box::new(scale))
        } else {
            let axis = RangedCoordf64::from(range.clone());
            (
                linear_ticks(&range),
                Box::new(move |v| axis.map(&v, pixels)),
            )
        };
        for tick in ticks {
            let y = scale(tick);
            line(root, vec![(layout.left, y), (right, y)], &Paint::GRID)?;
            write(root, &number(tick), (layout.left - 6, y), Look::tick())?;
        }
        line(
            root,
            vec![(layout.left, lower), (right, lower)],
            &Paint::AXIS,
        )?;
        line(
            root,
            vec![(layout.left, layout.top), (layout.left, lower)],
            &Paint::AXIS,
        )?;
        for (group, name) in self.groups.iter().enumerate() {
            self.group_label(root, layout, group, name)?;
        }
        if self.values().next().is_none() {
            let at = (layout.left + layout.plot_width / 2, layout.top + 40);
            return write(root, "no values", at, Look::above());
        }
        match self.kind {
            Kind::Bars => self.bars(root, layout, scale),
            Kind::Stacked => self.stacks(root, layout, scale),
            Kind::Lines => self.lines(root, layout, scale),
        }
    }

    fn group_label(
        &self,
        root: &Area,
        layout: &Layout,
        group: usize,
        name: &str,
    ) -> Result<(), Report> {
        if !group.is_multiple_of(layout.label_step) {
            return Ok(());
        }
        let x = layout.middle_of(group);
        let y = layout.lower();
        let tick = vec![(x, y), (x, y + 4)];
        line(root, tick, &Paint::AXIS)?;
        let look = if layout.turned {
            Look::turned()
        } else {
            Look::below()
        };
        write(root, &layout::shown(name), (x, y + 8), look)
    }

    fn bars(&self, root: &Area, layout: &Layout, y_of: impl Fn(f64) -> i32) -> Result<(), Report> {
        let lower = layout.lower();
        let (from, to) = layout.bar_of(0, 0);
        let widest = self.values().map(|v| width_of(&number(v), TEXT)).max();
        // Label all bars or none. If only some bars had labels, they would seem more important.
        let look = || match to - from {
            bar if bar >= widest.unwrap_or(0) => Some(Look::above()),
            bar if bar >= layout::TURNED_WIDTH => Some(Look::standing()),
            _ => None,
        };
        for group in 0..self.groups.len() {
            for (i, series) in self.series.iter().enumerate() {
                let Some(value) = series.values[group] else {
                    continue;
                };
                let (from, to) = layout.bar_of(group, i);
                let y = y_of(value);
                bar(root, (from, y), (to, lower), &paint(i))?;
                if series.marked.contains(&group) {
                    point_at(root, ((from + to) / 2, lower))?;
                }
                if let Some(look) = look() {
                    write(root, &number(value), ((from + to) / 2, y - 4), look)?;
                }
            }
        }
        Ok(())
    }

    fn stacks(
        &self,
        root: &Area,
        layout: &Layout,
        y_of: impl Fn(f64) -> i32,
    ) -> Result<(), Report> {
        for group in 0..self.groups.len() {
            let (from, to) = layout.bar_of(group, 0);
            let mut sum = 0.0;
            for (i, series) in self.series.iter().enumerate() {
                let Some(value) = series.values[group] else {
                    continue;
                };
                let (lower, upper) = (y_of(sum), y_of(sum + value));
                sum += value;
                let paint = paint(i);
                bar(root, (from, upper), (to, lower), &paint)?;
                let text = number(value);
                if lower - upper >= layout::TURNED_WIDTH && to - from >= width_of(&text, TEXT) {
                    let look = Look::inside(paint.ink());
                    write(root, &text, ((from + to) / 2, (lower + upper) / 2), look)?;
                }
            }
        }
        Ok(())
    }

    fn lines(&self, root: &Area, layout: &Layout, y_of: impl Fn(f64) -> i32) -> Result<(), Report> {
        for (i, series) in self.series.iter().enumerate() {
            let paint = paint(i);
            let point = |(group, value): (usize, &Option<f64>)| {
                value.map(|v| (layout.middle_of(group), y_of(v)))
            };
            let points: Vec<Option<(i32, i32)>> =
                series.values.iter().enumerate().map(point).collect();
            // A missing value leaves a gap.
            for run in points.split(Option::is_none) {
                let run: Vec<(i32, i32)> = run.iter().flatten().copied().collect();
                if run.len() > 1 {
                    line(root, run, &paint)?;
                }
            }
            // With many points, each line has markers at only some of its points. Different lines have them at different points.
            let step = points.len().div_ceil(30).max(1);
            for (at, point) in points.iter().enumerate() {
                if let Some(point) = point.filter(|_| (at + i).is_multiple_of(step)) {
                    mark(root, point, &paint)?;
                }
            }
        }
        Ok(())
    }
}
