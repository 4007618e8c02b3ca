//! `DeviceArray`: results in the memory of the device that computed them.

use std::sync::Arc;

use gemmule::DeviceOutput;
use numpy::PyArrayDyn;
use pyo3::{exceptions::PyBufferError, prelude::*, types::PyTuple};

use crate::{
    arrays::of_output,
    dlpack,
    error::{Error, Result},
};

/// An array in the memory of the device that computed it.
///
/// `torch.from_dlpack(array)`, `cupy.from_dlpack(array)` and, for an array on the CPU, `numpy.from_dlpack(array)` read it without a copy.
/// The memory is freed when the array and all views of it are gone. The values are complete, so there is no need to synchronize streams.
#[pyclass(frozen, module = "gemmule")]
pub struct DeviceArray {
    output: Arc<DeviceOutput>,
    shape: Vec<u64>,
}

/// Type of the arrays that a call returns: the argument `to`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// A numpy array in float32.
    Numpy,
    /// A [`DeviceArray`].
    Dlpack,
}

impl Target {
    /// Parses the argument `to`.
    ///
    /// # Errors
    /// Returns an error for an unknown name.
    pub fn new(name: &str) -> Result<Self> {
        match name {
            "numpy" => Ok(Self::Numpy),
            "dlpack" => Ok(Self::Dlpack),
            _ => Err(Error::Input(format!(
                "to is `{name}`; expected \"numpy\", or \"dlpack\" for an array that stays on the device"
            ))),
        }
    }
}

impl DeviceArray {
    /// Creates an array with the dimensions of an output. For a single input, the first dimension is dropped.
    pub fn new(output: DeviceOutput, is_single: bool) -> Self {
        let shape = match is_single {
            true => output.shape.get(1..).unwrap_or_default().to_vec(),
            false => output.shape.clone(),
        };
        Self {
            output: Arc::new(output),
            shape,
        }
    }
}

#[pymethods]
impl DeviceArray {
    /// Return a DLPack capsule that shares the memory of the array. `torch.from_dlpack` calls this.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> Result<Bound<'py, PyAny>> {
        // The values are complete, so the consumer's stream does not need to wait.
        let _ = stream;
        let own = dlpack::device(&self.output)?;
        if let Some(asked) = dl_device.filter(|&asked| asked != own) {
            return Err(refused(format!(
                "the array is on the device {own:?}, and {asked:?} is asked for; call numpy() for a copy on the host"
            )));
        }
        if copy == Some(true) {
            return Err(refused(
                "the array is shared, and not copied; copy the result, or call numpy() for a copy on the host"
                    .to_owned(),
            ));
        }
        let is_versioned = max_version.is_some_and(|(major, _)| major >= 1);
        dlpack::capsule(py, &self.output, &self.shape, is_versioned)
    }

    /// Return the array's device in DLPack's numbering: (1, 0) for the CPU, (2, n) for CUDA device n.
    fn __dlpack_device__(&self) -> Result<(i32, i32)> {
        dlpack::device(&self.output)
    }

    /// Copy the values to a float32 numpy array.
    fn numpy<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        let mut output = py.detach(|| self.output.to_output())?;
        output.shape.clone_from(&self.shape);
        of_output(py, output)
    }

    /// Dimensions of the array.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyTuple>> {
        Ok(PyTuple::new(py, &self.shape)?)
    }

    /// Type of the values: "float32" on the CPU; on CUDA, the model's storage type "float16", "bfloat16" or "float32".
    #[getter]
    fn dtype(&self) -> &'static str {
        dlpack::type_name(self.output.element)
    }

    /// Device that holds the values: "cpu" or "cuda:N".
    #[getter]
    fn device(&self) -> String {
        match self.output.cuda_device() {
            None => "cpu".to_owned(),
            Some(nth) => format!("cuda:{nth}"),
        }
    }

    fn __repr__(&self, py: Python<'_>) -> Result<String> {
        let shape = self.shape(py)?.repr()?;
        let (dtype, device) = (self.dtype(), self.device());
        Ok(format!(
            "DeviceArray(shape={shape}, dtype={dtype}, device={device})"
        ))
    }
}

fn refused(text: String) -> Error {
    PyBufferError::new_err(text).into()
}
