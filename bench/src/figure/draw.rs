//! Drawing of text, lines, bars and markers.

use miette::{IntoDiagnostic, Report};
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{
    layout::{TEXT, TITLE},
    palette::Paint,
};

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Style of a text, and its position relative to its anchor point.
pub(super) struct Look {
    size: i32,
    bold: bool,
    turn: FontTransform,
    anchor: Pos,
    color: RGBColor,
}

impl Look {
    fn at(h: HPos, v: VPos) -> Self {
        Self {
            size: TEXT,
            bold: false,
            turn: FontTransform::None,
            anchor: Pos::new(h, v),
            color: BLACK,
        }
    }

    pub fn title() -> Self {
        Self {
            size: TITLE,
            bold: true,
            ..Self::at(HPos::Center, VPos::Top)
        }
    }

    pub fn legend() -> Self {
        Self::at(HPos::Left, VPos::Center)
    }

    /// Text that ends at the anchor point.
    pub fn tick() -> Self {
        Self::at(HPos::Right, VPos::Center)
    }

    /// Text below the anchor point.
    pub fn below() -> Self {
        Self::at(HPos::Center, VPos::Top)
    }

    /// Text above the anchor point.
    pub fn above() -> Self {
        Self::at(HPos::Center, VPos::Bottom)
    }

    /// Vertical text centered at the anchor point.
    pub fn axis() -> Self {
        Self {
            turn: FontTransform::Rotate270,
            ..Self::at(HPos::Center, VPos::Top)
        }
    }

    /// Vertical text that ends at the anchor point.
    pub fn turned() -> Self {
        Self {
            turn: FontTransform::Rotate270,
            ..Self::at(HPos::Right, VPos::Center)
        }
    }

    /// Vertical text that starts at the anchor point.
    pub fn standing() -> Self {
        Self {
            turn: FontTransform::Rotate270,
            ..Self::at(HPos::Left, VPos::Center)
        }
    }

    pub fn inside(color: RGBColor) -> Self {
        Self {
            color,
            ..Self::at(HPos::Center, VPos::Center)
        }
    }

    fn style(&self) -> TextStyle<'_> {
        // Multiply by 1.24, because the SVG back end divides sizes by it.
        let size = f64::from(self.size) * 1.24;
        let weight = if self.bold {
            FontStyle::Bold
        } else {
            FontStyle::Normal
        };
        let font = FontDesc::new(FontFamily::SansSerif, size, weight);
        TextStyle::from(font.transform(self.turn.clone()))
            .color(&self.color)
            .pos(self.anchor)
    }
}

pub(super) fn write(root: &Area, text: &str, at: (i32, i32), look: Look) -> Result<(), Report> {
    let style = look.style();
    root.draw(&Text::new(text.to_owned(), at, style))
        .into_diagnostic()
}

pub(super) fn line(root: &Area, points: Vec<(i32, i32)>, paint: &Paint) -> Result<(), Report> {
    if paint.is_pale() {
        let style = BLACK.stroke_width(paint.stroke + 2);
        root.draw(&PathElement::new(points.clone(), style))
            .into_diagnostic()?;
    }
    let style = paint.color.stroke_width(paint.stroke);
    root.draw(&PathElement::new(points, style))
        .into_diagnostic()
}

/// Draws a bar between two opposite corners, with an outline so that light bars are visible on
/// paper.
pub(super) fn bar(
    root: &Area,
    (x0, y0): (i32, i32),
    (x1, y1): (i32, i32),
    paint: &Paint,
) -> Result<(), Report> {
    let corners = [(x0.min(x1), y0.min(y1)), (x0.max(x1), y0.max(y1))];
    let fill = if paint.hollow { WHITE } else { paint.color };
    root.draw(&Rectangle::new(corners, fill.filled()))
        .into_diagnostic()?;
    let edge = if paint.hollow { paint.color } else { BLACK };
    let [(x0, y0), (x1, y1)] = corners;
    let outline = vec![(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)];
    let style = edge.stroke_width(if paint.hollow { 2 } else { 1 });
    root.draw(&PathElement::new(outline, style))
        .into_diagnostic()
}

pub(super) fn mark(root: &Area, (x, y): (i32, i32), paint: &Paint) -> Result<(), Report> {
    let inside = if paint.hollow { WHITE } else { paint.color };
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
    root.draw(&PathElement::new(outline, BLACK.stroke_width(1)))
        .into_diagnostic()
}

/// Draws a small triangle under a point of the lower axis, above the labels.
pub(super) fn point_at(root: &Area, (x, y): (i32, i32)) -> Result<(), Report> {
    let corners = vec![(x, y + 2), (x - 3, y + 7), (x + 3, y + 7)];
    root.draw(&Polygon::new(corners, BLACK.filled()))
        .into_diagnostic()
}
