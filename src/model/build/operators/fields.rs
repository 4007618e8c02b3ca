//! Fields of operators: their syntax in descriptions, and the names that they contain.

use std::{fmt::Debug, ops::Deref, sync::Arc};

use super::Operator;
use crate::{
    model::{
        error::At,
        expr::Expr,
        reader::{Args, Piece, Reader},
        spelling::Pattern,
        terms::{Decoded, expression, pattern},
    },
    ops::BatchInput,
};

/// An operator of a description, whose fields were decoded.
pub(in crate::model) type Operation = Arc<dyn Operator>;

/// Names in the fields of an operator.
#[derive(Default)]
pub(in crate::model) struct Names<'a> {
    /// Values that the operator reads.
    pub values: Vec<&'a At<String>>,
    /// Sizes, which are whole numbers.
    pub sizes: Vec<&'a At<Expr>>,
    /// Real numbers.
    pub reals: Vec<&'a At<Expr>>,
    /// Names of activations that the description defines under `activations`.
    pub activations: Vec<&'a At<String>>,
    /// Names of weights and of a cache. They may contain indices.
    pub weights: Vec<&'a At<Pattern>>,
    /// Inputs of the model.
    pub inputs: Vec<BatchInput>,
    /// Whether the operator appends to a cache.
    pub appends: bool,
}

/// The fields of an operator.
pub(in crate::model) trait Fields: Debug + Send + Sync {
    /// Adds the names in the fields to `to`.
    fn names<'s>(&'s self, to: &mut Names<'s>);

    /// Returns the names in the fields.
    fn all_names(&self) -> Names<'_> {
        let mut names = Names::default();
        self.names(&mut names);
        names
    }
}

/// Operators whose fields the macro [`fields!`] defines.
pub(super) trait Listed: Fields + Sized {
    fn fields() -> Vec<&'static str>;

    fn decode<'a>(r: Reader<'a>, args: &Args<'a>) -> Decoded<Self>;
}

/// Defines the fields of operators, in the order in which they are decoded and checked.
macro_rules! fields {
    ($($(#[$doc:meta])* struct $Operator:ident { $($(#[$note:meta])* $field:ident: $Kind:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        struct $Operator { $($(#[$note])* $field: $Kind),* }

        impl $crate::model::build::operators::fields::Fields for $Operator {
            fn names<'s>(&'s self, to: &mut $crate::model::build::operators::fields::Names<'s>) {
                use $crate::model::build::operators::fields::Field;
                $(Field::names(&self.$field, to);)*
            }
        }

        impl $crate::model::build::operators::fields::Listed for $Operator {
            fn fields() -> Vec<&'static str> {
                use $crate::model::build::operators::fields::Field;
                let mut keys = Vec::new();
                $(<$Kind>::keys(stringify!($field), &mut keys);)*
                keys
            }

            fn decode<'a>(
                r: $crate::model::reader::Reader<'a>,
                args: &$crate::model::reader::Args<'a>,
            ) -> $crate::model::terms::Decoded<Self> {
                use $crate::model::build::operators::fields::Field;
                Ok(Self { $($field: Field::decode(r, args, stringify!($field))?),* })
            }
        }
    )*};
}
pub(super) use fields;

/// A field of an operator.
pub(super) trait Field: Sized {
    /// Adds the keys under which a description gives the field.
    fn keys(name: &'static str, to: &mut Vec<&'static str>) {
        to.push(name);
    }

    fn decode<'a>(r: Reader<'a>, args: &Args<'a>, name: &'static str) -> Decoded<Self>;

    /// Adds the names in the field to `to`.
    fn names<'s>(&'s self, _: &mut Names<'s>) {}
}

/// A type of fields that a description gives under one key. A field of type `T: Term` is required,
/// and one of type `Option<T>` is not.
pub(super) trait Term: Sized {
    fn read<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<Self>;

    fn names<'s>(&'s self, to: &mut Names<'s>);
}

impl<T: Term> Field for T {
    fn decode<'a>(r: Reader<'a>, args: &Args<'a>, name: &'static str) -> Decoded<Self> {
        T::read(r, args.required(r, name)?)
    }

    fn names<'s>(&'s self, to: &mut Names<'s>) {
        Term::names(self, to);
    }
}

impl<T: Term> Field for Option<T> {
    fn decode<'a>(r: Reader<'a>, args: &Args<'a>, name: &'static str) -> Decoded<Self> {
        args.optional(name)
            .map(|piece| T::read(r, piece))
            .transpose()
    }

    fn names<'s>(&'s self, to: &mut Names<'s>) {
        self.iter().for_each(|term| Term::names(term, to));
    }
}

/// A flag, which is false if it is not given.
impl Field for bool {
    fn decode<'a>(r: Reader<'a>, args: &Args<'a>, name: &'static str) -> Decoded<Self> {
        let flag = args.optional(name);
        flag.map_or(Ok(false), |piece| r.flag(&format!("`{name}`"), piece))
    }
}

/// Defines terms that wrap another type. `in` gives the list of [`Names`] to which a term adds its
/// value, and `=` the function that decodes the value.
macro_rules! terms {
    ($($(#[$doc:meta])* $Term:ident($Of:ty) in $list:ident = $read:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub(in crate::model::build) struct $Term(pub $Of);

        impl Term for $Term {
            fn read<'a>(r: Reader<'a>, piece: Piece<'a>) -> Decoded<Self> {
                let read: fn(Reader<'a>, Piece<'a>) -> Decoded<$Of> = $read;
                read(r, piece).map(Self)
            }

            fn names<'s>(&'s self, to: &mut Names<'s>) {
                to.$list.push(&self.0);
            }
        }

        impl Deref for $Term {
            type Target = $Of;

            fn deref(&self) -> &$Of {
                &self.0
            }
        }
    )*};
}

terms! {
    /// A value that the operator reads.
    Value(At<String>) in values = |r, piece| r.string("a value", piece);
    /// A whole number.
    Whole(At<Expr>) in sizes = expression;
    /// A real number.
    Real(At<Expr>) in reals = expression;
    /// The name of a weight or of a cache.
    Weight(At<Pattern>) in weights = pattern;
    /// A kind of activation that is defined under `activations`.
    Kind(At<String>) in activations = |r, piece| r.string("`kind`", piece);
}

/// Decodes one of `words` to its value.
pub(super) fn choice<'a, T: Copy>(
    r: Reader<'a>,
    what: &str,
    piece: Piece<'a>,
    words: &[(&str, T)],
) -> Decoded<T> {
    let found = words.iter().find(|(word, _)| *word == piece.text);
    found.map(|&(_, value)| value).ok_or_else(|| {
        let words: Vec<String> = words.iter().map(|(word, _)| format!("`{word}`")).collect();
        r.form(what, &words.join(" or "), piece)
    })
}
