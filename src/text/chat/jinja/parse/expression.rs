//! Parses expressions with the precedence of jinja2.

use super::super::{
    ast::{Arguments, Comparison, Expr, ExprKind, Filter, Operator},
    error::{Error, Result},
    lex::Token,
};
use super::{MAX_HEIGHT, Parser};

impl Parser {
    fn make(&self, line: u32, kind: ExprKind) -> Result<Expr> {
        let height = 1 + kind.height();
        if height > MAX_HEIGHT {
            return Err(Error::limit(format!(
                "an expression nests deeper than {MAX_HEIGHT} operators, the limit for a template"
            ))
            .at(line));
        }
        Ok(Expr {
            line,
            height,
            kind: Box::new(kind),
        })
    }

    /// Parses one expression, or a tuple of several separated by commas.
    pub(super) fn tuple(&mut self, with_condition: bool) -> Result<Expr> {
        let line = self.line();
        let one = |parser: &mut Self| match with_condition {
            true => parser.expression(),
            false => parser.nested(Self::or),
        };
        let first = one(self)?;
        if !self.is_operator(",") {
            return Ok(first);
        }
        let mut all = vec![first];
        while self.takes(",") {
            let ends = matches!(self.peek(), Token::OutputEnd | Token::BlockEnd)
                || self.is_operator(")")
                || self.is_name("in");
            if ends {
                break;
            }
            all.push(one(self)?);
        }
        self.make(line, ExprKind::Tuple(all))
    }

    pub(super) fn expression(&mut self) -> Result<Expr> {
        self.nested(|parser| {
            let line = parser.line();
            let mut value = parser.or()?;
            while parser.takes_name("if") {
                let condition = parser.or()?;
                let otherwise = match parser.takes_name("else") {
                    true => Some(parser.expression()?),
                    false => None,
                };
                let kind = ExprKind::Conditional {
                    condition,
                    then: value,
                    otherwise,
                };
                value = parser.make(line, kind)?;
            }
            Ok(value)
        })
    }

    fn or(&mut self) -> Result<Expr> {
        let line = self.line();
        let mut left = self.and()?;
        while self.takes_name("or") {
            let right = self.and()?;
            left = self.make(line, ExprKind::Or(left, right))?;
        }
        Ok(left)
    }

    fn and(&mut self) -> Result<Expr> {
        let line = self.line();
        let mut left = self.not()?;
        while self.takes_name("and") {
            let right = self.not()?;
            left = self.make(line, ExprKind::And(left, right))?;
        }
        Ok(left)
    }

    fn not(&mut self) -> Result<Expr> {
        let line = self.line();
        if self.takes_name("not") {
            let value = self.nested(Self::not)?;
            return self.make(line, ExprKind::Not(value));
        }
        self.compare()
    }

    fn compare(&mut self) -> Result<Expr> {
        let line = self.line();
        let first = self.sum()?;
        let mut others = Vec::new();
        loop {
            let found = match self.peek() {
                Token::Operator("==") => Comparison::Equal,
                Token::Operator("!=") => Comparison::NotEqual,
                Token::Operator("<") => Comparison::Less,
                Token::Operator("<=") => Comparison::LessEqual,
                Token::Operator(">") => Comparison::Greater,
                Token::Operator(">=") => Comparison::GreaterEqual,
                Token::Name(name) if name == "in" => Comparison::In,
                Token::Name(name)
                    if name == "not" && *self.peek_second() == Token::Name("in".to_owned()) =>
                {
                    self.at += 1;
                    Comparison::NotIn
                }
                _ => break,
            };
            self.at += 1;
            others.push((found, self.sum()?));
        }
        match others.is_empty() {
            true => Ok(first),
            false => self.make(line, ExprKind::Compare(first, others)),
        }
    }

    /// Parses left-associative binary operators of one level.
    fn level(
        &mut self,
        operators: &[Operator],
        operand: fn(&mut Self) -> Result<Expr>,
    ) -> Result<Expr> {
        let line = self.line();
        let mut left = operand(self)?;
        loop {
            let found = operators.iter().find(|one| self.is_operator(one.symbol()));
            let Some(&operator) = found else {
                return Ok(left);
            };
            self.at += 1;
            let right = operand(self)?;
            left = self.make(line, ExprKind::Binary(operator, left, right))?;
        }
    }

