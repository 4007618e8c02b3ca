//! Functions of single elements, and of columns.
//!
//! | operator | fields | result |
//! |---|---|---|
//! | `add`, `multiply` | `a`, `b` | sum or product of two values of the same shape, element by element |
//! | `scale` | `x`, `by` | `by · x` |
//! | `soft_cap` | `x`, `cap` | `cap · tanh(x / cap)`; `x` may be rows, or scores before their softmax |
//! | `gelu` | `x`, `form` (`exact` or `tanh`) | pointwise: `x / 2 · (1 + erf(x / √2))`, or `x / 2 · (1 + tanh(√(2 / π) · (x + 0.044715 x³)))` |
//! | `relu`, `tanh`, `silu`, `quick_gelu`, `log1p_relu` | `x` | pointwise: `max(x, 0)`, `tanh x`, `x / (1 + e^(−x))`, `x / (1 + e^(−1.702 x))` (CLIP), `ln(1 + max(x, 0))` (SPLADE) |
//! | `activation` | `x`, `kind` (a name of `activations`) | pointwise |
//! | `columns` | `x`, `from`, `width` | a range of columns of every row |
//! | `concat` | `of` (2 to 16 values) | values with the same number of rows, concatenated along the width |
//! | `same` | `x` | the value itself under another name |

use super::*;

pub(super) const ALL: &[Entry] = &[
    plain!("add", a, b => Op::Add),
    plain!("multiply", a, b => Op::Multiply),
    Entry::new::<Scale>("scale"),
    Entry::new::<Capped>("soft_cap"),
    Entry::new::<Gelu>("gelu"),
    plain!("relu", x => Op::Activate(Activation::Relu)),
    plain!("tanh", x => Op::Activate(Activation::Tanh)),
    plain!("silu", x => Op::Activate(Activation::Silu)),
    plain!("quick_gelu", x => Op::Activate(Activation::QuickGelu)),
    plain!("log1p_relu", x => Op::Activate(Activation::Log1pRelu)),
    Entry::new::<NamedActivation>("activation"),
    Entry::new::<Columns>("columns"),
    Entry::new::<Concat>("concat"),
    Entry::new::<Same>("same"),
];

fields! {
    struct Scale {
        x: Value,
        by: Real,
    }

    struct Capped {
        x: Value,
        cap: Real,
    }

    struct Gelu {
        x: Value,
        form: GeluForm,
    }

    struct NamedActivation {
        x: Value,
        kind: Kind,
    }

    struct Columns {
        x: Value,
        from: Whole,
        width: Whole,
    }

    struct Concat {
        of: Parts,
    }

    struct Same {
        x: Value,
    }
}

#[derive(Debug)]
struct GeluForm(Activation);

impl Field for GeluForm {
    fn decode<'a>(r: Reader<'a>, args: &Args<'a>, name: &'static str) -> Decoded<Self> {
        let words = [
            ("exact", Activation::GeluExact),
            ("tanh", Activation::GeluTanh),
        ];
        choice(r, "`form` of `gelu`", args.required(r, name)?, &words).map(Self)
    }
}

/// The values that are concatenated.
#[derive(Debug)]
struct Parts(Vec<Value>);

impl Field for Parts {
    fn decode<'a>(r: Reader<'a>, args: &Args<'a>, name: &'static str) -> Decoded<Self> {
        let (what, piece) = ("`of` of `concat`", args.required(r, name)?);
        let parts = each(r, what, piece, |p| Value::read(r, p))?;
        match parts.len() {
            2..=MAX_PARTS => Ok(Self(parts)),
            _ => {
                let expected = format!("a list of 2 to {MAX_PARTS} values");
                Err(r.form(what, &expected, piece))
            }
        }
    }

    fn names<'s>(&'s self, to: &mut Names<'s>) {
        self.0.iter().for_each(|part| Field::names(part, to));
    }
}

impl Operator for Scale {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let by = to.values.real(&self.by)?;
        let x = to.value(&self.x)?;
        to.node(at, Op::Scale { by }, &[x])
    }
}

impl Operator for Capped {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let found = to.values.real(&self.cap)?;
        let cap = SoftCap::new(found).map_err(|_| {
            let problem = Problem::out_of_range("a soft cap", found, "a number from 1e-30 to 1e30");
            let label = "no such bound".to_owned();
            to.values.about(problem, &[&self.cap], label)
        })?;
        let x = to.value(&self.x)?;
        to.node(at, Op::SoftCap(cap), &[x])
    }
}

impl Operator for Gelu {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let x = to.value(&self.x)?;
        to.node(at, Op::Activate(self.form.0), &[x])
    }
}

impl Operator for NamedActivation {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let kind = &*self.kind;
        let found = to.values.activation(&kind.value)?.ok_or_else(|| {
            let problem = Problem::undefined("activation", &kind.value);
            to.file.error(problem, &kind.span, "not defined")
        })?;
        let x = to.value(&self.x)?;
        to.node(at, Op::Activate(found), &[x])
    }
}

impl Operator for Columns {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let (start, width) = (to.values.offset(&self.from)?, to.values.size(&self.width)?);
        let x = to.value(&self.x)?;
        to.node(at, Op::SliceColumns { start, width }, &[x])
    }
}

impl Operator for Concat {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let operands = self.of.0.iter().map(|x| to.value(x));
        let operands: Vec<NodeId> = operands.collect::<Result<_, _>>()?;
        let parts = operands.len() as u32;
        to.node(at, Op::Concat { parts }, &operands)
    }
}

impl Operator for Same {
    /// Returns the node of `x` and adds none. In the graph, the value therefore keeps the name that it had before.
    fn build(&self, to: &mut Builder<'_>, _: &Target<'_>) -> Result<NodeId, ModelError> {
        to.value(&self.x)
    }
}
