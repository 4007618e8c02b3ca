//! Parses statements. Expressions are in [`expression`].

mod expression;

use super::{
    ast::{Expr, Filter, For, Macro, Node, NodeKind, Target, Template},
    error::{Error, Result},
    lex::{Token, tokens},
};

/// Maximum size of a template in bytes, more than ten times the size of published templates.
const MAX_SOURCE: usize = 512 << 10;
/// Maximum nesting of statements and brackets, and maximum height of an expression.
const MAX_NESTING: usize = 200;
const MAX_HEIGHT: u32 = 1000;

struct Parser {
    tokens: Vec<(Token, u32)>,
    at: usize,
    macros: Vec<Macro>,
    /// Number of enclosing statements and brackets.
    nesting: usize,
    /// Number of enclosing loops in the same macro.
    loops: usize,
}

/// Parses a template.
pub fn template(source: &str) -> Result<Template> {
    if source.len() > MAX_SOURCE {
        return Err(Error::limit(format!(
            "it has {} bytes; expected at most {MAX_SOURCE}",
            source.len()
        )));
    }
    let mut parser = Parser {
        tokens: tokens(source)?,
        at: 0,
        macros: Vec::new(),
        nesting: 0,
        loops: 0,
    };
    let body = parser.body(&[])?;
    Ok(Template {
        body,
        macros: parser.macros,
    })
}

/// Describes a token for an error message.
fn said(token: &Token) -> String {
    match token {
        Token::Data(_) => "text".to_owned(),
        Token::OutputBegin => "`{{`".to_owned(),
        Token::OutputEnd => "`}}`".to_owned(),
        Token::BlockBegin => "`{%`".to_owned(),
        Token::BlockEnd => "`%}`".to_owned(),
        Token::Name(name) => format!("`{name}`"),
        Token::Str(_) => "a string".to_owned(),
        Token::Int(_) | Token::Float(_) => "a number".to_owned(),
        Token::Operator(operator) => format!("`{operator}`"),
        Token::End => "the end of the template".to_owned(),
    }
}

impl Parser {
    fn peek(&self) -> &Token {
        &self.tokens[self.at].0
    }

    fn peek_second(&self) -> &Token {
        let last = self.tokens.len() - 1;
        &self.tokens[(self.at + 1).min(last)].0
    }

    fn line(&self) -> u32 {
        self.tokens[self.at].1
    }

    fn next(&mut self) -> Token {
        match self.peek() {
            Token::End => Token::End,
            _ => {
                self.at += 1;
                std::mem::replace(&mut self.tokens[self.at - 1].0, Token::End)
            }
        }
    }

    fn failed<T>(&self, message: impl Into<String>) -> Result<T> {
        Err(Error::failed(message).at(self.line()))
    }

    fn unexpected<T>(&self, expected: &str) -> Result<T> {
        self.failed(format!(
            "unexpected {}; expected {expected}",
            said(self.peek())
        ))
    }

