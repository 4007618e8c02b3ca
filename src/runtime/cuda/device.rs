use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};

use super::error::{CudaError, During};
use crate::{
    files,
    jit::{JitError, Target},
    machine::{Live, Machine, MachineError, Served},
};

/// Properties of a device, as reported by the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    pub ordinal: usize,
    pub name: String,
    pub capability: (u32, u32),
    pub n_sms: u32,
    pub memory: u64,
    pub threads_per_sm: u32,
    pub registers_per_sm: u32,
    /// Bytes of shared memory per SM.
    pub shared_per_sm: u32,
    pub shared_per_cta: u32,
    pub l2_bytes: u64,
}

impl DeviceInfo {
    /// Returns the card description that is used to select and launch kernels, and how well the description matches this card.
    ///
    /// # Errors
    /// Returns [`MachineError::TooOld`] for a card that no kernel supports.
    pub fn machine(&self) -> Result<(Machine, Served), MachineError> {
        Machine::of(&Live {
            name: self.name.clone(),
            capability: self.capability,
            sms: self.n_sms,
            threads_per_sm: self.threads_per_sm,
            registers_per_sm: self.registers_per_sm,
            shared_per_sm: self.shared_per_sm,
            shared_per_cta: self.shared_per_cta,
            l2_bytes: self.l2_bytes,
        })
    }
}

/// CUDA components available on this machine.
#[derive(Debug)]
pub struct Presence {
    pub driver: bool,
    /// Maximum CUDA version that the driver supports, e.g. (13, 0).
    pub driver_version: Option<(i32, i32)>,
    pub devices: Vec<DeviceInfo>,
    pub cublas_lt: bool,
    /// Error if the loader path depends on the current folder. In this case, no library was loaded.
    pub refused: Option<CudaError>,
}

/// Returns an error if an entry of the loader path depends on the current folder. Loading a library from such a folder would run its code.
fn check_loader_path() -> Result<(), CudaError> {
    match files::trust::planted_library() {
        Some(why) => Err(CudaError::LoaderPath { why }),
        None => Ok(()),
    }
}

/// Returns the CUDA components of this machine. A missing component is not an error. The presence of each library is checked before any
/// call, because cudarc panics on a call into a missing library.
pub fn probe() -> Presence {
    if let Err(refused) = check_loader_path() {
        return Presence {
            driver: false,
            driver_version: None,
            devices: Vec::new(),
            cublas_lt: false,
            refused: Some(refused),
        };
    }
    // SAFETY: the call only loads the library and unloads it again.
    let driver = unsafe { sys::is_culib_present() };
    // SAFETY: the call only loads the library and unloads it again.
    let cublas_lt = unsafe { cudarc::cublaslt::sys::is_culib_present() };
    let mut presence = Presence {
        driver,
        driver_version: None,
        devices: Vec::new(),
        cublas_lt,
        refused: None,
    };
    if !driver {
        return presence;
    }
    let mut version = 0;
    // SAFETY: the library is present, and `version` is a valid location for the result.
    if unsafe { sys::cuDriverGetVersion(&mut version) } == sys::CUresult::CUDA_SUCCESS {
        presence.driver_version = Some((version / 1000, version % 1000 / 10));
    }
    let n_devices = CudaContext::device_count().map_or(0, |n| usize::try_from(n).unwrap_or(0));
    presence.devices = (0..n_devices)
        .filter_map(|i| Device::open(i).ok().map(|d| d.info().clone()))
        .collect();
    presence
}

/// An open device.
#[derive(Clone)]
pub struct Device {
    context: Arc<CudaContext>,
    info: DeviceInfo,
}

impl Device {
    /// Opens device `ordinal`, counted from 0.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        check_loader_path()?;
        // SAFETY: the call only loads the library and unloads it again.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        let found = CudaContext::device_count().map_err(|_| CudaError::NoDevice)?;
        let found = usize::try_from(found).unwrap_or(0);
        if found == 0 {
            return Err(CudaError::NoDevice);
        }
        if ordinal >= found {
            return Err(CudaError::NoSuchDevice {
                wanted: ordinal,
                found,
            });
        }
        let context = CudaContext::new(ordinal).during(|| format!("open device {ordinal}"))?;
        // SAFETY: gemmule creates no cudarc slices. It orders memory accesses and streams manually.
        unsafe { context.disable_event_tracking() };
        let about = || format!("describe device {ordinal}");
        let (major, minor) = context.compute_capability().during(about)?;
        use sys::CUdevice_attribute as Attribute;
        let attribute = |which| {
            context
                .attribute(which)
                .during(about)
                .map(|value| value as u32)
        };
        let info = DeviceInfo {
            ordinal,
            name: context.name().during(about)?,
            capability: (major as u32, minor as u32),
            n_sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory: context.total_mem().during(about)? as u64,
            threads_per_sm: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
            )?,
            registers_per_sm: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR,
            )?,
            shared_per_sm: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )?,
            shared_per_cta: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
        };
        Ok(Self { context, info })
    }

    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Returns the target for which kernels are compiled, or an error for a card older than sm_80.
    pub fn target(&self) -> Result<Target, CudaError> {
        let (major, minor) = self.info.capability;
        Ok(Target::for_capability(major, minor).map_err(JitError::from)?)
    }

    /// Returns the free and the total bytes of device memory.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        let (free, total) = self
            .context
            .mem_get_info()
            .during(|| "query the free memory".into())?;
        Ok((free as u64, total as u64))
    }
}
