//! Output to a terminal. Texts and the names of tensors and files may be from untrusted sources, so they must not control the terminal.

use std::{
    borrow::Cow,
    fmt::{self, Write},
    io::{self, IsTerminal},
};

use miette::{
    Diagnostic, LabeledSpan, MietteError, MietteHandler, MietteSpanContents, ReportHandler,
    Severity, SourceCode, SourceSpan, SpanContents,
};

/// Returns whether standard error is a terminal with colors enabled (no-color.org).
pub(super) fn has_colors() -> bool {
    let wants_none = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    io::stderr().is_terminal() && !wants_none
}

/// Returns whether a character may control a terminal. Such characters are control characters (C0 except line feed and tab, DEL, C1) and
/// characters that override the direction of text.
fn steers(c: char) -> bool {
    match c {
        '\n' | '\t' => false,
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => true,
        _ => c.is_control(),
    }
}

/// Escapes characters that control a terminal, in Rust's notation, for example as `\u{1b}`.
pub(super) fn clean(text: &str) -> Cow<'_, str> {
    if !text.contains(steers) {
        return Cow::Borrowed(text);
    }
    let mut cleaned = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match steers(c) {
            true => cleaned.extend(c.escape_unicode()),
            false => cleaned.push(c),
        }
    }
    Cow::Owned(cleaned)
}

/// Escapes characters that control a terminal in JSON, for example as `\u001b`. The escapes do not change the values of the JSON.
pub(super) fn clean_json(text: &str) -> Cow<'_, str> {
    if !text.contains(steers) {
        return Cow::Borrowed(text);
    }
    let mut cleaned = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match steers(c) {
            // All these characters are below 2¹⁶. They only occur in strings, because JSON does not allow them elsewhere.
            true => {
                let _ = write!(cleaned, "\\u{:04x}", u32::from(c));
            }
            false => cleaned.push(c),
        }
    }
    Cow::Owned(cleaned)
}

/// Writes the log to standard error, in whole lines. Escape characters are kept, because they start the colors of the log; names in the log
/// are already escaped. All other control characters are escaped here.
pub(super) struct Log;

impl io::Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        let parts: Vec<Cow<'_, str>> = text.split('\u{1b}').map(clean).collect();
        io::stderr().write_all(parts.join("\u{1b}").as_bytes())?;
        Ok(line.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Renders a diagnostic like miette, with miette's colors, and escapes everything in it. `help` is used if the diagnostic has no help of
/// its own.
pub(super) fn rendered(diagnostic: &dyn Diagnostic, help: Option<String>) -> String {
    struct Rendered(Cleaned);
    impl fmt::Display for Rendered {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            MietteHandler::default().debug(&self.0, f)
        }
    }
    let mut diagnostic = Cleaned::of(diagnostic);
    diagnostic.help = diagnostic
        .help
        .or(help.map(|help| clean(&help).into_owned()));
    Rendered(diagnostic).to_string()
}

/// Copy of a diagnostic, with all texts escaped.
struct Cleaned {
    message: String,
    code: Option<String>,
    severity: Option<Severity>,
    help: Option<String>,
    url: Option<String>,
    labels: Option<Vec<LabeledSpan>>,
    source_code: Option<CleanedSource>,
    related: Vec<Cleaned>,
    diagnostic_source: Option<Box<Cleaned>>,
    source: Option<Box<Cause>>,
}

impl Cleaned {
    fn of(diagnostic: &dyn Diagnostic) -> Self {
        let text = |text: Option<Box<dyn fmt::Display + '_>>| text.map(|t| cleaned(&*t));
        let below = diagnostic.diagnostic_source();
        let message = cleaned(diagnostic);
        Self {
            code: text(diagnostic.code()),
            severity: diagnostic.severity(),
            help: text(diagnostic.help()),
            url: text(diagnostic.url()),
            labels: diagnostic.labels().map(|l| l.map(label).collect()),
            source_code: diagnostic.source_code().and_then(CleanedSource::of),
            related: diagnostic
                .related()
                .into_iter()
                .flatten()
                .map(Cleaned::of)
                .collect(),
            diagnostic_source: below.map(|d| Box::new(Cleaned::of(d))),
            source: Cause::below(&message, diagnostic.source()),
            message,
        }
    }
}

