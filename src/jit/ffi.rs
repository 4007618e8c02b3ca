//! Bindings to the functions of `nvrtc.h`, loaded at run time.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::files::trust::{self, Writers};

/// `nvrtcProgram`.
pub(super) type Handle = *mut c_void;
/// `nvrtcResult`.
pub(super) type Status = c_int;

/// `NVRTC_SUCCESS`.
pub(super) const SUCCESS: Status = 0;
/// `NVRTC_ERROR_COMPILATION`: the source is invalid, and the log says why.
pub(super) const ERROR_COMPILATION: Status = 6;

type SizeOf = unsafe extern "C" fn(Handle, *mut usize) -> Status;
type Fill = unsafe extern "C" fn(Handle, *mut c_char) -> Status;

/// Functions of a loaded NVRTC library, which is never unloaded.
#[derive(Clone, Copy)]
pub(super) struct Api {
    pub create: unsafe extern "C" fn(
        *mut Handle,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    pub compile: unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> Status,
    pub destroy: unsafe extern "C" fn(*mut Handle) -> Status,
    pub log_size: SizeOf,
    pub log: Fill,
    pub ptx_size: SizeOf,
    pub ptx: Fill,
    pub cubin_size: SizeOf,
    pub cubin: Fill,
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    n_archs: unsafe extern "C" fn(*mut c_int) -> Status,
    archs: unsafe extern "C" fn(*mut c_int) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
}

/// A loaded NVRTC library that defines every function of [`Api`].
pub(super) struct Loaded {
    pub api: Api,
    /// Path of the library.
    pub path: PathBuf,
    /// Version as (major, minor).
    pub version: (i32, i32),
    /// Architectures that the library compiles for, as numbers such as 90.
    pub archs: Vec<i32>,
}

impl Api {
    /// Loads `name`: a path, or a bare file name that the loader searches for.
    ///
    /// # Errors
    /// Returns the loader's message, or the name of a missing function, for display.
    pub(super) fn load(name: &Path) -> Result<Loaded, String> {
        Api::load_as(name, name, Writers::Nobody)
    }

    /// Loads the file `real`, which messages call `name`. The caller has resolved symbolic links
    /// and checked the result, so a link that is changed afterwards has no effect. `besides` are the users, in addition to this user and
    /// root, who may write to NVRTC's companion library (`libnvrtc-builtins`).
    ///
    /// # Errors
    /// Returns the errors of [`Api::load`].
    pub(super) fn load_as(name: &Path, real: &Path, besides: Writers) -> Result<Loaded, String> {
        // SAFETY: the caller names an NVRTC, whose initializers have no preconditions. Any other
        // library would run its initializers, as if it were linked.
        let library = unsafe { Library::new(real) }.map_err(|error| {
            // The dynamic loader's message is the `source()` of libloading's error. Remove the
            // library's name from its start, because the caller also shows the name.
            let why = std::error::Error::source(&error)
                .map_or_else(|| error.to_string(), ToString::to_string);
            let prefix = format!("{}: ", real.display());
            why.strip_prefix(&prefix).unwrap_or(&why).to_owned()
        })?;

        fn take<T: Copy>(library: &Library, name: &'static CStr) -> Result<T, String> {
            // SAFETY: `nvrtc.h` declares each function with the type of the corresponding field in
            // `Api`. The types have not changed since 11.2, the first version that has all
            // functions.
            unsafe { library.get::<T>(name.to_bytes_with_nul()) }
                .map(|symbol| *symbol)
                .map_err(|_| {
                    let name = name.to_string_lossy();
                    format!("it has no function `{name}`, so it is not NVRTC 11.2 or newer")
                })
        }
        let api = Api {
            version: take(&library, c"nvrtcVersion")?,
            create: take(&library, c"nvrtcCreateProgram")?,
            compile: take(&library, c"nvrtcCompileProgram")?,
            destroy: take(&library, c"nvrtcDestroyProgram")?,
            log_size: take(&library, c"nvrtcGetProgramLogSize")?,
            log: take(&library, c"nvrtcGetProgramLog")?,
            ptx_size: take(&library, c"nvrtcGetPTXSize")?,
            ptx: take(&library, c"nvrtcGetPTX")?,
            cubin_size: take(&library, c"nvrtcGetCUBINSize")?,
            cubin: take(&library, c"nvrtcGetCUBIN")?,
            n_archs: take(&library, c"nvrtcGetNumSupportedArchs")?,
            archs: take(&library, c"nvrtcGetSupportedArchs")?,
            error_string: take(&library, c"nvrtcGetErrorString")?,
        };
        // The library stays loaded: the function pointers in `Api` are copied freely, and unloading
        // a compiler with per-thread state is risky.
        std::mem::forget(library);

        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are to live integers.
        api.check(
            unsafe { (api.version)(&mut major, &mut minor) },
            "nvrtcVersion",
        )?;
        // If the name has no folder, the loader chose the file. Ask for its path.
        let bare = name
            .parent()
            .is_none_or(|folder| folder.as_os_str().is_empty());
        let path = if bare { file_of(api.version) } else { None };
        let path = path.unwrap_or_else(|| name.to_owned());
        load_builtins(&path, (major, minor), besides);
        let archs = api.supported()?;
        Ok(Loaded {
            api,
            path,
            version: (major, minor),
            archs,
        })
    }

