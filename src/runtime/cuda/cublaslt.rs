//! GEMMs of cuBLASLt, the baseline of the benchmark if cuBLASLt is installed.

use std::{ffi::c_void, sync::Arc};

use cudarc::{
    cublaslt::{
        result::{self, CublasError},
        sys as lt,
    },
    driver::{CudaContext, sys},
};

use super::{
    device::Device,
    error::{CudaError, During},
    memory::Buffer,
};
use crate::tensor::DType;

/// Bytes of workspace that NVIDIA recommends for Hopper (cuBLAS documentation, `cublasSetWorkspace`).
const WORKSPACE: usize = 32 << 20;

/// A cuBLASLt handle and its workspace. All launches of a handle share the workspace, so they must be on one stream.
pub(super) struct CublasLt {
    context: Arc<CudaContext>,
    handle: lt::cublasLtHandle_t,
    workspace: Buffer,
}

/// `out [rows, n] = x [rows, k] · weight [n, k]ᵀ`, all row-major, accumulated in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MatmulShape {
    pub(super) rows: u64,
    pub(super) n: u64,
    pub(super) k: u64,
    /// Element type of `x` and `weight`.
    pub(super) dtype: DType,
    /// Element type of `out`: `dtype` or f32.
    pub(super) out: DType,
}

/// A GEMM of one shape, with the algorithms that cuBLASLt proposes, best first.
pub(super) struct Matmul<'library> {
    lt: &'library CublasLt,
    description: Description,
    weight: Layout,
    x: Layout,
    out: Layout,
    algorithms: Vec<lt::cublasLtMatmulAlgo_t>,
}

impl CublasLt {
    /// Creates a handle. Returns [`CudaError::NoCublasLt`] if the library is not installed.
    pub(super) fn open(device: &Device) -> Result<Self, CudaError> {
        // cudarc panics on a call into a missing library. SAFETY: the call only loads the library and unloads it again.
        if !unsafe { lt::is_culib_present() } {
            return Err(CudaError::NoCublasLt);
        }
        let context = Arc::clone(device.context());
        context
            .bind_to_thread()
            .during(|| "use the device on this thread".into())?;
        let workspace = Buffer::new(device, WORKSPACE as u64, "the workspace of cuBLASLt")?;
        let handle = result::create_handle().during(|| "open a handle".into())?;
        Ok(Self {
            context,
            handle,
            workspace,
        })
    }

    /// Requests at most `most` algorithms from cuBLASLt, which returns none if it does not support the shape.
    pub(super) fn matmul(&self, shape: MatmulShape, most: usize) -> Result<Matmul<'_>, CudaError> {
        self.context
            .bind_to_thread()
            .during(|| "use the device on this thread".into())?;
        let describe = || format!("describe {shape:?}");
        let (operand, out) = (data_type(shape.dtype), data_type(shape.out));
        // cuBLASLt is column-major, so it sees the transpose of a row-major matrix: outᵀ [n, rows] = (weightᵀ [k, n])ᵀ · xᵀ [k, rows].
        let mut matmul = Matmul {
            lt: self,
            description: Description::new().during(describe)?,
            weight: Layout::new(operand, shape.k, shape.n).during(describe)?,
            x: Layout::new(operand, shape.k, shape.rows).during(describe)?,
            out: Layout::new(out, shape.n, shape.rows).during(describe)?,
            algorithms: Vec::new(),
        };
        matmul.algorithms = matmul
            .propose(most)
            .during(|| format!("find algorithms for {shape:?}"))?;
        Ok(matmul)
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: `open` created the handle, it is destroyed once, and every `Matmul` borrows the library. A drop cannot return an
            // error.
            let _ = unsafe { result::destroy_handle(self.handle) };
        }
    }
}