fn cleaned(text: &(impl fmt::Display + ?Sized)) -> String {
    clean(&text.to_string()).into_owned()
}

fn label(label: LabeledSpan) -> LabeledSpan {
    let text = label.label().map(|text| clean(text).into_owned());
    match label.primary() {
        true => LabeledSpan::new_primary_with_span(text, *label.inner()),
        false => LabeledSpan::new_with_span(text, *label.inner()),
    }
}

impl fmt::Debug for Cleaned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl fmt::Display for Cleaned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Cleaned {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| &**e as _)
    }
}

impl Diagnostic for Cleaned {
    fn code<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.code.as_ref().map(|t| Box::new(t) as _)
    }
    fn severity(&self) -> Option<Severity> {
        self.severity
    }
    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.help.as_ref().map(|t| Box::new(t) as _)
    }
    fn url<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.url.as_ref().map(|t| Box::new(t) as _)
    }
    fn source_code(&self) -> Option<&dyn SourceCode> {
        self.source_code.as_ref().map(|s| s as _)
    }
    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        let labels = self.labels.as_ref()?;
        Some(Box::new(labels.iter().cloned()))
    }
    fn related<'a>(&'a self) -> Option<Box<dyn Iterator<Item = &'a dyn Diagnostic> + 'a>> {
        match self.related.is_empty() {
            true => None,
            false => Some(Box::new(self.related.iter().map(|d| d as _))),
        }
    }
    fn diagnostic_source(&self) -> Option<&dyn Diagnostic> {
        self.diagnostic_source.as_ref().map(|d| &**d as _)
    }
}

/// A cause of an error: its escaped text, and its own cause.
#[derive(Debug)]
struct Cause {
    message: String,
    source: Option<Box<Cause>>,
}

impl Cause {
    /// Searches the chain of causes that begins with `source`. Returns the first cause whose text is not already part of `message`, with
    /// the causes below it.
    fn below(
        message: &str,
        mut source: Option<&(dyn std::error::Error + 'static)>,
    ) -> Option<Box<Self>> {
        while let Some(error) = source {
            let own = cleaned(error);
            source = error.source();
            if !message.contains(&own) {
                let source = Self::below(&own, source);
                return Some(Box::new(Self {
                    message: own,
                    source,
                }));
            }
        }
        None
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Cause {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| &**e as _)
    }
}

/// Source text to which labels point. Characters that control a terminal are replaced by text with the same number of bytes, so that the
/// positions of labels remain correct.
struct CleanedSource {
    text: Vec<u8>,
    name: Option<String>,
}

impl CleanedSource {
    /// Copies a source. Returns `None` if the text is not available; the diagnostic is then shown without source.
    fn of(source: &dyn SourceCode) -> Option<Self> {
        let whole = source.read_span(&(0, 0).into(), 0, usize::MAX).ok()?;
        Some(Self {
            text: same_length(whole.data()),
            name: whole.name().map(|name| clean(name).into_owned()),
        })
    }
}

impl SourceCode for CleanedSource {
    fn read_span<'a>(
        &'a self,
        span: &SourceSpan,
        before: usize,
        after: usize,
    ) -> Result<Box<dyn SpanContents<'a> + 'a>, MietteError> {
        let contents = self.text.read_span(span, before, after)?;
        let Some(name) = &self.name else {
            return Ok(contents);
        };
        Ok(Box::new(MietteSpanContents::new_named(
            name.clone(),
            contents.data(),
            *contents.span(),
            contents.line(),
            contents.column(),
            contents.line_count(),
        )))
    }
}

