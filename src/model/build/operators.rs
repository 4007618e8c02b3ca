//! The operators of the language, with one file for each group.
//!
//! Each file contains a table for users. For each operator, it contains the fields (`fields!`), the code that adds nodes to the graph
//! (`Operator::build`), and an entry in `ALL`. The decoding, the error messages about fields, and the checks of names are derived from the
//! fields. The files of the groups share the imports of this file.

pub mod attention;
mod fields;
pub mod inputs;
pub mod linear;
pub mod norms;
pub mod pointwise;
pub mod pooling;
pub mod softmax;

use std::{ops::Range, sync::Arc};

use super::Builder;
use crate::{
    graph::{Buckets, Factor, MAX_PARTS, NodeId, Op, Positions, Sinusoid, WeightExpr},
    model::{
        error::{At, ModelError, Problem, suggest, words},
        expr::Expr,
        reader::{Args, Piece, Reader},
        spelling::{INPUTS, Pattern},
        terms::{Decoded, each, one_or_more, unknown},
    },
    ops::{
        Activation, BatchInput, Bias, Epilogue, HeadView, PoolWeights, PositionBias, Rotation,
        Side, SoftCap,
    },
    tensor::{SequenceEnd, Shape, Size, Symbol},
};
use fields::{Field, Fields, Kind, Listed, Real, Term, Value, Weight, Whole, choice, fields};
pub(in crate::model) use fields::{Names, Operation};

/// An operator with its fields.
pub(in crate::model) trait Operator: Fields {
    /// Adds the operator's nodes to the graph, and returns its value.
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError>;
}

/// The value that an operator defines: its name in the graph, and its position in the description.
pub(in crate::model) struct Target<'a> {
    pub name: &'a str,
    pub span: &'a Range<usize>,
}

/// An operator of the language.
#[derive(Clone, Copy)]
pub struct Entry {
    pub name: &'static str,
    fields: fn() -> Vec<&'static str>,
    decode: for<'a> fn(Reader<'a>, &Args<'a>) -> Decoded<Operation>,
}

impl Entry {
    const fn new<T: Operator + Listed + 'static>(name: &'static str) -> Self {
        Self {
            name,
            fields: T::fields,
            decode: |r, args| Ok(Arc::new(T::decode(r, args)?)),
        }
    }

    /// Returns the names of the operator's fields.
    pub fn fields(&self) -> Vec<&'static str> {
        (self.fields)()
    }
}

/// An operator whose fields are all names of values. It adds one node, which computes `op` from these values.
#[derive(Debug)]
struct Plain {
    operands: Vec<Value>,
    op: Op,
}

/// Creates the entry of a [`Plain`] operator: `plain!("add", a, b => Op::Add)`.
macro_rules! plain {
    ($name:literal, $($field:ident),* => $op:expr) => {
        $crate::model::build::operators::Entry {
            name: $name,
            fields: || vec![$(stringify!($field)),*],
            decode: |r, args| {
                use $crate::model::build::operators::{Plain, fields::Field};
                let operands = vec![$(Field::decode(r, args, stringify!($field))?),*];
                Ok(std::sync::Arc::new(Plain { operands, op: $op }))
            },
        }
    };
}
use plain;

impl Fields for Plain {
    fn names<'s>(&'s self, to: &mut Names<'s>) {
        to.values.extend(self.operands.iter().map(|value| &value.0));
    }
}

impl Operator for Plain {
    fn build(&self, to: &mut Builder<'_>, at: &Target<'_>) -> Result<NodeId, ModelError> {
        let operands = self.operands.iter().map(|value| to.value(value));
        let operands = operands.collect::<Result<Vec<_>, _>>()?;
        to.node(at, self.op.clone(), &operands)
    }
}

fn all() -> impl Iterator<Item = &'static Entry> {
    let groups = [
        inputs::ALL,
        linear::ALL,
        norms::ALL,
        pointwise::ALL,
        attention::ALL,
        softmax::ALL,
        pooling::ALL,
    ];
    groups.into_iter().flatten()
}

/// Returns the operator that is called `name`.
pub(in crate::model) fn named(name: &str) -> Option<&'static Entry> {
    all().find(|entry| entry.name == name)
}

/// Decodes an operator such as `linear(x: …, …)`.
pub(in crate::model) fn operator<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<Operation> {
    let call = r.call("a value", "an operator `operator(field: …)`", piece)?;
    let Some(entry) = named(&call.name.value) else {
        let mut names: Vec<&'static str> = all().map(|entry| entry.name).collect();
        names.sort_unstable();
        return Err(unknown(r, "operator", &call.name, &names));
    };
    let args = call.named(r, &entry.fields())?;
    (entry.decode)(r, &args)
}

impl Builder<'_> {
    /// Adds the node that computes the operator's value.
    fn node(&mut self, at: &Target<'_>, op: Op, operands: &[NodeId]) -> Result<NodeId, ModelError> {
        self.add(at.name.to_owned(), op, operands, at.span)
    }
}
