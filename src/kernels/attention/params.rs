//! Parameters shared by the attention kernels.

use crate::{
    kernels::{Fill, Param, Role},
    ops::{BatchInput, HeadView},
    tensor::{Element, Shape, Size, Symbol},
};

pub(super) fn read(name: &'static str, element: impl Into<Element>, shape: Shape) -> Param {
    let element = element.into();
    Param {
        name,
        role: Role::Read {
            element,
            shape,
            fill: Fill::ACTIVATION,
        },
    }
}

pub(super) fn write(name: &'static str, element: impl Into<Element>, shape: Shape) -> Param {
    let element = element.into();
    Param {
        name,
        role: Role::Write { element, shape },
    }
}

pub(super) fn cu_lens() -> Param {
    meta("cu_lens", BatchInput::CuLens, bounds())
}

pub(super) fn pair_offsets() -> Param {
    meta("pair_offsets", BatchInput::PairOffsets, bounds())
}

pub(super) fn valid_lens() -> Param {
    meta(
        "valid_lens",
        BatchInput::ValidLens,
        Shape::new([Symbol::Batch.into()]),
    )
}

/// `[batch + 1]`.
fn bounds() -> Shape {
    Shape::new([&Size::from(Symbol::Batch) + &Size::constant(1)])
}

/// Returns the parameter `batch`, and the parameter `tokens` if the addresses of a view depend on the number of tokens.
pub(super) fn counts(views: &[HeadView]) -> Vec<Param> {
    let mut counts = vec![count("batch", Symbol::Batch)];
    if views.contains(&HeadView::HeadMajor) {
        counts.push(count("tokens", Symbol::Tokens));
    }
    counts
}

/// Returns the parameters with which kernels detect that all sequences have the same length (`tokens = batch · longest`). Kernels then
/// compute row offsets instead of loading them.
pub(super) fn batch_counts() -> [Param; 3] {
    [
        count("batch", Symbol::Batch),
        count("tokens", Symbol::Tokens),
        count("longest", Symbol::Longest),
    ]
}

fn count(name: &'static str, symbol: Symbol) -> Param {
    Param {
        name,
        role: Role::Count(Size::from(symbol)),
    }
}

fn meta(name: &'static str, meta: BatchInput, shape: Shape) -> Param {
    Param {
        name,
        role: Role::Read {
            element: meta.element(),
            shape,
            fill: Fill::BatchInput(meta),
        },
    }
}