    fn is_operator(&self, operator: &str) -> bool {
        matches!(self.peek(), Token::Operator(found) if *found == operator)
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Token::Name(found) if found == name)
    }

    /// Consumes the operator if it is the next token, and returns whether it was.
    fn takes(&mut self, operator: &str) -> bool {
        let is_next = self.is_operator(operator);
        self.at += usize::from(is_next);
        is_next
    }

    fn takes_name(&mut self, name: &str) -> bool {
        let is_next = self.is_name(name);
        self.at += usize::from(is_next);
        is_next
    }

    fn expect(&mut self, operator: &str) -> Result<()> {
        match self.takes(operator) {
            true => Ok(()),
            false => self.unexpected(&format!("`{operator}`")),
        }
    }

    fn name(&mut self) -> Result<String> {
        match self.peek() {
            Token::Name(_) => match self.next() {
                Token::Name(name) => Ok(name),
                _ => self.unexpected("a name"),
            },
            _ => self.unexpected("a name"),
        }
    }

    fn block_end(&mut self) -> Result<()> {
        match self.peek() {
            Token::BlockEnd => {
                self.at += 1;
                Ok(())
            }
            _ => self.unexpected("`%}`"),
        }
    }

    /// Runs `f` at the next level of nesting, or returns an error if that exceeds [`MAX_NESTING`].
    fn nested<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.nesting >= MAX_NESTING {
            return Err(Error::limit(format!(
                "it nests deeper than {MAX_NESTING} levels, the limit for a template"
            ))
            .at(self.line()));
        }
        self.nesting += 1;
        let result = f(self);
        self.nesting -= 1;
        result
    }

    /// Parses nodes up to a block that begins with one of `ends`, or to the end of the template if `ends` is empty. The name of that block
    /// is not consumed.
    fn body(&mut self, ends: &[&str]) -> Result<Vec<Node>> {
        let mut nodes = Vec::new();
        loop {
            let line = self.line();
            let kind = match self.peek() {
                Token::Data(_) => match self.next() {
                    Token::Data(text) => NodeKind::Data(text),
                    _ => return self.unexpected("text"),
                },
                Token::OutputBegin => {
                    self.at += 1;
                    let value = self.tuple(true)?;
                    if *self.peek() != Token::OutputEnd {
                        return self.unexpected("`}}`");
                    }
                    self.at += 1;
                    NodeKind::Output(value)
                }
                Token::BlockBegin => {
                    self.at += 1;
                    if ends.iter().any(|end| self.is_name(end)) {
                        return Ok(nodes);
                    }
                    self.nested(Self::statement)?
                }
                Token::End if ends.is_empty() => return Ok(nodes),
                _ => {
                    let ends: Vec<String> = ends.iter().map(|end| format!("`{end}`")).collect();
                    return self.unexpected(&ends.join(" or "));
                }
            };
            nodes.push(Node { line, kind });
        }
    }

    /// Parses the end of the opening tag, and the body up to the tag named `end`, which is consumed, too.
    fn block(&mut self, end: &str) -> Result<Vec<Node>> {
        self.block_end()?;
        let body = self.body(&[end])?;
        self.at += 1;
        self.block_end()?;
        Ok(body)
    }

    fn statement(&mut self) -> Result<NodeKind> {
        let name = self.name()?;
        match name.as_str() {
            "if" => self.conditional(),
            "for" => self.for_loop(),
            "set" => self.set(),
            "with" => self.with(),
            "generation" => self.block("endgeneration").map(NodeKind::Scope),
            "filter" => {
                let mut filters = vec![self.filter()?];
                filters.extend(self.filters()?);
                let body = self.block("endfilter")?;
                Ok(NodeKind::FilterBlock { filters, body })
            }
            "macro" => {
                let name = self.name()?;
                let parameters = self.parameters()?;
                self.macro_body(name, parameters, "endmacro")
                    .map(NodeKind::Macro)
            }
            "call" => {
                let parameters = match self.is_operator("(") {
                    true => self.parameters()?,
                    false => Vec::new(),
                };
                let call = self.expression()?;
                let body = self.macro_body("caller".to_owned(), parameters, "endcall")?;
                Ok(NodeKind::CallBlock { call, body })
            }
            "break" | "continue" => {
                if self.loops == 0 {
                    return self.failed(format!("`{name}` is outside of a loop"));
                }
                self.block_end()?;
                Ok(match name.as_str() {
                    "break" => NodeKind::Break,
                    _ => NodeKind::Continue,
                })
            }
            "include" | "import" | "from" | "extends" => {
                while *self.peek() != Token::BlockEnd {
                    if *self.peek() == Token::End {
                        return self.unexpected("`%}`");
                    }
                    self.at += 1;
                }
                self.block_end()?;
                Ok(NodeKind::Unsupported(format!(
                    "`{name}` reads other templates, and there are none"
                )))
            }
            "block" | "autoescape" => self.failed(format!(
                "`{name}` blocks are not supported in chat templates"
            )),
            other => self.failed(format!("unknown statement `{other}`")),
        }
    }

    fn conditional(&mut self) -> Result<NodeKind> {
        let (mut branches, mut otherwise) = (Vec::new(), Vec::new());
        loop {
            let condition = self.tuple(false)?;
            self.block_end()?;
            branches.push((condition, self.body(&["elif", "else", "endif"])?));
            if self.takes_name("elif") {
                continue;
            }
            if self.takes_name("else") {
                otherwise = self.block_without_name("endif")?;
            } else {
                self.at += 1;
                self.block_end()?;
            }
            return Ok(NodeKind::If {
                branches,
                otherwise,
            });
        }
    }

    /// Parses the end of an `else` tag, whose name was already consumed, and the body up to the tag named `end`.
    fn block_without_name(&mut self, end: &str) -> Result<Vec<Node>> {
        self.block(end)
    }

    fn for_loop(&mut self) -> Result<NodeKind> {
        let target = self.target(false)?;
        if !self.takes_name("in") {
            return self.unexpected("`in`");
        }
        let iterable = self.tuple(false)?;
        let condition = match self.takes_name("if") {
            true => Some(self.expression()?),
            false => None,
        };
        let is_recursive = self.takes_name("recursive");
        self.block_end()?;
        self.loops += 1;
        let body = self.body(&["endfor", "else"]);
        self.loops -= 1;
        let body = body?;
        let otherwise = match self.takes_name("else") {
            true => self.block_without_name("endfor")?,
            false => {
                self.at += 1;
                self.block_end()?;
                Vec::new()
            }
        };
        Ok(NodeKind::For(Box::new(For {
            target,
            iterable,
            condition,
            is_recursive,
            body,
            otherwise,
        })))
    }

    fn set(&mut self) -> Result<NodeKind> {
        let target = self.target(true)?;
        if self.takes("=") {
            let value = self.tuple(true)?;
            self.block_end()?;
            return Ok(NodeKind::Set { target, value });
        }
        let filters = self.filters()?;
        let body = self.block("endset")?;
        Ok(NodeKind::SetBlock {
            target,
            filters,
            body,
        })
    }

    fn with(&mut self) -> Result<NodeKind> {
        let mut values = Vec::new();
        while *self.peek() != Token::BlockEnd {
            if !values.is_empty() {
                self.expect(",")?;
            }
            let target = self.target(false)?;
            self.expect("=")?;
            values.push((target, self.expression()?));
        }
        let body = self.block("endwith")?;
        Ok(NodeKind::With { values, body })
    }

    /// Parses filters after `|`.
    fn filters(&mut self) -> Result<Vec<Filter>> {
        let mut filters = Vec::new();
        while self.takes("|") {
            filters.push(self.filter()?);
        }
        Ok(filters)
    }

    /// Parses the target of `set` or `for`.
    fn target(&mut self, with_attributes: bool) -> Result<Target> {
        let (mut all, mut is_tuple) = (Vec::new(), false);
        loop {
            if self.takes("(") {
                let inner = self.nested(|parser| parser.target(false))?;
                self.expect(")")?;
                all.push(inner);
            } else {
                let name = self.name()?;
                if ["true", "false", "none", "True", "False", "None"].contains(&name.as_str()) {
                    return self.failed(format!("`{name}` cannot be assigned to"));
                }
                all.push(match with_attributes && self.takes(".") {
                    true => Target::Attribute(name, self.name()?),
                    false => Target::Name(name),
                });
            }
            if !self.takes(",") {
                break;
            }
            is_tuple = true;
            if self.is_name("in") || self.is_operator("=") || self.is_operator(")") {
                break;
            }
        }
        match (is_tuple, all.pop()) {
            (false, Some(one)) => Ok(one),
            (_, last) => {
                all.extend(last);
                Ok(Target::Tuple(all))
            }
        }
    }

    fn parameters(&mut self) -> Result<Vec<(String, Option<Expr>)>> {
        self.expect("(")?;
        let mut parameters: Vec<(String, Option<Expr>)> = Vec::new();
        while !self.takes(")") {
            if !parameters.is_empty() {
                self.expect(",")?;
                if self.takes(")") {
                    break;
                }
            }
            let name = self.name()?;
            let default = match self.takes("=") {
                true => Some(self.expression()?),
                false => None,
            };
            if default.is_none() && parameters.iter().any(|(_, default)| default.is_some()) {
                return self.failed(format!(
                    "the parameter `{name}` has no default, unlike one before it"
                ));
            }
            parameters.push((name, default));
        }
        Ok(parameters)
    }

    /// Parses the body of a macro, and returns the index of the macro.
    fn macro_body(
        &mut self,
        name: String,
        parameters: Vec<(String, Option<Expr>)>,
        end: &str,
    ) -> Result<usize> {
        let loops = std::mem::take(&mut self.loops);
        let begin = self.at;
        // Search the tokens of the body for these names before parsing it, because parsing takes the tokens out of the list.
        let reads = |name: &str, tokens: &[(Token, u32)]| {
            let mut open = 0_usize;
            for (at, (token, _)) in tokens.iter().enumerate().skip(begin) {
                let is_tag = |name: &str| matches!(&tokens.get(at + 1), Some((Token::Name(found), _)) if found == name);
                if *token == Token::BlockBegin {
                    let opens = end.trim_start_matches("end");
                    if is_tag(opens) {
                        open += 1;
                    } else if is_tag(end) {
                        match open {
                            0 => return false,
                            _ => open -= 1,
                        }
                    }
                }
                if matches!(token, Token::Name(found) if found == name) {
                    return true;
                }
            }
            false
        };
        let [reads_varargs, reads_kwargs, reads_caller] =
            ["varargs", "kwargs", "caller"].map(|name| reads(name, &self.tokens));
        let body = self.block(end);
        self.loops = loops;
        self.macros.push(Macro {
            name,
            parameters,
            body: body?,
            reads_varargs,
            reads_kwargs,
            reads_caller,
        });
        Ok(self.macros.len() - 1)
    }
}
