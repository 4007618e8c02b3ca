//! Charts of what the benchmarks measured, as SVG for a page or print.

mod layout;
mod palette;
#[cfg(test)]
mod tests;

use std::ops::Range;

use miette::{IntoDiagnostic, Report, miette};
use plotters::{
    coord::{
        Shift,
        ranged1d::{AsRangedCoord, Ranged, ValueFormatter},
    },
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use layout::{Layout, TEXT, TITLE, width_of};
use palette::{MOST_SERIES, Paint, paint};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// What the values of a [`Figure`] are drawn as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli) enum Kind {
    /// In every group, a bar for each series, side by side.
    Bars,
    /// In every group one bar, which is the sum of the series.
    Stacked,
    /// A line for each series over the groups, which are evenly spaced points.
    Lines,
}

/// A chart: values of several series in several groups.
#[derive(Clone, Debug)]
pub(in crate::cli) struct Figure {
    pub title: String,
    /// What the groups are.
    pub x_label: String,
    /// What the values are, with their unit.
    pub y_label: String,
    /// From left to right.
    pub groups: Vec<String>,
    pub series: Vec<Series>,
    pub kind: Kind,
    /// Whether the values' axis is logarithmic. A zero is then drawn on its lower end.
    pub log_y: bool,
}

/// The values of one contender, or of one part of a stack.
#[derive(Clone, Debug)]
pub(in crate::cli) struct Series {
    pub name: String,
    /// One for each group, finite and from 0 on; `None` where nothing was measured.
    pub values: Vec<Option<f64>>,
}

impl Figure {
    /// The chart as the text of an SVG file. Text is at least 12 pixels high; series differ in
    /// lightness as well as in hue, and lines in their markers too.
    ///
    /// # Errors
    /// A value that is negative or not finite, a series that has not one value a group, more than
    /// 16 series, or a stack on a logarithmic axis; the message names the series and the group.
    pub(in crate::cli) fn svg(&self) -> Result<String, Report> {
        self.check()?;
        let layout = Layout::new(self);
        let mut svg = String::new();
        {
            let root = SVGBackend::with_string(&mut svg, layout.size()).into_drawing_area();
            root.fill(&WHITE).into_diagnostic()?;
            self.surroundings(&root, &layout)?;
            let range = self.range();
            if self.log_y {
                let ticks = log_ticks(&range);
                let axis = range.log_scale().with_key_points(ticks);
                self.plot(&root, &layout, axis)?;
            } else {
                self.plot(&root, &layout, range)?;
            }
            root.present().into_diagnostic()?;
        }
        Ok(svg)
    }