    fn sum(&mut self) -> Result<Expr> {
        self.level(&[Operator::Add, Operator::Subtract], Self::concat)
    }

    fn concat(&mut self) -> Result<Expr> {
        let line = self.line();
        let first = self.product()?;
        if !self.is_operator("~") {
            return Ok(first);
        }
        let mut all = vec![first];
        while self.takes("~") {
            all.push(self.product()?);
        }
        self.make(line, ExprKind::Concat(all))
    }

    fn product(&mut self) -> Result<Expr> {
        let operators = [
            Operator::Multiply,
            Operator::Divide,
            Operator::FloorDivide,
            Operator::Modulo,
        ];
        self.level(&operators, Self::power)
    }

    fn power(&mut self) -> Result<Expr> {
        self.level(&[Operator::Power], |parser| parser.unary(true))
    }

    fn unary(&mut self, with_filters: bool) -> Result<Expr> {
        let line = self.line();
        let mut value = if self.takes("-") {
            let value = self.nested(|parser| parser.unary(false))?;
            self.make(line, ExprKind::Negative(value))?
        } else if self.takes("+") {
            let value = self.nested(|parser| parser.unary(false))?;
            self.make(line, ExprKind::Positive(value))?
        } else {
            self.primary()?
        };
        value = self.postfix(value)?;
        match with_filters {
            true => self.filtered(value),
            false => Ok(value),
        }
    }

    fn primary(&mut self) -> Result<Expr> {
        let line = self.line();
        let kind = match self.peek() {
            Token::Operator("(") => {
                self.at += 1;
                if self.takes(")") {
                    return self.make(line, ExprKind::Tuple(Vec::new()));
                }
                let value = self.nested(|parser| parser.tuple(true))?;
                self.expect(")")?;
                return Ok(value);
            }
            Token::Operator("[") => {
                self.at += 1;
                ExprKind::List(self.nested(|parser| parser.expressions("]"))?)
            }
            Token::Operator("{") => {
                self.at += 1;
                ExprKind::Dict(self.nested(Self::pairs)?)
            }
            Token::Name(_) | Token::Str(_) | Token::Int(_) | Token::Float(_) => match self.next() {
                Token::Name(name) => match name.as_str() {
                    "true" | "True" => ExprKind::Bool(true),
                    "false" | "False" => ExprKind::Bool(false),
                    "none" | "None" => ExprKind::None,
                    _ => ExprKind::Name(name),
                },
                Token::Str(mut text) => {
                    while let Token::Str(more) = self.peek() {
                        text += more;
                        self.at += 1;
                    }
                    ExprKind::Str(text)
                }
                Token::Int(number) => ExprKind::Int(number),
                Token::Float(number) => ExprKind::Float(number),
                _ => return self.unexpected("an expression"),
            },
            _ => return self.unexpected("an expression"),
        };
        self.make(line, kind)
    }

    /// Parses expressions up to `end`, which is consumed.
    fn expressions(&mut self, end: &str) -> Result<Vec<Expr>> {
        let mut all = Vec::new();
        while !self.takes(end) {
            if !all.is_empty() {
                self.expect(",")?;
                if self.takes(end) {
                    break;
                }
            }
            all.push(self.expression()?);
        }
        Ok(all)
    }

    fn pairs(&mut self) -> Result<Vec<(Expr, Expr)>> {
        let mut all = Vec::new();
        while !self.takes("}") {
            if !all.is_empty() {
                self.expect(",")?;
                if self.takes("}") {
                    break;
                }
            }
            let key = self.expression()?;
            self.expect(":")?;
            all.push((key, self.expression()?));
        }
        Ok(all)
    }

    fn postfix(&mut self, mut value: Expr) -> Result<Expr> {
        loop {
            let line = self.line();
            let kind = if self.takes(".") {
                match self.next() {
                    Token::Name(name) => ExprKind::Attribute(value, name),
                    Token::Int(index) => {
                        let index = self.make(line, ExprKind::Int(index))?;
                        ExprKind::Item(value, index)
                    }
                    _ => {
                        self.at -= 1;
                        return self.unexpected("a name after `.`");
                    }
                }
            } else if self.takes("[") {
                self.nested(|parser| parser.subscript(value))?
            } else if self.is_operator("(") {
                ExprKind::Call(value, self.arguments()?)
            } else {
                return Ok(value);
            };
            value = self.make(line, kind)?;
        }
    }

