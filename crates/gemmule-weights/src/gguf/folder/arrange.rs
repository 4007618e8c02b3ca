//! Order of the elements of published tensors.

use super::super::Tensor;

/// Difference between the published and the stored form of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrangement {
    None,
    /// Each stored value is the published value plus one.
    MinusOne,
    /// The stored matrix is the transpose of the published one.
    Transposed,
    /// Rotary embeddings rotate pairs of rows within a head. A pair consists of neighboring rows in the stored tensor, and of rows from
    /// both halves of the head in the published tensor.
    Halves {
        heads: u64,
    },
}

impl Arrangement {
    /// Returns the sizes of the published tensor. The error describes the expected sizes of the stored tensor.
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

    /// Returns a writer for the rows of a tensor. It takes the rows in the order of the file, and puts each one at its published position
    /// in `out`.
    pub(super) fn place<'o, T>(self, tensor: &Tensor, out: &'o mut [T]) -> Placed<'o, T> {
        // A bias vector is permuted element by element.
        match (self, tensor.dims.as_slice()) {
            (Self::Halves { .. }, &[rows]) => self.placed(rows, 1, out),
            _ => self.place_rows(tensor, tensor.row(), out),
        }
    }

    /// Like [`place`](Self::place) for a matrix, with `per_row` items for each row, such as its elements or its scales.
    pub(super) fn place_rows<'o, T>(
        self,
        tensor: &Tensor,
        per_row: u64,
        out: &'o mut [T],
    ) -> Placed<'o, T> {
        let rows = tensor.dims.iter().rev().skip(1).product();
        self.placed(rows, per_row, out)
    }

    fn placed<T>(self, rows: u64, row: u64, out: &mut [T]) -> Placed<'_, T> {
        Placed {
            arrangement: self,
            rows: rows as usize,
            row: row as usize,
            next: 0,
            out,
        }
    }
}

/// Writer that puts the rows of a tensor at their published positions. If a tensor of one dimension is permuted, each element is a row.
pub(super) struct Placed<'o, T> {
    arrangement: Arrangement,
    rows: usize,
    /// Number of elements that are placed together.
    row: usize,
    next: usize,
    out: &'o mut [T],
}

impl<T: Copy> Placed<'_, T> {
    /// Returns the place of the next row in `out`; `None` if the elements of the row must be placed separately.
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

    /// Places the next row.
    pub(super) fn put_row(&mut self, elements: &[T]) {
        match self.next_row() {
            Some(out) => out.copy_from_slice(elements),
            None => self.next_column(elements),
        }
    }

    /// Places each element of the next row separately.
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

    /// Returns the published position of a stored row in a tensor of `heads` heads.
    fn published(&self, stored: usize, heads: u64) -> usize {
        let head = self.rows / heads as usize;
        let (first, i) = (stored / head * head, stored % head);
        first + i % 2 * (head / 2) + i / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::Format;

    /// The scales of a row move with its elements, even if a row has only one scale.
    #[test]
    fn scales_of_rows_are_placed_like_the_rows() {
        const ROWS: u64 = 12;
        for per_row in [1, 3] {
            let tensor = Tensor {
                name: String::new(),
                dims: vec![ROWS, 32 * per_row],
                format: Format::Q4_0,
                part: 0,
                offset: 0,
                bytes: 18 * per_row * ROWS,
            };
            for arrangement in [Arrangement::None, Arrangement::Halves { heads: 3 }] {
                let place = |placed: Placed<'_, u64>, width: u64| {
                    let mut placed = placed;
                    for row in 0..ROWS {
                        let items: Vec<u64> = (0..width).map(|i| row * width + i).collect();
                        placed.put_row(&items);
                    }
                };
                let mut elements = vec![0; tensor.elements() as usize];
                place(arrangement.place(&tensor, &mut elements), tensor.row());
                let mut scales = vec![0; (ROWS * per_row) as usize];
                let placed = arrangement.place_rows(&tensor, per_row, &mut scales);
                place(placed, per_row);
                let expected = elements.iter().step_by(32).map(|element| element / 32);
                assert_eq!(scales, expected.collect::<Vec<_>>(), "{arrangement:?}");
            }
        }
    }
}