fn same_length(bytes: &[u8]) -> Vec<u8> {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return bytes.to_vec();
    };
    let mut cleaned = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        // miette supports both `\n` and `\r\n` at the end of a line.
        let ends_line = c == '\r' && chars.peek() == Some(&'\n');
        cleaned.push_str(match (steers(c) && !ends_line, c.len_utf8()) {
            (false, _) => {
                cleaned.push(c);
                continue;
            }
            (true, 1) => "?",
            (true, 2) => "¿",
            _ => "\u{fffd}",
        });
    }
    cleaned.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_characters_that_control_a_terminal_are_escaped() {
        assert!(matches!(clean("ä\tb\n→ 文"), Cow::Borrowed(_)));
        assert_eq!(
            clean("\u{1b}[31m\r\u{0}\u{7f}\u{9b}\u{202e}\u{2069}é"),
            "\\u{1b}[31m\\u{d}\\u{0}\\u{7f}\\u{9b}\\u{202e}\\u{2069}é"
        );
        let value = serde_json::json!({"a\u{202e}": "\u{9b}\u{1b}\u{7f}ä"});
        let text = value.to_string();
        let cleaned = clean_json(&text);
        assert!(!cleaned.contains(steers), "{cleaned}");
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&cleaned).ok(),
            Some(value)
        );
    }

    #[test]
    fn a_source_keeps_its_length() {
        let text = "a\u{1b}b\r\nc\rd\u{9b}\u{202e}e";
        let cleaned = same_length(text.as_bytes());
        assert_eq!(cleaned.len(), text.len());
        assert_eq!(String::from_utf8(cleaned).unwrap(), "a?b\r\nc?d¿\u{fffd}e");
    }

    #[test]
    fn a_cause_that_the_message_contains_is_not_repeated() {
        #[derive(Debug, thiserror::Error, Diagnostic)]
        #[error("{text}")]
        struct Link {
            text: &'static str,
            #[source]
            source: Option<Box<Link>>,
        }
        let chain = |texts: &[&'static str]| {
            let link = |source, &text: &&'static str| Some(Box::new(Link { text, source }));
            let chain = texts.iter().rev().fold(None, link).expect("a text");
            rendered(&*chain, None)
        };
        let shown = chain(&["failed: full; stop", "full", "deep", "deep"]);
        assert_eq!(shown.matches("full").count(), 1, "{shown}");
        assert_eq!(shown.matches("deep").count(), 1, "{shown}");
        assert!(shown.contains("failed: full; stop"), "{shown}");
        let shown = chain(&["`a` cannot be written", "no space"]);
        assert!(shown.contains("no space"), "{shown}");
    }

    #[derive(Debug, thiserror::Error, Diagnostic)]
    #[error("out\u{1b}er")]
    #[diagnostic(help("he\u{1b}lp"), code("co\u{7f}de"))]
    struct Outer {
        #[source]
        source: std::io::Error,
        #[source_code]
        code: miette::NamedSource<String>,
        #[label("la\u{1b}bel")]
        at: SourceSpan,
    }

    #[test]
    fn every_part_of_an_error_is_escaped() {
        let error = Outer {
            source: std::io::Error::other("ca\u{9b}use"),
            code: miette::NamedSource::new("na\u{1b}me", "so\u{1b}urce".to_owned()),
            at: (2, 1).into(),
        };
        let shown = rendered(&error, None);
        let raw = shown.chars().filter(|&c| steers(c)).count();
        // If the test runs in a terminal, miette's own colors are not escaped.
        assert!(raw == 0 || shown.contains("\u{1b}["), "{shown:?}");
        for part in [
            "out\\u{1b}er",
            "he\\u{1b}lp",
            "co\\u{7f}de",
            "la\\u{1b}bel",
            "ca\\u{9b}use",
            "na\\u{1b}me",
            "so?urce",
        ] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
    }
}
