//! Exemplars that name their partials: the text of each partial is stored once.

use std::collections::{BTreeMap, BTreeSet};

use gemmule::codegen::{Marks, tidy};

/// A rendered template or partial.
#[derive(Debug, PartialEq)]
pub struct Rendered<'a> {
    /// Path of the partial below `templates/`; empty for the template itself.
    name: &'a str,
    parts: Vec<Part<'a>>,
}

#[derive(Debug, PartialEq)]
enum Part<'a> {
    Text(&'a str),
    Partial(Rendered<'a>),
}

impl<'a> Rendered<'a> {
    /// Takes a marked source apart.
    pub fn parse(marked: &'a str, marks: Marks) -> Self {
        let mut open = vec![Rendered {
            name: "",
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

    /// The whole text, as the product renders it.
    pub fn text(&self) -> String {
        tidy(&self.joined(&|partial| partial.flat()))
    }

    /// The text without numbers and storage types, as for [classes](super::class::skeleton) of sources.
    fn skeleton(&self) -> String {
        super::class::skeleton_of("", &self.flat())
    }

    /// The skeleton of a source with the name of each partial instead of its text.
    pub fn outline(&self, symbol: &str) -> String {
        let named = self.joined(&|partial| format!("/* {} */", stem(partial.name)));
        super::class::skeleton_of(symbol, &tidy(&named))
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

    /// All partials, inner ones included.
    fn partials(&self) -> Vec<&Self> {
        let mut all = Vec::new();
        for part in &self.parts {
            if let Part::Partial(partial) = part {
                all.push(partial);
                all.extend(partial.partials());
            }
        }
        all
    }
}

/// The renderings of every partial that differ in more than numbers and storage types.
#[derive(Default)]
pub struct Partials {
    /// By name, then by skeleton: the symbols of the sources that contain it.
    found: BTreeMap<String, BTreeMap<String, BTreeSet<String>>>,
    /// Names of the snapshots that exist.
    existing: BTreeSet<String>,
}

impl Partials {
    /// `existing` are the names of present snapshots, which are kept where they still name a rendering.
    pub fn of<'a>(
        sources: impl Iterator<Item = (&'a str, &'a Rendered<'a>)>,
        existing: BTreeSet<String>,
    ) -> Self {
        let mut found: BTreeMap<_, BTreeMap<_, BTreeSet<_>>> = BTreeMap::new();
        for (symbol, source) in sources {
            for partial in source.partials() {
                let skeletons = found.entry(partial.name.to_owned()).or_default();
                let symbols = skeletons.entry(partial.skeleton()).or_default();
                symbols.insert(symbol.to_owned());
            }
        }
        Self { found, existing }
    }

    /// Name of the snapshot with this rendering: the partial's name, and if there are several the symbol of a source.
    fn snapshot(&self, partial: &Rendered) -> String {
        let stem = stem(partial.name);
        match self.found[partial.name].len() {
            1 => stem.to_owned(),
            _ => format!("{stem}.{}", self.exemplar(partial)),
        }
    }

    /// Symbol of the source whose rendering stands for all of one skeleton.
    fn exemplar(&self, partial: &Rendered) -> &str {
        let stem = stem(partial.name);
        let symbols = self.found[partial.name][&partial.skeleton()].iter();
        let is_new = |symbol: &str| !self.existing.contains(&format!("{stem}.{symbol}"));
        let symbol = symbols.min_by_key(|symbol| (is_new(symbol), symbol.len(), *symbol));
        symbol.expect("a source has it")
    }

    /// The text of a source or a partial in which each partial is a comment that names its snapshot.
    pub fn shown(&self, rendered: &Rendered) -> String {
        tidy(&rendered.joined(&|partial| format!("/* partials/{} */", self.snapshot(partial))))
    }

    /// Name and text of the snapshot of every skeleton in `sources`, which are named by their symbols.
    pub fn snapshots<'a>(
        &self,
        sources: impl Iterator<Item = (&'a str, &'a Rendered<'a>)>,
    ) -> BTreeMap<String, String> {
        let mut snapshots = BTreeMap::new();
        for (symbol, source) in sources {
            for partial in source.partials() {
                if self.exemplar(partial) == symbol {
                    let name = self.snapshot(partial);
                    snapshots.entry(name).or_insert_with(|| self.shown(partial));
                }
            }
        }
        snapshots
    }
}

fn stem(name: &str) -> &str {
    let file = name.rsplit('/').next().unwrap_or(name);
    file.split('.').next().unwrap_or(file)
}

#[test]
fn a_source_names_its_partials_and_each_rendering_is_there_once() {
    let marks = Marks {
        begin: '<',
        name_end: ':',
        end: '>',
    };
    let one = "a\n<partials/x.cu:f(1)<partials/y.cu:y>>\nb\n";
    let other = "<partials/x.cu:g(1)<partials/y.cu:y>>\nc\n<partials/x.cu:f(2)<partials/y.cu:y>>\n";
    let sources = [one, other].map(|marked| Rendered::parse(marked, marks));
    assert_eq!(sources[0].text(), "a\nf(1)y\nb\n");
    let named = || ["one", "other"].into_iter().zip(&sources);
    let partials = Partials::of(named(), BTreeSet::new());
    assert_eq!(partials.shown(&sources[0]), "a\n/* partials/x.one */\nb\n");
    let snapshots = partials.snapshots(named());
    let expected = [
        ("x.one", "f(1)/* partials/y */\n"),
        ("x.other", "g(1)/* partials/y */\n"),
        ("y", "y\n"),
    ];
    let expected = expected.map(|(name, text)| (name.to_owned(), text.to_owned()));
    assert_eq!(snapshots, BTreeMap::from(expected));
}
