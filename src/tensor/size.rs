use std::{
    collections::BTreeMap,
    fmt,
    ops::{Add, Mul},
};

use serde::{Deserialize, Serialize};

use super::{Extents, Symbol};

/// A polynomial of symbols with integer coefficients, such as `768·tokens`.
///
/// Terms are sorted and have non-zero coefficients, so that equal polynomials compare equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Size {
    /// Coefficient of each term, keyed by its sorted factors.
    terms: BTreeMap<Vec<Symbol>, u64>,
}

impl Size {
    pub fn constant(value: u64) -> Self {
        let mut terms = BTreeMap::new();
        if value != 0 {
            terms.insert(Vec::new(), value);
        }
        Self { terms }
    }

    /// Returns the value, if it does not depend on a symbol.
    pub fn as_constant(&self) -> Option<u64> {
        match self.terms.len() {
            0 => Some(0),
            1 => self.terms.get(&Vec::new()).copied(),
            _ => None,
        }
    }

    /// Returns the symbol, if the size is exactly one symbol.
    pub fn as_symbol(&self) -> Option<Symbol> {
        match self.terms.iter().next() {
            Some((factors, 1)) if self.terms.len() == 1 && factors.len() == 1 => Some(factors[0]),
            _ => None,
        }
    }

    /// Returns the number of terms, and the maximum number of factors of a term.
    pub fn extent(&self) -> (usize, usize) {
        let degree = self.terms.keys().map(Vec::len).max().unwrap_or(0);
        (self.terms.len(), degree)
    }

    /// Returns whether the size depends on `symbol`.
    pub fn depends_on(&self, symbol: Symbol) -> bool {
        self.terms.keys().any(|factors| factors.contains(&symbol))
    }

    /// Returns the polynomial with `symbol` replaced by `size`.
    pub fn bind(&self, symbol: Symbol, size: &Size) -> Size {
        self.terms
            .iter()
            .fold(Size::default(), |sum, (factors, &coefficient)| {
                let term = factors
                    .iter()
                    .fold(Size::constant(coefficient), |product, &factor| {
                        &product
                            * &(if factor == symbol {
                                size.clone()
                            } else {
                                factor.into()
                            })
                    });
                &sum + &term
            })
    }

    /// Returns the value for a batch; `None` if it does not fit in 64 bits.
    pub fn eval(&self, extents: &Extents) -> Option<u64> {
        self.terms
            .iter()
            .try_fold(0u64, |sum, (factors, &coefficient)| {
                let term = factors.iter().try_fold(coefficient, |product, &s| {
                    product.checked_mul(extents.get(s))
                })?;
                sum.checked_add(term)
            })
    }
}

impl From<u64> for Size {
    fn from(value: u64) -> Self {
        Size::constant(value)
    }
}

impl From<Symbol> for Size {
    fn from(symbol: Symbol) -> Self {
        Self {
            terms: BTreeMap::from([(vec![symbol], 1)]),
        }
    }
}

impl Add for &Size {
    type Output = Size;

    fn add(self, other: &Size) -> Size {
        let mut terms = self.terms.clone();
        for (factors, coefficient) in &other.terms {
            let term = terms.entry(factors.clone()).or_insert(0);
            *term = term.saturating_add(*coefficient);
        }
        Size { terms }
    }
}

impl Mul for &Size {
    type Output = Size;

    fn mul(self, other: &Size) -> Size {
        let mut terms = BTreeMap::new();
        for (a, x) in &self.terms {
            for (b, y) in &other.terms {
                let mut factors = [a.as_slice(), b.as_slice()].concat();
                factors.sort_unstable();
                let term: &mut u64 = terms.entry(factors).or_insert(0);
                *term = term.saturating_add(x.saturating_mul(*y));
            }
        }
        Size { terms }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.terms.is_empty() {
            return f.write_str("0");
        }
        for (i, (factors, coefficient)) in self.terms.iter().enumerate() {
            if i > 0 {
                f.write_str(" + ")?;
            }
            let names: Vec<&str> = factors.iter().map(|s| s.name()).collect();
            match (*coefficient, names.is_empty()) {
                (c, true) => write!(f, "{c}")?,
                (1, false) => f.write_str(&names.join("·"))?,
                (c, false) => write!(f, "{c}·{}", names.join("·"))?,
            }
        }
        Ok(())
    }
}

/// The dimensions of a tensor, slowest first (row-major).
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Shape(pub Vec<Size>);

impl Shape {
    pub fn new<const N: usize>(dims: [Size; N]) -> Self {
        Self(dims.into())
    }

    /// Creates a shape without symbols.
    pub fn fixed(dims: &[u64]) -> Self {
        Self(dims.iter().map(|&d| Size::constant(d)).collect())
    }

    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> Size {
        self.0
            .iter()
            .fold(Size::constant(1), |product, d| &product * d)
    }

    /// Returns the last dimension, if it is constant.
    pub fn width(&self) -> Option<u64> {
        self.0.last().and_then(Size::as_constant)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{d}")?;
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_polynomials() {
        let tokens = Size::from(Symbol::Tokens);
        let size = &(&tokens * &Size::constant(768)) + &(&tokens * &tokens);
        assert_eq!(size.to_string(), "768·tokens + tokens·tokens");
        let extents = Extents::of(&[3, 4]).expect("a batch");
        assert_eq!(size.eval(&extents), Some(768 * 7 + 49));
        assert_eq!(Size::constant(0).to_string(), "0");
    }

    #[test]
    fn a_size_that_overflows_has_no_value() {
        let pairs = Size::from(Symbol::Pairs);
        let huge = &pairs * &Size::constant(u64::MAX);
        let extents = Extents::of(&[3, 4]).expect("a batch");
        assert_eq!(huge.eval(&extents), None);
    }
}
