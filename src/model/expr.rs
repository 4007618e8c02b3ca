//! Arithmetic expressions of a description, such as `hidden / heads` and `1 / sqrt(head)`, and conditions such as `embedding !=
//! hidden`.
//!
//! Dimensions are whole numbers, and every step is checked: a division with a remainder is an error. Real attributes (`eps`,
//! `scale`) are evaluated in f64.

use std::{fmt, ops::Range};

use super::error::At;

/// Maximum length in bytes and maximum nesting depth of an expression, which bound the recursion of the parser. No real expression reaches
/// them.
const MAX_LENGTH: usize = 200;
const MAX_DEPTH: usize = 16;

#[derive(Clone, Debug)]
pub(super) enum Expr {
    /// A number as written. Its use determines whether it must be whole.
    Number(String),
    Name(At<String>),
    Binary(Operation, Box<Expr>, Box<Expr>),
    Negate(Box<Expr>),
    Sqrt(Box<Expr>),
}

/// A comparison of two whole numbers in `When(holds: …)`.
#[derive(Clone, Debug)]
pub(super) struct Condition {
    pub left: Expr,
    relation: Relation,
    pub right: Expr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Relation {
    Equal,
    NotEqual,
    Below,
    AtMost,
    Above,
    AtLeast,
}

/// Spellings of relations. A longer spelling precedes its prefixes.
const RELATIONS: [(&str, Relation); 6] = [
    ("==", Relation::Equal),
    ("!=", Relation::NotEqual),
    ("<=", Relation::AtMost),
    (">=", Relation::AtLeast),
    ("<", Relation::Below),
    (">", Relation::Above),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Add,
    Subtract,
    Multiply,
    Divide,
    /// Remainder of a division of whole numbers.
    Remainder,
}

impl Expr {
    /// Parses `text`, which starts at byte `start` of the file.
    pub fn parse(text: &str, start: usize) -> Result<Self, String> {
        if text.len() > MAX_LENGTH {
            return Err(format!("it is longer than {MAX_LENGTH} bytes"));
        }
        let mut parser = Parser::new(text, start);
        let expr = parser.sum()?;
        parser.end()?;
        Ok(expr)
    }

    /// Names that the expression reads.
    pub fn names(&self) -> Vec<&At<String>> {
        match self {
            Expr::Number(_) => Vec::new(),
            Expr::Name(name) => vec![name],
            Expr::Negate(inner) | Expr::Sqrt(inner) => inner.names(),
            Expr::Binary(_, a, b) => [a.names(), b.names()].concat(),
        }
    }

    pub fn whole(&self, lookup: &impl Fn(&str) -> Option<u64>) -> Result<u64, String> {
        match self {
            Expr::Number(text) => text
                .parse()
                .map_err(|_| format!("{text} is not a whole number below 2^64")),
            Expr::Name(name) => lookup(&name.value)
                .ok_or_else(|| format!("`{}` is not a whole dimension", name.value)),
            Expr::Sqrt(_) => Err("`sqrt` gives no whole number".to_owned()),
            Expr::Negate(inner) => match inner.whole(lookup)? {
                0 => Ok(0),
                x => Err(format!("-{x} is below zero")),
            },
            Expr::Binary(operation, a, b) => {
                let (x, y) = (a.whole(lookup)?, b.whole(lookup)?);
                let step = format!("{x} {operation} {y}");
                match operation {
                    Operation::Add => x
                        .checked_add(y)
                        .ok_or(format!("{step} does not fit in 64 bits")),
                    Operation::Multiply => x
                        .checked_mul(y)
                        .ok_or(format!("{step} does not fit in 64 bits")),
                    Operation::Subtract => x.checked_sub(y).ok_or(format!("{step} is below zero")),
                    Operation::Divide if y == 0 => Err(format!("{step} divides by zero")),
                    Operation::Divide if x % y != 0 => {
                        Err(format!("{step} leaves a remainder of {}", x % y))
                    }
                    Operation::Divide => Ok(x / y),
                    Operation::Remainder if y == 0 => Err(format!("{step} divides by zero")),
                    Operation::Remainder => Ok(x % y),
                }
            }
        }
    }

