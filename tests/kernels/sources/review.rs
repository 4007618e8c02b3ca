//! Formats the snapshot that shows the chosen renderings of a template or a partial.

use std::fmt::Write;

use similar::TextDiff;

use super::cover::Rendering;

/// Number of unchanged lines shown before and after a difference.
const CONTEXT: usize = 2;

/// Returns the text of a snapshot. It shows the first rendering in full. Each further rendering is shown as its differences from the most
/// similar previous rendering, or in full if the full text is shorter.
pub fn review(renderings: &[&Rendering]) -> String {
    let [first, others @ ..] = renderings else {
        return String::new();
    };
    let mut text = format!("=== {}\n{}\n", first.symbol, first.text.trim_end());
    let mut others = others.to_vec();
    others.sort_by_key(|rendering| (rendering.is_of_model, rendering.symbol));
    let mut shown = vec![*first];
    for rendering in others {
        let (base, diff) = nearest(rendering, &shown);
        let mut diff = diff.unified_diff();
        diff.context_radius(CONTEXT).missing_newline_hint(false);
        let diff = diff.to_string();
        let (symbol, base) = (rendering.symbol, base.symbol);
        let _ = match diff.len() < rendering.text.len() {
            true => writeln!(
                text,
                "\n=== {symbol}, compared with {base}\n{}",
                diff.trim_end()
            ),
            false => writeln!(text, "\n=== {symbol}\n{}", rendering.text.trim_end()),
        };
        shown.push(rendering);
    }
    text
}

/// Returns the rendering in `shown` that is most similar to `rendering`, and the differences between them. Ties go to the first rendering.
fn nearest<'a>(
    rendering: &'a Rendering,
    shown: &[&'a Rendering],
) -> (&'a Rendering, TextDiff<'a, 'a, 'a, str>) {
    let diffs = shown
        .iter()
        .map(|base| (*base, TextDiff::from_lines(&base.text, &rendering.text)));
    diffs
        .reduce(|best, next| match next.1.ratio() > best.1.ratio() {
            true => next,
            false => best,
        })
        .expect("one is shown in full")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_shown_in_full_and_others_as_differences_if_these_are_shorter() {
        let rendering =
            |symbol, text: &str| Rendering::new("t", text.replace(' ', "\n"), symbol, false);
        let all = [
            rendering("first", "a b c "),
            rendering(
                "third",
                "one two three four five six seven eight nine other ",
            ),
            rendering(
                "second",
                "one two three four five six seven eight nine ten ",
            ),
        ];
        insta::assert_snapshot!(review(&all.iter().collect::<Vec<_>>()), @r"
        === first
        a
        b
        c

        === second
        one
        two
        three
        four
        five
        six
        seven
        eight
        nine
        ten

        === third, compared with second
        @@ -8,3 +8,3 @@
         eight
         nine
        -ten
        +other
        ");
    }
}
