//! Outputs that stay in the memory of the device that computed them.

use std::{ffi::c_void, fmt};

use super::{
    Output,
    cuda::{CudaError, CudaMemory},
    elements::decode_values,
};
use crate::tensor::{DType, Element};

/// A named output of a run, in separate memory of the device that computed it. All work that writes the memory has completed. No other run
/// reads or writes the memory, which is freed when the output is dropped.
#[derive(Debug)]
pub struct DeviceOutput {
    pub name: String,
    /// Dimensions, outermost first: `[tokens, width]` or `[batch, width]`.
    pub shape: Vec<u64>,
    /// Type of the values: the storage type of the model on a CUDA device, and f32 on the CPU. The values are stored in row-major order.
    pub element: Element,
    memory: DeviceMemory,
}

enum DeviceMemory {
    Host(Vec<f32>),
    Cuda(CudaMemory),
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(values) => write!(f, "{} values of the host", values.len()),
            Self::Cuda(memory) => write!(f, "memory of CUDA device {}", memory.ordinal()),
        }
    }
}

/// An error about outputs that stay on their device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceOutputError {
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(
        "the {bytes} bytes of host memory that the output `{output}` needs could not be allocated; send fewer texts at once"
    )]
    HostMemory { output: String, bytes: u64 },
    #[error(
        "rows of the output `{output}` with {from} values of {from_element} cannot be copied to rows with {to} values of {to_element}; expected the same type, and at most as many values"
    )]
    OtherRows {
        output: String,
        from: u64,
        from_element: Element,
        to: u64,
        to_element: Element,
    },
    #[error(
        "{found} rows of the output `{output}` are to be copied to {rows} given rows; expected one for each"
    )]
    RowCount {
        output: String,
        found: u64,
        rows: usize,
    },
    #[error("the output `{output}` has {found} rows, and no row {row}")]
    NoRow {
        output: String,
        row: usize,
        found: u64,
    },
    #[error("rows on {from} cannot be copied to an output on {to}; expected the same device")]
    OtherDevice { from: String, to: String },
}

impl From<Output> for DeviceOutput {
    fn from(output: Output) -> Self {
        Self {
            name: output.name,
            shape: output.shape,
            element: Element::Value(DType::F32),
            memory: DeviceMemory::Host(output.values),
        }
    }
}

impl DeviceOutput {
    /// Creates an output from `memory`, which must hold the values of a tensor with the shape `shape`.
    pub(super) fn on_cuda(
        name: String,
        shape: Vec<u64>,
        element: Element,
        memory: CudaMemory,
    ) -> Self {
        Self {
            name,
            shape,
            element,
            memory: DeviceMemory::Cuda(memory),
        }
    }

    /// Returns the address of the first value: a device address if [`cuda_device`](Self::cuda_device) returns a device, and otherwise a
    /// host address. The address is valid until the output is dropped.
    pub fn address(&self) -> *const c_void {
        match &self.memory {
            DeviceMemory::Host(values) => values.as_ptr().cast(),
            DeviceMemory::Cuda(memory) => memory.address() as *const c_void,
        }
    }

    /// Returns the number of the CUDA device that holds the values, or `None` for host memory.
    pub fn cuda_device(&self) -> Option<usize> {
        match &self.memory {
            DeviceMemory::Host(_) => None,
            DeviceMemory::Cuda(memory) => Some(memory.ordinal()),
        }
    }

    /// Copies the values to the host, converted to f32.
    ///
    /// # Errors
    /// Returns an error if host memory cannot be allocated or the device fails.
    pub fn to_output(&self) -> Result<Output, DeviceOutputError> {
        let values = match &self.memory {
            DeviceMemory::Host(values) => {
                let mut copy = self.host_memory(values.len())?;
                copy.extend_from_slice(values);
                copy
            }
            DeviceMemory::Cuda(memory) => decode_values(&memory.read(&self.name)?, self.element),
        };
        Ok(Output {
            name: self.name.clone(),
            shape: self.shape.clone(),
            values,
        })
    }

    /// Allocates an output of `n` rows of `width` zeros, with the name, the element type and the device of this output.
    ///
    /// # Errors
    /// Returns an error if memory cannot be allocated.
    pub fn with_rows(&self, n: u64, width: u64) -> Result<Self, DeviceOutputError> {
        let shape = vec![n, width];
        let memory = match &self.memory {
            DeviceMemory::Host(_) => {
                let n = usize::try_from(n.saturating_mul(width)).unwrap_or(usize::MAX);
                let mut values = self.host_memory(n)?;
                values.resize(n, 0.0);
                DeviceMemory::Host(values)
            }
            DeviceMemory::Cuda(memory) => {
                let bytes = self.element.tensor_bytes(&shape).unwrap_or(u64::MAX);
                DeviceMemory::Cuda(memory.zeros_beside(bytes)?)
            }
        };
        Ok(Self {
            name: self.name.clone(),
            shape,
            element: self.element,
            memory,
        })
    }