    pub fn real(&self, lookup: &impl Fn(&str) -> Option<f64>) -> Result<f64, String> {
        Ok(match self {
            Expr::Number(text) => text
                .parse()
                .map_err(|_| format!("{text} is not a number"))?,
            Expr::Name(name) => {
                lookup(&name.value).ok_or_else(|| format!("`{}` has no value", name.value))?
            }
            Expr::Sqrt(inner) => inner.real(lookup)?.sqrt(),
            Expr::Negate(inner) => -inner.real(lookup)?,
            Expr::Binary(operation, a, b) => {
                let (x, y) = (a.real(lookup)?, b.real(lookup)?);
                match operation {
                    Operation::Add => x + y,
                    Operation::Subtract => x - y,
                    Operation::Multiply => x * y,
                    Operation::Divide => x / y,
                    Operation::Remainder => {
                        return Err(format!("{x} % {y} is defined for whole numbers only"));
                    }
                }
            }
        })
    }
}

impl Condition {
    /// Parses `text`, which starts at byte `start` of the file.
    pub fn parse(text: &str, start: usize) -> Result<Self, String> {
        if text.len() > MAX_LENGTH {
            return Err(format!("it is longer than {MAX_LENGTH} bytes"));
        }
        let mut parser = Parser::new(text, start);
        let left = parser.sum()?;
        let relation = parser.relation()?;
        let right = parser.sum()?;
        parser.end()?;
        Ok(Self {
            left,
            relation,
            right,
        })
    }

    pub fn holds(&self, lookup: &impl Fn(&str) -> Option<u64>) -> Result<bool, String> {
        let (left, right) = (self.left.whole(lookup)?, self.right.whole(lookup)?);
        Ok(match self.relation {
            Relation::Equal => left == right,
            Relation::NotEqual => left != right,
            Relation::Below => left < right,
            Relation::AtMost => left <= right,
            Relation::Above => left > right,
            Relation::AtLeast => left >= right,
        })
    }

    /// Names that the condition reads.
    pub fn names(&self) -> Vec<&At<String>> {
        [self.left.names(), self.right.names()].concat()
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Operation::Add => "+",
            Operation::Subtract => "-",
            Operation::Multiply => "*",
            Operation::Divide => "/",
            Operation::Remainder => "%",
        })
    }
}

/// Recursive descent parser: `sum = product {(+|-) product}`, `product = factor {(*|/|%) factor}`, `factor = -factor | …`.
struct Parser<'a> {
    text: &'a str,
    at: usize,
    start: usize,
    depth: usize,
}

impl<'a> Parser<'a> {
    fn new(text: &'a str, start: usize) -> Self {
        Self {
            text,
            at: 0,
            start,
            depth: 0,
        }
    }

    fn end(&mut self) -> Result<(), String> {
        match self.peek() {
            None => Ok(()),
            Some(c) => Err(format!("`{c}` was not expected")),
        }
    }

    fn relation(&mut self) -> Result<Relation, String> {
        self.peek();
        let rest = &self.text[self.at..];
        let found = RELATIONS.iter().find(|(text, _)| rest.starts_with(text));
        let (text, relation) = found.ok_or("one of `==`, `!=`, `<`, `<=`, `>`, `>=` is missing")?;
        self.at += text.len();
        Ok(*relation)
    }

    fn peek(&mut self) -> Option<char> {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start().len();
        self.text[self.at..].chars().next()
    }

    fn sum(&mut self) -> Result<Expr, String> {
        let mut left = self.product()?;
        loop {
            let operation = match self.peek() {
                Some('+') => Operation::Add,
                Some('-') => Operation::Subtract,
                _ => return Ok(left),
            };
            self.at += 1;
            left = Expr::Binary(operation, Box::new(left), Box::new(self.product()?));
        }
    }

    fn product(&mut self) -> Result<Expr, String> {
        let mut left = self.factor()?;
        loop {
            let operation = match self.peek() {
                Some('*') => Operation::Multiply,
                Some('/') => Operation::Divide,
                Some('%') => Operation::Remainder,
                _ => return Ok(left),
            };
            self.at += 1;
            left = Expr::Binary(operation, Box::new(left), Box::new(self.factor()?));
        }
    }

    fn factor(&mut self) -> Result<Expr, String> {
        match self.peek() {
            None => Err("a number or a name is missing at its end".to_owned()),
            Some('(') => self.parenthesised(),
            Some('-') => {
                self.deeper()?;
                self.at += 1;
                let inner = self.factor()?;
                self.depth -= 1;
                Ok(Expr::Negate(Box::new(inner)))
            }
            Some(c) if c.is_ascii_digit() => Ok(Expr::Number(self.number())),
            Some(c) if c.is_ascii_alphabetic() => {
                let name = self.word(|c| c.is_ascii_alphanumeric() || c == '_');
                if name.value == "sqrt" && self.peek() == Some('(') {
                    return Ok(Expr::Sqrt(Box::new(self.parenthesised()?)));
                }
                Ok(Expr::Name(name))
            }
            Some(c) => Err(format!("`{c}` was not expected")),
        }
    }