    fn check(&self) -> Result<(), Report> {
        if self.kind == Kind::Stacked && self.log_y {
            return Err(miette!(
                "`{}`: a stack has a linear axis, as its parts add up",
                self.title
            ));
        }
        if self.series.len() > MOST_SERIES {
            return Err(miette!(
                "`{}` has {} series; a figure tells at most {MOST_SERIES} apart",
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
                if let Some(value) = value.filter(|v| !v.is_finite() || *v < 0.0) {
                    return Err(miette!(
                        "`{}`: the series `{}` has the value {value} at `{group}`; expected a finite number, at least 0",
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

    /// From the axis's lower end to above the largest value, with room for its label.
    fn range(&self) -> Range<f64> {
        let largest = match self.kind {
            Kind::Stacked => (0..self.groups.len())
                .map(|g| self.series.iter().filter_map(|s| s.values[g]).sum())
                .fold(0.0, f64::max),
            Kind::Bars | Kind::Lines => self.values().fold(0.0, f64::max),
        };
        if self.log_y {
            let positive = self.values().filter(|v| *v > 0.0);
            let least = positive.fold(f64::INFINITY, f64::min);
            if least.is_infinite() {
                return 0.1..10.0;
            }
            // The shortest bar has a length too, and the range is never empty.
            let (from, to) = (floor_125(least / 1.5), largest * 1.2);
            // A label takes about a seventh of the height.
            return from..(to * (to / from).powf(0.15));
        }
        if largest == 0.0 {
            return 0.0..1.0;
        }
        let room = if self.kind == Kind::Bars { 1.17 } else { 1.05 };
        // Sums of values close to the largest number there is are not finite.
        0.0..(largest * room).min(f64::MAX / 4.0)
    }

    /// Title, legend, names of the axes.
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
        write(root, &layout::shown(&self.x_label), at, Look::below())?;
        let at = (layout::MARGIN, layout.top + layout.plot_height / 2);
        write(root, &layout::shown(&self.y_label), at, Look::axis())
    }

    /// The sample of a series in the legend, left of its name.
    fn key(&self, root: &Area, (x, y): (i32, i32), paint: &Paint) -> Result<(), Report> {
        if self.kind == Kind::Lines {
            line(root, vec![(x, y), (x + 24, y)], paint)?;
            mark(root, (x + 12, y), paint)
        } else {
            bar(root, (x + 8, y - 6), (x + 24, y + 6), paint)
        }
    }

    fn plot<Y>(&self, root: &Area, layout: &Layout, axis: Y) -> Result<(), Report>
    where
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        let (right, below) = (
            layout.width - layout.left - layout.plot_width,
            layout.below(),
        );
        let mut chart = ChartBuilder::on(root)
            .margin_top(layout.top)
            .margin_right(right)
            .margin_bottom(below)
            .margin_left(layout.left - layout::TICK_WIDTH)
            .set_label_area_size(LabelAreaPosition::Left, layout::TICK_WIDTH)
            .build_cartesian_2d(0.0..self.groups.len().max(1) as f64, axis)
            .into_diagnostic()?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .disable_x_axis()
            .y_labels(9)
            .y_label_formatter(&|v| number(*v))
            .y_label_style(Look::legend().style(Pos::new(HPos::Right, VPos::Center)))
            .bold_line_style(RGBColor(200, 200, 200))
            .light_line_style(TRANSPARENT)
            .axis_style(BLACK)
            .draw()
            .into_diagnostic()?;
        let lower = layout.top + layout.plot_height;
        let y_of = |value: f64| {
            if self.log_y && value <= 0.0 {
                return lower;
            }
            let (_, y) = chart.backend_coord(&(0.0, value));
            y.clamp(layout.top, lower)
        };
        line(
            root,
            vec![
                (layout.left, lower),
                (layout.left + layout.plot_width, lower),
            ],
            &Paint::AXIS,
        )?;
        for (group, name) in self.groups.iter().enumerate() {
            self.group_label(root, layout, group, name)?;
        }
        if self.values().next().is_none() {
            let at = (layout.left + layout.plot_width / 2, layout.top + 40);
            return write(root, "no values", at, Look::below());
        }
        match self.kind {
            Kind::Bars => self.bars(root, layout, y_of),
            Kind::Stacked => self.stacks(root, layout, y_of),
            Kind::Lines => self.lines(root, layout, y_of),
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
        let y = layout.top + layout.plot_height;
        let tick = vec![(x, y), (x, y + 4)];
        line(root, tick, &Paint::AXIS)?;
        let look = if layout.turned {
            Look::turned()
        } else {
            Look::under()
        };
        write(root, &layout::shown(name), (x, y + 8), look)
    }

    fn bars(&self, root: &Area, layout: &Layout, y_of: impl Fn(f64) -> i32) -> Result<(), Report> {
        let lower = layout.top + layout.plot_height;
        for group in 0..self.groups.len() {
            for (i, series) in self.series.iter().enumerate() {
                let Some(value) = series.values[group] else {
                    continue;
                };
                let (from, to) = layout.bar_of(group, i);
                let y = y_of(value);
                bar(root, (from, y), (to, lower), &paint(i))?;
                let text = number(value);
                let at = ((from + to) / 2, y - 4);
                if to - from >= width_of(&text, TEXT) {
                    write(root, &text, at, Look::below())?;
                } else if to - from >= layout::TURNED_WIDTH {
                    write(root, &text, at, Look::standing())?;
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
            // A gap where nothing was measured.
            for run in points.split(Option::is_none) {
                let run: Vec<(i32, i32)> = run.iter().flatten().copied().collect();
                if run.len() > 1 {
                    line(root, run, &paint)?;
                }
            }
            // Markers of different lines lie at different points where there are many.
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

/// How a piece of text looks and where it lies from its point.
struct Look {
    size: i32,
    bold: bool,
    turn: FontTransform,
    anchor: Pos,
    colour: RGBColor,
}

impl Look {
    fn at(h: HPos, v: VPos) -> Self {
        Self {
            size: TEXT,
            bold: false,
            turn: FontTransform::None,
            anchor: Pos::new(h, v),
            colour: BLACK,
        }
    }

    fn title() -> Self {
        Self {
            size: TITLE,
            bold: true,
            ..Self::at(HPos::Center, VPos::Top)
        }
    }

    fn legend() -> Self {
        Self::at(HPos::Left, VPos::Center)
    }

    /// Hanging from its point.
    fn under() -> Self {
        Self::at(HPos::Center, VPos::Top)
    }

    /// Standing on its point.
    fn below() -> Self {
        Self::at(HPos::Center, VPos::Bottom)
    }

    /// Reading upwards, its middle at the point.
    fn axis() -> Self {
        Self {
            turn: FontTransform::Rotate270,
            ..Self::at(HPos::Center, VPos::Top)
        }
    }

    /// Reading upwards, its end at the point.
    fn turned() -> Self {
        Self {
            turn: FontTransform::Rotate270,
            ..Self::at(HPos::Right, VPos::Center)
        }
    }

    /// Reading upwards, its start at the point.
    fn standing() -> Self {
        Self {
            turn: FontTransform::Rotate270,
            ..Self::at(HPos::Left, VPos::Center)
        }
    }

    fn inside(colour: RGBColor) -> Self {
        Self {
            colour,
            ..Self::at(HPos::Center, VPos::Center)
        }
    }

    fn style(&self, anchor: Pos) -> TextStyle<'_> {
        // The SVG back end divides sizes by this.
        let size = f64::from(self.size) * 1.24;
        let weight = if self.bold {
            FontStyle::Bold
        } else {
            FontStyle::Normal
        };
        let font = FontDesc::new(FontFamily::SansSerif, size, weight);
        TextStyle::from(font.transform(self.turn.clone()))
            .color(&self.colour)
            .pos(anchor)
    }
}

fn write(root: &Area, text: &str, at: (i32, i32), look: Look) -> Result<(), Report> {
    let style = look.style(look.anchor);
    root.draw(&Text::new(text.to_owned(), at, style))
        .into_diagnostic()
}

fn line(root: &Area, points: Vec<(i32, i32)>, paint: &Paint) -> Result<(), Report> {
    let style = paint.colour.stroke_width(2);
    root.draw(&PathElement::new(points, style))
        .into_diagnostic()
}

/// A bar between two corners, however they lie; with an edge, so that light ones show on paper.
fn bar(
    root: &Area,
    (x0, y0): (i32, i32),
    (x1, y1): (i32, i32),
    paint: &Paint,
) -> Result<(), Report> {
    let corners = [(x0.min(x1), y0.min(y1)), (x0.max(x1), y0.max(y1))];
    let fill = if paint.hollow { WHITE } else { paint.colour };
    root.draw(&Rectangle::new(corners, fill.filled()))
        .into_diagnostic()?;
    let edge = if paint.hollow { paint.colour } else { BLACK };
    let [(x0, y0), (x1, y1)] = corners;
    let outline = vec![(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)];
    let style = edge.stroke_width(if paint.hollow { 2 } else { 1 });
    root.draw(&PathElement::new(outline, style))
        .into_diagnostic()
}

fn mark(root: &Area, (x, y): (i32, i32), paint: &Paint) -> Result<(), Report> {
    let inside = if paint.hollow { WHITE } else { paint.colour };
    let points: Vec<(i32, i32)> = paint
        .marker
        .iter()
        .map(|(dx, dy)| (x + dx, y + dy))
        .collect();
    root.draw(&Polygon::new(points.clone(), inside.filled()))
        .into_diagnostic()?;
    let outline = points
        .iter()
        .chain(points.first())
        .copied()
        .collect::<Vec<_>>();
    root.draw(&PathElement::new(outline, paint.colour.stroke_width(1)))
        .into_diagnostic()
}

/// Powers of ten in a range, or 1, 2 and 5 times these where that are few.
fn log_ticks(range: &Range<f64>) -> Vec<f64> {
    let decades = range.start.log10().floor() as i32..=range.end.log10().ceil() as i32;
    let of = |factors: &'static [f64]| -> Vec<f64> {
        let all = decades
            .clone()
            .flat_map(|d| factors.iter().map(move |f| f * 10f64.powi(d)));
        all.filter(|v| range.contains(v)).collect()
    };
    let powers = of(&[1.0]);
    if powers.len() > 3 {
        powers
    } else {
        of(&[1.0, 2.0, 5.0])
    }
}

/// The largest of 1, 2 and 5 times a power of ten that is not above a positive value.
fn floor_125(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    let fits = [5.0, 2.0, 1.0].into_iter().find(|f| f * power <= value);
    fits.unwrap_or(1.0) * power
}

/// Three digits, more only where a value is large: `0.0123`, `1.23`, `45.6`, `789`, `12.3M`.
fn number(value: f64) -> String {
    let plain = |v: f64| {
        let digits = match v.abs() {
            0.0 => return "0".to_owned(),
            v if v >= 99.95 => 0,
            v if v >= 9.995 => 1,
            v if v >= 0.9995 => 2,
            v if v >= 0.0995 => 3,
            v if v >= 1e-4 => 4,
            _ => return format!("{v:.1e}"),
        };
        let text = format!("{v:.digits$}");
        match text.contains('.') {
            true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
            false => text,
        }
    };
    match value.abs() {
        v if v >= 1e15 => format!("{value:.2e}"),
        v if v >= 1e12 => plain(value / 1e12) + "T",
        v if v >= 1e9 => plain(value / 1e9) + "G",
        v if v >= 1e6 => plain(value / 1e6) + "M",
        v if v >= 1e4 => plain(value / 1e3) + "k",
        _ => plain(value),
    }
}