    fn subscript(&mut self, value: Expr) -> Result<ExprKind> {
        let line = self.line();
        let (mut bounds, mut n_colons, mut items) = ([None, None, None], 0, Vec::new());
        loop {
            if self.takes("]") {
                break;
            }
            if self.takes(":") {
                n_colons += 1;
                if n_colons > 2 {
                    return self.failed("a slice has more than two colons");
                }
            } else if self.takes(",") {
                if n_colons > 0 || bounds[0].is_none() {
                    return self.failed("a slice of several dimensions is not supported");
                }
                items.extend(bounds[0].take());
            } else if bounds[n_colons].is_some() {
                return self.unexpected("`]`");
            } else {
                bounds[n_colons] = Some(self.expression()?);
            }
        }
        if n_colons > 0 {
            return Ok(ExprKind::Slice(value, bounds));
        }
        let [one, ..] = bounds;
        let index = match (items.is_empty(), one) {
            (true, Some(one)) => one,
            (true, None) => return self.failed("an empty subscript"),
            (false, last) => {
                items.extend(last);
                self.make(line, ExprKind::Tuple(items))?
            }
        };
        Ok(ExprKind::Item(value, index))
    }

    fn arguments(&mut self) -> Result<Arguments> {
        self.expect("(")?;
        let mut found = Arguments::default();
        let mut is_first = true;
        self.nested(|parser| {
            while !parser.takes(")") {
                if !std::mem::take(&mut is_first) {
                    parser.expect(",")?;
                    if parser.takes(")") {
                        break;
                    }
                }
                let is_named = matches!(parser.peek(), Token::Name(_))
                    && *parser.peek_second() == Token::Operator("=");
                if parser.takes("**") && found.dict.is_none() {
                    found.dict = Some(Box::new(parser.expression()?));
                } else if parser.takes("*") && found.list.is_none() && found.dict.is_none() {
                    found.list = Some(Box::new(parser.expression()?));
                } else if is_named && found.dict.is_none() {
                    let name = parser.name()?;
                    parser.expect("=")?;
                    found.named.push((name, parser.expression()?));
                } else if found.named.is_empty() && found.dict.is_none() && found.list.is_none() {
                    found.positional.push(parser.expression()?);
                } else {
                    return parser.failed("invalid order of a call's arguments");
                }
            }
            Ok(())
        })?;
        Ok(found)
    }

    /// Parses filters, tests and calls after a value.
    fn filtered(&mut self, mut value: Expr) -> Result<Expr> {
        loop {
            let line = self.line();
            let kind = if self.takes("|") {
                ExprKind::Filter(value, self.filter()?)
            } else if self.is_name("is") {
                self.at += 1;
                let is_negated = self.takes_name("not");
                let test = self.test()?;
                let tested = ExprKind::Test(value, test);
                match is_negated {
                    true => ExprKind::Not(self.make(line, tested)?),
                    false => tested,
                }
            } else if self.is_operator("(") {
                ExprKind::Call(value, self.arguments()?)
            } else {
                return Ok(value);
            };
            value = self.make(line, kind)?;
        }
    }

    /// Parses a filter after its `|`.
    pub(super) fn filter(&mut self) -> Result<Filter> {
        let mut name = self.name()?;
        while self.takes(".") {
            name = format!("{name}.{}", self.name()?);
        }
        let arguments = match self.is_operator("(") {
            true => self.arguments()?,
            false => Arguments::default(),
        };
        Ok(Filter { name, arguments })
    }

    /// Parses a test after its `is`. The test may have one argument without parentheses.
    fn test(&mut self) -> Result<Filter> {
        let name = self.name()?;
        let has_argument = match self.peek() {
            Token::Name(name) if name == "is" => {
                return self.failed("tests cannot be chained with `is`");
            }
            Token::Name(name) => !["else", "or", "and"].contains(&name.as_str()),
            Token::Str(_) | Token::Int(_) | Token::Float(_) => true,
            Token::Operator(operator) => ["[", "{"].contains(operator),
            _ => false,
        };
        let arguments = match (self.is_operator("("), has_argument) {
            (true, _) => self.arguments()?,
            (false, true) => {
                let argument = self.primary()?;
                Arguments {
                    positional: vec![self.postfix(argument)?],
                    ..Arguments::default()
                }
            }
            (false, false) => Arguments::default(),
        };
        Ok(Filter { name, arguments })
    }
}
