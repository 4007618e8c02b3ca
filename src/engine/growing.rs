//! A text as its tokens come, one after another: what of it is certain, and where it stops.

/// A text in the making.
#[derive(Clone, Debug, Default)]
pub struct GrowingText {
    pub tokens: Vec<u32>,
    pub text: String,
    /// Bytes that were shown.
    pub shown: usize,
    /// Whether a stop was found.
    pub stopped: bool,
}

impl GrowingText {
    /// The text up to where a stop begins, if one is there.
    pub fn cut(&mut self, stops: &[String]) -> bool {
        let found = stops
            .iter()
            .filter_map(|stop| self.text.find(stop.as_str()));
        if let Some(at) = found.min() {
            self.text.truncate(at);
            self.stopped = true;
        }
        self.stopped
    }

    /// What may be shown now: nothing that later tokens may change, and no beginning of a stop.
    pub fn ready(&self, stops: &[String]) -> usize {
        let whole = self.text.trim_end_matches('\u{fffd}').len();
        let begun = |stop: &String| {
            let ends = (1..stop.len()).rev().filter(|&n| stop.is_char_boundary(n));
            let mut ends = ends.filter(|&n| self.text.ends_with(&stop[..n]));
            ends.next().unwrap_or(0)
        };
        let held = stops.iter().map(begun).max().unwrap_or(0);
        whole.min(self.text.len() - held).max(self.shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(all: &str) -> GrowingText {
        GrowingText {
            text: all.to_owned(),
            ..GrowingText::default()
        }
    }

    #[test]
    fn a_stop_cuts_the_text_where_it_begins() {
        let stops = ["\n\n".to_owned(), "END".to_owned()];
        let mut cut = text("one END two\n\n");
        assert!(cut.cut(&stops));
        assert_eq!(cut.text, "one ");
        assert!(!text("one EN").cut(&stops));
    }

    #[test]
    fn what_may_become_a_stop_or_another_character_is_held_back() {
        let stops = ["END".to_owned()];
        assert_eq!(text("one EN").ready(&stops), 4);
        assert_eq!(text("one ENt").ready(&stops), 7);
        assert_eq!(text("é\u{fffd}").ready(&stops), 2);
    }
}