    fn deeper(&mut self) -> Result<(), String> {
        self.depth += 1;
        match self.depth > MAX_DEPTH {
            true => Err("it is nested too deeply".to_owned()),
            false => Ok(()),
        }
    }

    fn parenthesised(&mut self) -> Result<Expr, String> {
        self.deeper()?;
        self.at += 1;
        let inner = self.sum()?;
        self.depth -= 1;
        if self.peek() != Some(')') {
            return Err("a `)` is missing".to_owned());
        }
        self.at += 1;
        Ok(inner)
    }

    fn word(&mut self, belongs: impl Fn(char) -> bool) -> At<String> {
        let rest = &self.text[self.at..];
        let len = rest.find(|c| !belongs(c)).unwrap_or(rest.len());
        let from = self.start + self.at;
        let span: Range<usize> = from..from + len;
        self.at += len;
        At::new(rest[..len].to_owned(), span)
    }

    /// Reads digits with an optional fraction and exponent.
    fn number(&mut self) -> String {
        let mut text = self.word(|c| c.is_ascii_digit() || c == '.').value;
        let rest = &self.text.as_bytes()[self.at..];
        let exponent = match rest {
            [b'e' | b'E', b'-' | b'+', d, ..] if d.is_ascii_digit() => 2,
            [b'e' | b'E', d, ..] if d.is_ascii_digit() => 1,
            _ => return text,
        };
        text.push_str(&self.text[self.at..self.at + exponent]);
        self.at += exponent;
        text.push_str(&self.word(|c| c.is_ascii_digit()).value);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(text: &str) -> Result<u64, String> {
        let dims = |name: &str| (name == "hidden").then_some(384);
        Expr::parse(text, 0)?.whole(&dims)
    }

    #[test]
    fn whole_expressions_are_exact_or_an_error() {
        assert_eq!(whole("hidden / (4 + 8) * 2"), Ok(64));
        assert_eq!(whole("hidden % 7 + 1"), Ok(7));
        let by_zero = whole("hidden % (4 - 4)");
        assert_eq!(by_zero, Err("384 % 0 divides by zero".to_owned()));
        assert_eq!(whole("hidden - 1 - 1"), Ok(382));
        assert_eq!(
            whole("hidden / 5"),
            Err("384 / 5 leaves a remainder of 4".to_owned())
        );
        assert!(whole("18446744073709551615 + 1").is_err());
        assert!(whole("1 - 2").is_err());
        assert!(whole("1 / 0").is_err());
        assert!(whole("1.5").is_err());
        assert_eq!(whole("-3"), Err("-3 is below zero".to_owned()));
    }

    #[test]
    fn real_expressions_have_roots_and_exponents() {
        let none = |_: &str| None;
        let real = |text: &str| Expr::parse(text, 0).and_then(|e| e.real(&none));
        assert_eq!(real("1 / sqrt(64)"), Ok(0.125));
        assert_eq!(real("1e-12"), Ok(1e-12));
        assert_eq!(real("2.5E+1"), Ok(25.0));
        assert_eq!(real("-2 * -(1 + 0.5)"), Ok(3.0));
    }

    #[test]
    fn conditions_compare_whole_numbers() {
        let dims = |name: &str| (name == "hidden").then_some(384);
        let holds = |text: &str| Condition::parse(text, 0).and_then(|c| c.holds(&dims));
        for text in [
            "hidden == 384",
            "hidden / 2 != 3",
            "1 < 2",
            "2 <= 2",
            "3 > 2",
            "2>=2",
        ] {
            assert_eq!(holds(text), Ok(true), "{text}");
        }
        assert_eq!(holds("hidden < 384"), Ok(false));
        for text in [
            "hidden",
            "1 = 1",
            "1 == ",
            "1 == 2 == 3",
            "-1 < 2",
            "1.5 < 2",
        ] {
            assert!(holds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_no_expression_is_refused() {
        for text in [
            "",
            "1 +",
            "(1",
            "1 2",
            "a$",
            &"(".repeat(100),
            &"-".repeat(100),
            &"1+".repeat(200),
        ] {
            assert!(Expr::parse(text, 0).is_err(), "{text}");
        }
    }
}
