//! The canonical form of CUDA source: its tokens, without comments and formatting.

/// Punctuation that never forms a longer token with a neighbor. White space next to it has no meaning.
const SELF_DELIMITING: &str = "(){}[];,";

/// Returns `text` without comments and with only the white space that separates tokens.
///
/// Two sources with the same canonical form compile to the same code, except for line numbers. Operators keep the spaces around them,
/// because `a + +b` and `a ++b` are different programs. A preprocessor directive stays on its own line. String literals, and thus inline
/// PTX, are copied unchanged. Raw string literals are not supported; no template has one.
pub fn canonical(text: &str) -> String {
    let mut scanner = Scanner {
        rest: text,
        out: String::with_capacity(text.len() / 2),
        has_space: false,
        at_line_start: true,
        in_directive: false,
    };
    while scanner.step() {}
    scanner.out
}

struct Scanner<'a> {
    rest: &'a str,
    out: String,
    /// Whether white space or a comment precedes `rest`.
    has_space: bool,
    /// Whether only white space and comments precede `rest` on its line.
    at_line_start: bool,
    in_directive: bool,
}

impl Scanner<'_> {
    /// Consumes the next token, comment or piece of white space. Returns false at the end of the text.
    fn step(&mut self) -> bool {
        let Some(first) = self.rest.chars().next() else {
            return false;
        };
        if first == '\n' {
            self.end_line();
        } else if self.rest.starts_with("\\\n") {
            self.has_space = true;
            self.take(2);
        } else if first.is_whitespace() {
            self.has_space = true;
            self.take(self.run(|c| c.is_whitespace() && c != '\n'));
        } else if self.rest.starts_with("//") {
            self.has_space = true;
            self.take(self.rest.find('\n').unwrap_or(self.rest.len()));
        } else if self.rest.starts_with("/*") {
            self.has_space = true;
            self.take(self.rest.find("*/").map_or(self.rest.len(), |at| at + 2));
        } else {
            self.token(first);
        }
        true
    }

    fn end_line(&mut self) {
        self.take(1);
        self.has_space = true;
        self.at_line_start = true;
        if std::mem::take(&mut self.in_directive) {
            self.out.push('\n');
        }
    }

    fn token(&mut self, first: char) {
        if first == '#' && self.at_line_start {
            self.in_directive = true;
            if !self.out.is_empty() && !self.out.ends_with('\n') {
                self.out.push('\n');
            }
        }
        self.at_line_start = false;
        if std::mem::take(&mut self.has_space) && self.needs_space(first) {
            self.out.push(' ');
        }
        let is_quote = first == '"' || first == '\'' && !self.out.ends_with(char::is_alphanumeric);
        let length = if is_quote {
            literal(self.rest, first)
        } else if first.is_alphanumeric() {
            self.run(char::is_alphanumeric)
        } else {
            first.len_utf8()
        };
        self.out.push_str(&self.rest[..length]);
        self.take(length);
    }

    /// Returns whether the space before `next` separates two tokens. In a directive, every space does: `#define F(x)` differs from
    /// `#define F (x)`.
    fn needs_space(&self, next: char) -> bool {
        let before = self.out.chars().next_back();
        let is_open = |c: char| self.in_directive || !SELF_DELIMITING.contains(c);
        before.is_some_and(|before| before != '\n' && is_open(before) && is_open(next))
    }

    /// Returns the number of bytes before the first character that is not in a class.
    fn run(&self, is_in_class: impl Fn(char) -> bool) -> usize {
        let end = self.rest.find(|c| !is_in_class(c));
        end.unwrap_or(self.rest.len())
    }

    fn take(&mut self, n: usize) {
        self.rest = &self.rest[n..];
    }
}

/// Returns the length in bytes of the literal at the start of `text`, including the quotes.
fn literal(text: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_formatting_do_not_change_the_canonical_form() {
        let plain = "#pragma unroll\nfor (int i = 0; i < N; ++i) {\n    f(a, b + 1);\n}\n";
        let other = "// A loop.\n   #pragma   unroll // all\nfor(int i = 0;\n  i < N; ++i){ /* one\ncall */ f( a,b + 1 ); }";
        let expected = "#pragma unroll\nfor(int i = 0;i < N;++i){f(a,b + 1);}";
        assert_eq!(canonical(plain), expected);
        assert_eq!(canonical(other), canonical(plain));
    }

    #[test]
    fn tokens_stay_apart_and_literals_stay_whole() {
        let differing = [
            ("a + +b", "a ++b"),
            ("int x", "intx"),
            ("a / b", "a // b"),
            (r#"asm("a  b")"#, r#"asm("a b")"#),
            (r#"asm("a // b")"#, r#"asm("a")"#),
            (r#"f("\" // x")"#, r#"f("\"")"#),
            ("'\"' /* a */ b", "'\"' /* b */ c"),
            ("#define F(x) x\n", "#define F (x) x\n"),
            ("#define A 1\nb", "#define A 1 b"),
            ("f(x) /* a */ + 1", "f(x)"),
        ];
        for (one, other) in differing {
            assert_ne!(canonical(one), canonical(other), "{one}");
        }
        assert_eq!(canonical("1'000 /* ' */ + 'a'"), "1'000 + 'a'");
        assert_eq!(canonical("#define A \\\n  1\nb"), "#define A 1\nb");
        assert_eq!(canonical(""), "");
        assert_eq!(canonical("\"open"), "\"open");
    }
}