    /// Copies row `i` of `from` to row `rows[i]` of this output, truncated to the width of this output. All copies have completed on
    /// return.
    ///
    /// # Errors
    /// Returns an error if `from` is on another device than this output, if it has another element type or shorter rows than this output,
    /// or if its number of rows is not the number of indices. Also returns an error if an index is out of range, or if the device fails.
    pub fn set_rows(&mut self, from: &Self, rows: &[usize]) -> Result<(), DeviceOutputError> {
        let ([n_from, from_width], [n_to, width]) = (from.rows(), self.rows());
        if from.element != self.element || from_width < width {
            return Err(DeviceOutputError::OtherRows {
                output: self.name.clone(),
                from: from_width,
                from_element: from.element,
                to: width,
                to_element: self.element,
            });
        }
        if rows.len() as u64 != n_from {
            return Err(DeviceOutputError::RowCount {
                output: self.name.clone(),
                found: n_from,
                rows: rows.len(),
            });
        }
        if let Some(&row) = rows.iter().find(|&&row| row as u64 >= n_to) {
            return Err(DeviceOutputError::NoRow {
                output: self.name.clone(),
                row,
                found: n_to,
            });
        }
        let devices = [from.device(), self.device()];
        match (&from.memory, &mut self.memory) {
            (DeviceMemory::Host(from), DeviceMemory::Host(to)) => {
                let (from_width, width) = (from_width as usize, width as usize);
                for (row, &at) in from.chunks_exact(from_width.max(1)).zip(rows) {
                    to[at * width..][..width].copy_from_slice(&row[..width]);
                }
                Ok(())
            }
            (DeviceMemory::Cuda(from), DeviceMemory::Cuda(to))
                if from.ordinal() == to.ordinal() =>
            {
                let bytes = |n: u64| n * self.element.bytes();
                Ok(to.copy_rows(from, rows, bytes(from_width), bytes(width))?)
            }
            _ => {
                let [from, to] = devices;
                Err(DeviceOutputError::OtherDevice { from, to })
            }
        }
    }

    /// Returns the number of rows and the number of values per row.
    fn rows(&self) -> [u64; 2] {
        match self.shape.split_first() {
            Some((&n, row)) => [n, row.iter().product()],
            None => [1, 1],
        }
    }

    fn device(&self) -> String {
        match self.cuda_device() {
            None => "the host".to_owned(),
            Some(nth) => format!("CUDA device {nth}"),
        }
    }

    /// Reserves host memory for `n` values.
    fn host_memory(&self, n: usize) -> Result<Vec<f32>, DeviceOutputError> {
        let mut values = Vec::new();
        let reserved = values.try_reserve_exact(n);
        reserved.map_err(|_| DeviceOutputError::HostMemory {
            output: self.name.clone(),
            bytes: (n as u64).saturating_mul(4),
        })?;
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(shape: &[u64], values: &[f32]) -> DeviceOutput {
        DeviceOutput::from(Output {
            name: "x".to_owned(),
            shape: shape.to_vec(),
            values: values.to_vec(),
        })
    }

    #[test]
    fn rows_are_copied_to_their_places_and_cut() {
        let first = output(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let second = output(&[1, 3], &[7.0, 8.0, 9.0]);
        let mut all = first.with_rows(3, 2).expect("there is memory");
        all.set_rows(&first, &[2, 0]).expect("they fit");
        all.set_rows(&second, &[1]).expect("it fits");
        let copied = all.to_output().expect("it is in host memory");
        assert_eq!(copied.shape, [3, 2]);
        assert_eq!(copied.values, [4.0, 5.0, 7.0, 8.0, 1.0, 2.0]);
        assert!(all.cuda_device().is_none() && !all.address().is_null());
    }

    #[test]
    fn rows_that_do_not_fit_are_refused() {
        let from = output(&[2, 1], &[1.0, 2.0]);
        let refused = |shape: [u64; 2], rows: &[usize]| {
            let to = from.with_rows(shape[0], shape[1]);
            let mut to = to.expect("there is memory");
            to.set_rows(&from, rows).expect_err("refused").to_string()
        };
        insta::assert_snapshot!(refused([2, 2], &[0, 1]), @"rows of the output `x` with 1 values of f32 cannot be copied to rows with 2 values of f32; expected the same type, and at most as many values");
        insta::assert_snapshot!(refused([2, 1], &[0]), @"2 rows of the output `x` are to be copied to 1 given rows; expected one for each");
        insta::assert_snapshot!(refused([2, 1], &[0, 2]), @"the output `x` has 2 rows, and no row 2");
        let endless = from
            .with_rows(u64::MAX, 2)
            .expect_err("there is no such memory");
        insta::assert_snapshot!(endless, @"the 18446744073709551615 bytes of host memory that the output `x` needs could not be allocated; send fewer texts at once");
    }
}
