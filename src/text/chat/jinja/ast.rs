//! The syntax tree of a template. It holds no values, so threads can share it.

/// A parsed template.
#[derive(Debug)]
pub struct Template {
    pub body: Vec<Node>,
    /// Macros and the bodies of `call` blocks, by index.
    pub macros: Vec<Macro>,
}

/// A macro, or the body of a `call` block.
#[derive(Debug)]
pub struct Macro {
    pub name: String,
    pub parameters: Vec<(String, Option<Expr>)>,
    pub body: Vec<Node>,
    /// Whether the body reads `varargs`, `kwargs` or `caller`.
    pub reads_varargs: bool,
    pub reads_kwargs: bool,
    pub reads_caller: bool,
}

#[derive(Debug)]
pub struct Node {
    pub line: u32,
    pub kind: NodeKind,
}

#[derive(Debug)]
pub enum NodeKind {
    Data(String),
    Output(Expr),
    If {
        branches: Vec<(Expr, Vec<Node>)>,
        otherwise: Vec<Node>,
    },
    For(Box<For>),
    Set {
        target: Target,
        value: Expr,
    },
    SetBlock {
        target: Target,
        filters: Vec<Filter>,
        body: Vec<Node>,
    },
    With {
        values: Vec<(Target, Expr)>,
        body: Vec<Node>,
    },
    /// A body with its own scope, such as the body of a `generation` block.
    Scope(Vec<Node>),
    FilterBlock {
        filters: Vec<Filter>,
        body: Vec<Node>,
    },
    Macro(usize),
    CallBlock {
        call: Expr,
        body: usize,
    },
    Break,
    Continue,
    /// A statement that parses but is not supported, with the reason.
    Unsupported(String),
}

#[derive(Debug)]
pub struct For {
    pub target: Target,
    pub iterable: Expr,
    pub condition: Option<Expr>,
    pub is_recursive: bool,
    pub body: Vec<Node>,
    pub otherwise: Vec<Node>,
}

#[derive(Debug)]
pub enum Target {
    Name(String),
    /// An attribute of a namespace.
    Attribute(String, String),
    Tuple(Vec<Target>),
}

/// A filter or a test with its arguments.
#[derive(Debug)]
pub struct Filter {
    pub name: String,
    pub arguments: Arguments,
}

#[derive(Debug, Default)]
pub struct Arguments {
    pub positional: Vec<Expr>,
    pub named: Vec<(String, Expr)>,
    /// Arguments of the form `*list` and `**dict`.
    pub list: Option<Box<Expr>>,
    pub dict: Option<Box<Expr>>,
}

#[derive(Debug)]
pub struct Expr {
    pub line: u32,
    /// Height of the expression tree with this node as its root.
    pub height: u32,
    pub kind: Box<ExprKind>,
}

#[derive(Debug)]
pub enum ExprKind {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(String),
    Name(String),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Attribute(Expr, String),
    Item(Expr, Expr),
    Slice(Expr, [Option<Expr>; 3]),
    Call(Expr, Arguments),
    Filter(Expr, Filter),
    Test(Expr, Filter),
    Not(Expr),
    Negative(Expr),
    Positive(Expr),
    And(Expr, Expr),
    Or(Expr, Expr),
    Conditional {
        condition: Expr,
        then: Expr,
        otherwise: Option<Expr>,
    },
    Binary(Operator, Expr, Expr),
    Concat(Vec<Expr>),
    Compare(Expr, Vec<(Comparison, Expr)>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Modulo,
    Power,
}

impl Operator {
    pub fn symbol(self) -> &'static str {
        match self {
            Self::Add => "+",
            Self::Subtract => "-",
            Self::Multiply => "*",
            Self::Divide => "/",
            Self::FloorDivide => "//",
            Self::Modulo => "%",
            Self::Power => "**",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    In,
    NotIn,
}

impl Arguments {
    fn height(&self) -> u32 {
        let named = self.named.iter().map(|(_, value)| value);
        let stars = self.list.iter().chain(&self.dict).map(|star| &**star);
        highest(self.positional.iter().chain(named).chain(stars))
    }
}

fn highest<'a>(all: impl IntoIterator<Item = &'a Expr>) -> u32 {
    all.into_iter().map(|one| one.height).max().unwrap_or(0)
}

impl ExprKind {
    /// Returns the maximum height of the children.
    pub fn height(&self) -> u32 {
        match self {
            Self::None
            | Self::Bool(_)
            | Self::Int(_)
            | Self::Float(_)
            | Self::Str(_)
            | Self::Name(_) => 0,
            Self::List(all) | Self::Tuple(all) | Self::Concat(all) => highest(all),
            Self::Dict(all) => highest(all.iter().flat_map(|(key, value)| [key, value])),
            Self::Attribute(one, _)
            | Self::Not(one)
            | Self::Negative(one)
            | Self::Positive(one) => one.height,
            Self::Item(a, b) | Self::And(a, b) | Self::Or(a, b) | Self::Binary(_, a, b) => {
                highest([a, b])
            }
            Self::Slice(one, bounds) => highest(bounds.iter().flatten().chain([one])),
            Self::Call(one, arguments) => one.height.max(arguments.height()),
            Self::Filter(one, filter) | Self::Test(one, filter) => {
                one.height.max(filter.arguments.height())
            }
            Self::Conditional {
                condition,
                then,
                otherwise,
            } => highest(otherwise.iter().chain([condition, then])),
            Self::Compare(one, others) => {
                highest(others.iter().map(|(_, other)| other).chain([one]))
            }
        }
    }
}
