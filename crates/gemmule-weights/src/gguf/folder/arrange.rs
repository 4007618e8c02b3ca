//! Order of the elements of published tensors.

use super::super::Tensor;

/// Difference between a tensor as it is published and as it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrangement {
    None,
    /// The stored tensor is one more than the published one.
    MinusOne,
    /// The stored matrix is the transpose of the published one.
    Transposed,
    /// Rotary embeddings rotate pairs of neighbouring rows of a head in the stored tensor, and pairs from both halves
    /// of the head in the published one.
    Halves {
        heads: u64,
    },
}

impl Arrangement {
    /// Returns the sizes of the published tensor. The error describes the sizes expected of the stored one.
    pub(super) fn dims(self, stored: &[u64]) -> Result<Vec<u64>, String> {
        match self {
            Self::None | Self::MinusOne => Ok(stored.to_vec()),
            Self::Transposed => match *stored {
                [rows, columns] => Ok(vec![columns, rows]),
                _ => Err("expected a matrix".to_owned()),
            },
            Self::Halves { heads } => match stored.first() {
                Some(rows) if rows % (2 * heads) == 0 => Ok(stored.to_vec()),
                _ => Err(format!(
                    "expected an even number of rows for each of {heads} heads"
                )),
            },
        }
    }

    /// Returns the published positions of rows that are read in the order of the file.
    pub(super) fn place<'o, T>(self, tensor: &Tensor, out: &'o mut [T]) -> Placed<'o, T> {
        // A vector of biases is permuted by elements.
        let (rows, row) = match (self, tensor.dims.as_slice()) {
            (Self::Halves { .. }, &[rows]) => (rows, 1),
            (_, dims) => (dims.iter().rev().skip(1).product(), tensor.row()),
        };
        Placed {
            arrangement: self,
            rows: rows as usize,
            row: row as usize,
            next: 0,
            out,
        }
    }
}

/// Published positions of the rows of a tensor. In a tensor of one dimension, each element is a row.
pub(super) struct Placed<'o, T> {
    arrangement: Arrangement,
    rows: usize,
    /// Number of elements of a row that is placed.
    row: usize,
    next: usize,
    out: &'o mut [T],
}

impl<T: Copy> Placed<'_, T> {
    /// Returns the place of the next row; `None` if its elements have separate places.
    pub(super) fn next_row(&mut self) -> Option<&mut [T]> {
        let at = match self.arrangement {
            Arrangement::None | Arrangement::MinusOne => self.next,
            Arrangement::Transposed => return None,
            Arrangement::Halves { .. } if self.row == 1 => return None,
            Arrangement::Halves { heads } => self.published(self.next, heads),
        };
        self.next += 1;
        self.out.get_mut(at * self.row..(at + 1) * self.row)
    }

    /// Places the elements of the next row separately.
    pub(super) fn next_column(&mut self, elements: &[T]) {
        match self.arrangement {
            Arrangement::Halves { heads } => {
                for (stored, &element) in elements.iter().enumerate() {
                    let at = self.published(self.next + stored, heads);
                    self.out[at] = element;
                }
                self.next += elements.len();
            }
            _ => {
                for (column, &element) in elements.iter().enumerate() {
                    self.out[column * self.rows + self.next] = element;
                }
                self.next += 1;
            }
        }
    }

    /// Returns the published place of a stored row of a tensor of a number of heads.
    fn published(&self, stored: usize, heads: u64) -> usize {
        let head = self.rows / heads as usize;
        let (first, i) = (stored / head * head, stored % head);
        first + i % 2 * (head / 2) + i / 2
    }
}
