//! Colors that can be distinguished by color-blind readers and in grayscale.

use plotters::style::{BLACK, RGBColor, WHITE};

/// Maximum number of series in a figure: each color can be used once as a fill and once as an outline.
pub(super) const MAX_SERIES: usize = 2 * COLORS.len();

/// The hues of Okabe and Ito ("Color universal design", 2008). Some are darker or lighter than the originals, so that no two have the same
/// lightness. The colors are in order of use; the first ones differ the most from each other.
pub(super) const COLORS: [RGBColor; 8] = [
    RGBColor(0x00, 0x4c, 0x78), // blue
    RGBColor(0xe6, 0x9f, 0x00), // orange
    RGBColor(0xf7, 0xee, 0x8a), // yellow
    RGBColor(0xce, 0x5b, 0x00), // vermillion
    RGBColor(0x10, 0x10, 0x10), // black
    RGBColor(0x8f, 0xcd, 0xf2), // sky blue
    RGBColor(0x00, 0x74, 0x54), // bluish green
    RGBColor(0xcf, 0x7d, 0xab), // reddish purple
];

/// Corners of the markers of lines, in pixels relative to the point.
const MARKERS: [&[(i32, i32)]; 4] = [
    &[(-4, -4), (4, -4), (4, 4), (-4, 4)],
    &[(0, -5), (5, 4), (-5, 4)],
    &[(0, -6), (6, 0), (0, 6), (-6, 0)],
    &[(-5, -4), (5, -4), (0, 5)],
];

/// Style of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Paint {
    pub color: RGBColor,
    /// Whether bars and markers are outlines.
    pub hollow: bool,
    /// Width of lines.
    pub stroke: u32,
    pub marker: &'static [(i32, i32)],
}

impl Paint {
    pub const AXIS: Paint = Paint {
        color: BLACK,
        hollow: false,
        stroke: 1,
        marker: MARKERS[0],
    };
    pub const GRID: Paint = Paint {
        color: RGBColor(205, 205, 205),
        ..Self::AXIS
    };

    /// Returns whether a line in this style is hard to see on white.
    pub fn is_pale(&self) -> bool {
        self.stroke > 1 && lightness(self.color) > 75.0
    }

    /// Returns the color of text on a bar.
    pub fn ink(&self) -> RGBColor {
        if self.hollow || lightness(self.color) > 58.0 {
            BLACK
        } else {
            WHITE
        }
    }
}

/// Returns the style of series `nth`; styles repeat from [`MAX_SERIES`] on.
pub(super) fn paint(nth: usize) -> Paint {
    Paint {
        color: COLORS[nth % COLORS.len()],
        hollow: nth / COLORS.len() % 2 == 1,
        stroke: 2,
        marker: MARKERS[nth % MARKERS.len()],
    }
}

/// Returns CIE L*, from 0 (black) to 100 (white).
pub(super) fn lightness(RGBColor(r, g, b): RGBColor) -> f64 {
    let linear = |c: u8| {
        let c = f64::from(c) / 255.0;
        if c <= 0.04045 {
            c / 12.92
        } else {
            ((c + 0.055) / 1.055).powf(2.4)
        }
    };
    let y = 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    if y > 0.008_856 {
        116.0 * y.cbrt() - 16.0
    } else {
        903.3 * y
    }
}