    /// Returns NVRTC's name of an error.
    pub(super) fn describe(&self, status: Status) -> String {
        // SAFETY: any integer is allowed, and the library returns a string that is never freed.
        let text = unsafe { (self.error_string)(status) };
        if text.is_null() {
            return format!("error {status}");
        }
        // SAFETY: the pointer is not null, and the library NUL-terminates the string.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    }

    fn supported(&self) -> Result<Vec<i32>, String> {
        let mut n_archs = 0;
        // SAFETY: the pointer is to a live integer.
        self.check(
            unsafe { (self.n_archs)(&mut n_archs) },
            "nvrtcGetNumSupportedArchs",
        )?;
        let mut archs = vec![0; usize::try_from(n_archs).unwrap_or(0)];
        // SAFETY: the library writes `n_archs` integers, and `archs` has this length.
        self.check(
            unsafe { (self.archs)(archs.as_mut_ptr()) },
            "nvrtcGetSupportedArchs",
        )?;
        Ok(archs)
    }

    fn check(&self, status: Status, call: &str) -> Result<(), String> {
        if status == SUCCESS {
            return Ok(());
        }
        Err(format!("{call} failed: {}", self.describe(status)))
    }
}

/// Loads NVRTC's companion library by its full path. NVRTC itself would load it by its bare name, which fails if the library is not in the
/// loader's path, for example in a Python environment. If the companion is not next to NVRTC, this function loads nothing, and NVRTC
/// searches for it.
fn load_builtins(nvrtc: &Path, (major, minor): (i32, i32), besides: Writers) {
    let real = nvrtc.canonicalize();
    let folders = [Some(nvrtc), real.as_deref().ok()]
        .into_iter()
        .flatten()
        .filter_map(Path::parent);
    for folder in folders {
        let builtins = folder.join(format!("libnvrtc-builtins.so.{major}.{minor}"));
        if !builtins.is_file() {
            continue;
        }
        let builtins = match trust::resolve(&builtins, besides) {
            Ok(real) => real,
            Err(why) => {
                tracing::warn!("{} is not opened: {why}", builtins.display());
                continue;
            }
        };
        // SAFETY: the file is next to NVRTC and has the name that NVRTC itself would load.
        match unsafe { Library::new(&builtins) } {
            Ok(library) => return std::mem::forget(library),
            // NVRTC reports a missing companion library in its log when it needs it.
            Err(error) => tracing::warn!(path = %builtins.display(), %error, "cannot be loaded"),
        }
    }
}

/// Returns the file that contains a function, as reported by the loader.
#[cfg(unix)]
fn file_of(function: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;

    /// `Dl_info` of `dlfcn.h`.
    #[repr(C)]
    struct DlInfo {
        file: *const c_char,
        base: *mut c_void,
        symbol: *const c_char,
        address: *mut c_void,
    }
    unsafe extern "C" {
        fn dladdr(address: *const c_void, info: *mut DlInfo) -> c_int;
    }

    let null = std::ptr::null_mut();
    let mut info = DlInfo {
        file: null,
        base: null.cast(),
        symbol: null,
        address: null.cast(),
    };
    // SAFETY: the address is only looked up, and `info` is live and has the layout of the C struct.
    let found = unsafe { dladdr(function as *const c_void, &mut info) } != 0;
    if !found || info.file.is_null() {
        return None;
    }
    // SAFETY: the pointer is not null. The loader owns the string until the library is unloaded,
    // which never happens.
    let file = unsafe { CStr::from_ptr(info.file) };
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(file.to_bytes())))
}

#[cfg(not(unix))]
fn file_of(_: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status) -> Option<PathBuf> {
    None
}
