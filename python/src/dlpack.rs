//! The structures of DLPack, with which array libraries exchange memory, and the capsules that hold them
//! (<https://dmlc.github.io/dlpack/latest/>).

use std::{
    ffi::{CStr, c_void},
    ptr,
    sync::Arc,
};

use gemmule::{DType, DeviceOutput, tensor::Element};
use pyo3::{exceptions::PyBufferError, ffi, prelude::*};

use crate::error::Result;

/// Types of devices (`DLDeviceType`).
const CPU: i32 = 1;
const CUDA: i32 = 2;
/// Codes of types (`DLDataTypeCode`).
const INT: u8 = 0;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
/// Version of the structures below, which is the first version with [`Versioned`].
const VERSION: Version = Version { major: 1, minor: 0 };
/// Names of capsules. A consumer renames the capsule, and then owns its structure.
const NAME: &CStr = c"dltensor";
const NAME_VERSIONED: &CStr = c"dltensor_versioned";

#[repr(C)]
struct Device {
    kind: i32,
    nth: i32,
}

#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    n_dims: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Unversioned {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

#[repr(C)]
struct Version {
    major: u32,
    minor: u32,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: Tensor,
}

/// A structure and all data that it points to. The structure is the first field, so that both have the same address.
#[repr(C)]
struct Owner<M> {
    managed: M,
    _shape: Box<[i64]>,
    _strides: Box<[i64]>,
    _output: Arc<DeviceOutput>,
}

/// A structure that a capsule holds.
trait Managed: Sized {
    const NAME: &'static CStr;

    fn new(tensor: Tensor, deleter: unsafe extern "C" fn(*mut Self)) -> Self;
    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)>;
}

impl Managed for Unversioned {
    const NAME: &'static CStr = NAME;

    fn new(tensor: Tensor, deleter: unsafe extern "C" fn(*mut Self)) -> Self {
        Self {
            tensor,
            context: ptr::null_mut(),
            deleter: Some(deleter),
        }
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }
}

impl Managed for Versioned {
    const NAME: &'static CStr = NAME_VERSIONED;

    fn new(tensor: Tensor, deleter: unsafe extern "C" fn(*mut Self)) -> Self {
        Self {
            version: VERSION,
            context: ptr::null_mut(),
            deleter: Some(deleter),
            flags: 0,
            tensor,
        }
    }

    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }
}

/// Frees a structure that [`capsule`] created, and releases its reference to the values.
///
/// # Safety
/// `managed` must be the structure of an [`Owner`], and must not be used afterwards.
unsafe extern "C" fn delete<M>(managed: *mut M) {
    // SAFETY: the structure is the first field of an `Owner` in a box, and this is called once for it.
    drop(unsafe { Box::from_raw(managed.cast::<Owner<M>>()) });
}

/// Frees a capsule's structure if no consumer has taken it.
///
/// # Safety
/// Must be called once, with a capsule of [`new_capsule`]. Python does this.
unsafe extern "C" fn destroy<M: Managed>(capsule: *mut ffi::PyObject) {
    // SAFETY: `capsule` is a capsule. If it still has its original name, no consumer has taken the structure, so the capsule owns it.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) == 0 {
            return;
        }
        let managed = ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()).cast::<M>();
        if let Some(deleter) = managed.as_ref().and_then(Managed::deleter) {
            deleter(managed);
        }
    }
}

/// Returns the device type and number of an output, as `__dlpack_device__` does.
pub fn device(output: &DeviceOutput) -> Result<(i32, i32)> {
    Ok(match output.cuda_device() {
        None => (CPU, 0),
        Some(nth) => (CUDA, i32::try_from(nth).map_err(|_| unknown("device"))?),
    })
}

/// Creates a capsule that shares the memory of an output, with the given dimensions. `versioned` selects the structure of DLPack 1.0.
///
/// # Errors
/// Returns an error for an element type that DLPack does not have.
///
/// # Panics
/// Panics if the dimensions have more values than the output.
pub fn capsule<'py>(
    py: Python<'py>,
    output: &Arc<DeviceOutput>,
    shape: &[u64],
    versioned: bool,
) -> Result<Bound<'py, PyAny>> {
    match versioned {
        true => new_capsule::<Versioned>(py, output, shape),
        false => new_capsule::<Unversioned>(py, output, shape),
    }
}

fn new_capsule<'py, M: Managed>(
    py: Python<'py>,
    output: &Arc<DeviceOutput>,
    shape: &[u64],
) -> Result<Bound<'py, PyAny>> {
    let values = |shape: &[u64]| shape.iter().product::<u64>();
    assert!(values(shape) <= values(&output.shape));
    let (kind, nth) = device(output)?;
    let dtype = data_type(output.element)?;
    let mut shape: Box<[i64]> = shape.iter().map(|&n| n as i64).collect();
    let mut strides = vec![1; shape.len()].into_boxed_slice();
    for at in (1..shape.len()).rev() {
        strides[at - 1] = strides[at] * shape[at];
    }
    let tensor = Tensor {
        data: output.address().cast_mut(),
        device: Device { kind, nth },
        n_dims: shape.len() as i32,
        dtype,
        shape: shape.as_mut_ptr(),
        strides: strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let owner = Box::into_raw(Box::new(Owner {
        managed: M::new(tensor, delete::<M>),
        _shape: shape,
        _strides: strides,
        _output: Arc::clone(output),
    }));
    let managed = owner.cast::<M>();
    // SAFETY: the pointer is not null, the name is static, and `destroy` frees the structure if no consumer takes it.
    let capsule = unsafe {
        let capsule = ffi::PyCapsule_New(managed.cast(), M::NAME.as_ptr(), Some(destroy::<M>));
        Bound::from_owned_ptr_or_err(py, capsule)
    };
    if capsule.is_err() {
        // SAFETY: no capsule owns the structure.
        unsafe { delete(managed) };
    }
    Ok(capsule?)
}

/// Returns the name of an element type in numpy and torch.
pub fn type_name(element: Element) -> &'static str {
    match element {
        Element::Value(DType::F32) => "float32",
        Element::Value(DType::F16) => "float16",
        Element::Value(DType::BF16) => "bfloat16",
        Element::I8 => "int8",
        Element::I32 => "int32",
        Element::I64 => "int64",
        Element::E4m3 => "float8_e4m3fn",
        Element::Scaled(_) => "packed values with scales",
    }
}

fn data_type(element: Element) -> Result<DataType> {
    let (code, bits) = match element {
        Element::Value(DType::F32) => (FLOAT, 32),
        Element::Value(DType::F16) => (FLOAT, 16),
        Element::Value(DType::BF16) => (BFLOAT, 16),
        Element::I8 => (INT, 8),
        Element::I32 => (INT, 32),
        Element::I64 => (INT, 64),
        Element::E4m3 | Element::Scaled(_) => return Err(unknown(type_name(element))),
    };
    let lanes = 1;
    Ok(DataType { code, bits, lanes })
}

fn unknown(what: &str) -> crate::error::Error {
    PyBufferError::new_err(format!(
        "the array has {what}, which DLPack 1.0 does not describe; call numpy() for a copy in float32"
    ))
    .into()
}