impl Matmul<'_> {
    pub(super) fn n_algorithms(&self) -> usize {
        self.algorithms.len()
    }

    fn propose(&self, most: usize) -> Result<Vec<lt::cublasLtMatmulAlgo_t>, CublasError> {
        let preference = Preference::new()?;
        // SAFETY: all zeros is a valid value: no algorithm, and the status of success.
        let none: lt::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let mut found = vec![none; most];
        let mut n_found = 0;
        // SAFETY: the descriptors are valid, and `found` has room for the requested number of results.
        let status = unsafe {
            lt::cublasLtMatmulAlgoGetHeuristic(
                self.lt.handle,
                self.description.0,
                self.weight.0,
                self.x.0,
                self.out.0,
                self.out.0,
                preference.0,
                i32::try_from(most).unwrap_or(i32::MAX),
                found.as_mut_ptr(),
                &mut n_found,
            )
        };
        if status == lt::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        status.result()?;
        found.truncate(usize::try_from(n_found).unwrap_or(0));
        Ok(found
            .into_iter()
            .filter(|f| f.state.result().is_ok() && f.workspaceSize <= WORKSPACE)
            .map(|f| f.algo)
            .collect())
    }

    /// Launches the algorithm with index `algorithm`, which must be less than [`Matmul::n_algorithms`].
    ///
    /// # Safety
    /// The addresses must be multiples of 256, in device memory that holds the operands of the shape. Until the launch is done, nothing
    /// else may write to this memory or use this [`CublasLt`] on another stream.
    pub(super) unsafe fn launch(
        &self,
        stream: sys::CUstream,
        algorithm: usize,
        x: sys::CUdeviceptr,
        weight: sys::CUdeviceptr,
        out: sys::CUdeviceptr,
    ) -> Result<(), CudaError> {
        let (one, zero) = (1f32, 0f32);
        // SAFETY: the descriptors are valid. The factors alpha and beta are passed as host pointers (the default pointer mode), and the
        // call reads them before it returns. The caller guarantees the addresses.
        unsafe {
            result::matmul(
                self.lt.handle,
                self.description.0,
                std::ptr::from_ref(&one).cast(),
                std::ptr::from_ref(&zero).cast(),
                weight as *const c_void,
                self.weight.0,
                x as *const c_void,
                self.x.0,
                out as *const c_void,
                self.out.0,
                out as *mut c_void,
                self.out.0,
                &self.algorithms[algorithm],
                self.lt.workspace.start() as *mut c_void,
                WORKSPACE,
                stream.cast(),
            )
        }
        .during(|| "launch a GEMM".into())
    }
}

const fn data_type(dtype: DType) -> lt::cudaDataType {
    match dtype {
        DType::F16 => lt::cudaDataType::CUDA_R_16F,
        DType::BF16 => lt::cudaDataType::CUDA_R_16BF,
        DType::F32 => lt::cudaDataType::CUDA_R_32F,
    }
}

/// Operation descriptor: the first operand is transposed, and accumulation is in f32 rather than TF32.
struct Description(lt::cublasLtMatmulDesc_t);

impl Description {
    fn new() -> Result<Self, CublasError> {
        let description = Self(result::create_matmul_desc(
            lt::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            lt::cudaDataType::CUDA_R_32F,
        )?);
        /// Value of `CUBLAS_OP_T`, which the bindings of cuBLASLt do not define.
        const TRANSPOSED: i32 = 1;
        // SAFETY: the descriptor is valid, and the attribute has type i32.
        unsafe {
            result::set_matmul_desc_attribute(
                description.0,
                lt::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                std::ptr::from_ref(&TRANSPOSED).cast(),
                size_of::<i32>(),
            )?;
        }
        Ok(description)
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: `new` created the descriptor, and it is destroyed once.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// A column-major matrix whose leading dimension is its number of rows.
struct Layout(lt::cublasLtMatrixLayout_t);

impl Layout {
    fn new(dtype: lt::cudaDataType, rows: u64, columns: u64) -> Result<Self, CublasError> {
        let pitch = i64::try_from(rows).unwrap_or(i64::MAX);
        result::create_matrix_layout(dtype, rows, columns, pitch).map(Self)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: `new` created the descriptor, and it is destroyed once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// Limits of the search for algorithms: only the workspace size. Any split-K reduction scheme is allowed.
struct Preference(lt::cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Self, CublasError> {
        let preference = Self(result::create_matmul_pref()?);
        // SAFETY: the preference is valid, and the attribute has type u64.
        unsafe {
            result::set_matmul_pref_attribute(
                preference.0,
                lt::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                std::ptr::from_ref(&(WORKSPACE as u64)).cast(),
                size_of::<u64>(),
            )?;
        }
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: `new` created the descriptor, and it is destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
