//! Splits sources into the texts of their template and partials.

use gemmule::codegen::{Marks, tidy};

/// A rendered template or partial.
#[derive(Debug, PartialEq)]
pub struct Rendered<'a> {
    /// Name of the template, or path of the partial below `templates/`.
    name: &'a str,
    parts: Vec<Part<'a>>,
}

#[derive(Debug, PartialEq)]
enum Part<'a> {
    Text(&'a str),
    Partial(Rendered<'a>),
}

impl<'a> Rendered<'a> {
    /// Splits the marked source of a template.
    pub fn parse(template: &'a str, marked: &'a str, marks: Marks) -> Self {
        let mut open = vec![Rendered {
            name: template,
            parts: Vec::new(),
        }];
        let mut rest = marked;
        while let Some(at) = rest.find([marks.begin, marks.end]) {
            let (text, from_mark) = rest.split_at(at);
            let top = open.last_mut().expect("the template is never closed");
            top.parts.push(Part::Text(text));
            if from_mark.starts_with(marks.begin) {
                let (name, text) = from_mark[marks.begin.len_utf8()..]
                    .split_once(marks.name_end)
                    .expect("a name ends");
                let parts = Vec::new();
                open.push(Rendered { name, parts });
                rest = text;
            } else {
                let closed = open.pop().expect("it was opened");
                let outer = open.last_mut().expect("a partial has an outer template");
                outer.parts.push(Part::Partial(closed));
                rest = &from_mark[marks.end.len_utf8()..];
            }
        }
        assert_eq!(open.len(), 1, "every partial is closed");
        let mut template = open.remove(0);
        template.parts.push(Part::Text(rest));
        template
    }

    /// Returns the whole text without marks, as gemmule renders it for compilation.
    pub fn text(&self) -> String {
        tidy(&self.joined(&|partial| partial.flat()))
    }

    /// Returns the path and the text of the template and of all its partials. In each text, comments replace the nested partials.
    pub fn parts(&self) -> Vec<(&'a str, String)> {
        let named = self.joined(&|partial| {
            let line_end = if partial.ends_line() { "\n" } else { "" };
            format!("/* partials/{} */{line_end}", stem(partial.name))
        });
        let mut all = vec![(self.name, tidy(&named))];
        for part in &self.parts {
            if let Part::Partial(partial) = part {
                all.extend(partial.parts());
            }
        }
        all
    }

    fn ends_line(&self) -> bool {
        let last = self
            .parts
            .iter()
            .rev()
            .find(|part| **part != Part::Text(""));
        match last {
            None => false,
            Some(Part::Text(text)) => text.ends_with('\n'),
            Some(Part::Partial(partial)) => partial.ends_line(),
        }
    }

    fn flat(&self) -> String {
        self.joined(&Self::flat)
    }

    fn joined(&self, shown: &dyn Fn(&Self) -> String) -> String {
        let parts = self.parts.iter().map(|part| match part {
            Part::Text(text) => (*text).to_owned(),
            Part::Partial(partial) => shown(partial),
        });
        parts.collect()
    }
}

/// Returns the name of a template or partial: its file name without extensions.
pub fn stem(name: &str) -> &str {
    let file = name.rsplit('/').next().unwrap_or(name);
    let stem = file.split('.').next().unwrap_or(file);
    let has_number = stem.contains(|c: char| c.is_ascii_digit());
    assert!(!has_number, "skeletons have no numbers, but {stem} has one");
    stem
}

#[test]
fn a_source_is_taken_apart_into_texts_that_name_their_partials() {
    let marks = Marks {
        begin: '<',
        name_end: ':',
        end: '>',
    };
    let marked = "a\n<partials/x.cu:f(1)\n<partials/y.cu:y\n>>b<partials/z.cu:z>\n";
    let source = Rendered::parse("t", marked, marks);
    assert_eq!(source.text(), "a\nf(1)\ny\nbz\n");
    let parts = source.parts();
    let expected = [
        ("t", "a\n/* partials/x */\nb/* partials/z */\n"),
        ("partials/x.cu", "f(1)\n/* partials/y */\n"),
        ("partials/y.cu", "y\n"),
        ("partials/z.cu", "z\n"),
    ];
    assert_eq!(parts, expected.map(|(path, text)| (path, text.to_owned())));
}
