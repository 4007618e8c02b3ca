//! Views of storages: the position of a tensor's elements in the file.

use std::ops::Range;

use crate::{Element, pickle::View};

/// Maximum size in bytes of a tensor that is not in row-major order, and of the file range from which it is gathered.
const MAX_GATHERED: u64 = 1 << 30;

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub element: Element,
    pub dims: Vec<u64>,
    /// Range of the file from the first byte of the tensor's elements to the last.
    pub bytes: Range<u64>,
    /// Strides in elements; `None` for row-major order without gaps.
    pub(super) strides: Option<Vec<u64>>,
}

impl Tensor {
    /// Returns whether `bytes` contains the elements in row-major order without gaps.
    pub fn is_contiguous(&self) -> bool {
        self.strides.is_none()
    }

    /// Appends the elements in row-major order to `out`. `span` contains the bytes of the file range `bytes`.
    ///
    /// # Panics
    /// Panics if `span` does not have the length of `bytes`.
    pub fn gather(&self, span: &[u8], out: &mut Vec<u8>) {
        assert_eq!(span.len() as u64, self.bytes.end - self.bytes.start);
        let Some(strides) = &self.strides else {
            out.extend_from_slice(span);
            return;
        };
        let (dims, bytes) = (self.dims.as_slice(), self.element.bytes());
        match bytes {
            1 => gather::<1>(span, dims, strides, out),
            2 => gather::<2>(span, dims, strides, out),
            4 => gather::<4>(span, dims, strides, out),
            8 => gather::<8>(span, dims, strides, out),
            _ => gather::<16>(span, dims, strides, out),
        }
    }
}

fn gather<const N: usize>(span: &[u8], dims: &[u64], strides: &[u64], out: &mut Vec<u8>) {
    fn append<const N: usize>(span: &[[u8; N]], dims: &[u64], strides: &[u64], out: &mut Vec<u8>) {
        match (dims, strides) {
            ([dim, dims @ ..], [stride, strides @ ..]) => {
                for i in 0..*dim {
                    append(&span[(i * stride) as usize..], dims, strides, out);
                }
            }
            _ => out.extend_from_slice(&span[0]),
        }
    }
    append(span.as_chunks::<N>().0, dims, strides, out);
}

impl Tensor {
    /// Returns the tensor that `view` describes. `storage` is the range of the view's storage in the file.
    pub(super) fn place(view: &View, storage: &Range<u64>) -> Result<Self, String> {
        let View {
            element,
            offset,
            dims,
            strides,
            ..
        } = view;
        let (bytes, in_file) = (element.bytes(), storage.end - storage.start);
        let size = |what: &str, n: i64| {
            u64::try_from(n).map_err(|_| format!("its {what} is {n}; expected at least 0"))
        };
        let sizes = |what: &str, list: &[i64]| -> Result<Vec<u64>, String> {
            list.iter().map(|&n| size(what, n)).collect()
        };
        let (dims, strides) = (sizes("size", dims)?, sizes("stride", strides)?);
        if strides.len() != dims.len() {
            return Err(format!(
                "it has {} sizes and {} strides",
                dims.len(),
                strides.len()
            ));
        }
        // For a storage of bytes, the number of elements is the number of bytes.
        let (unit, n) = match view.storage.element {
            Some(_) => (bytes, size("number of stored elements", view.storage.n)?),
            None => (1, size("number of stored bytes", view.storage.n)?),
        };
        let too_large = || "its sizes exceed 64 bits".to_owned();
        let stored = n.checked_mul(unit).ok_or_else(too_large)?;
        if stored > in_file {
            return Err(format!(
                "its storage has {in_file} bytes; expected {n} elements of {unit} bytes"
            ));
        }
        let mut elements: u64 = 1;
        let (mut last, mut is_row_major) = (0u64, true);
        for (&dim, &stride) in dims.iter().zip(&strides).rev() {
            // The stride of a dimension of size 1 is arbitrary.
            is_row_major &= dim == 1 || stride == elements;
            elements = elements.checked_mul(dim).ok_or_else(too_large)?;
            let steps = dim.saturating_sub(1).checked_mul(stride);
            last = steps
                .and_then(|steps| last.checked_add(steps))
                .ok_or_else(too_large)?;
        }
        let first = size("offset", *offset)?;
        let span = match elements {
            0 => 0,
            _ => last.checked_add(1).ok_or_else(too_large)?,
        };
        let end = first.checked_add(span).ok_or_else(too_large)?;
        let n = stored / bytes;
        if end > n {
            return Err(format!(
                "it ends at element {end} of a storage of {n} elements"
            ));
        }
        is_row_major |= elements == 0;
        // The range is within the storage, but a stride of 0 repeats elements, so the tensor may be larger.
        let size = elements.checked_mul(bytes).ok_or_else(too_large)?;
        if !is_row_major && size.max(span * bytes) > MAX_GATHERED {
            return Err(format!(
                "it is a view of sizes {dims:?} and strides {strides:?}, which takes {} bytes to gather, above the limit of {MAX_GATHERED}; save it with Tensor.contiguous()",
                size.max(span * bytes)
            ));
        }
        Ok(Self {
            element: *element,
            dims,
            bytes: storage.start + first * bytes..storage.start + end * bytes,
            strides: (!is_row_major).then_some(strides),
        })
    }
}
