//! Compilation of one source with the NVRTC library.

use std::ffi::{CString, c_char};
use std::fmt;
use std::path::{Path, PathBuf};

use super::ffi::{Api, ERROR_COMPILATION, Handle, Loaded, SUCCESS, Status};
use super::{Cubin, JitError, Looked, Source, Surroundings, Target};
use super::{diagnose, locate, report};

/// The CUDA run-time compiler.
///
/// The library stays loaded until the process ends, even if this value is dropped. It needs neither a GPU nor a driver. Several threads can
/// compile at the same time.
#[derive(Clone)]
pub struct Nvrtc {
    api: Api,
    path: PathBuf,
    version: (i32, i32),
    archs: Vec<i32>,
    looked: Vec<Looked>,
}

/// Returns the options for every kernel, in order. They are part of the cache key.
///
/// Fast math is off: a kernel that wants an approximation uses it explicitly. There is no include path, because the sources have no
/// includes. The assembler writes its report to the log. From NVRTC 12.4 on, `--minimal` omits NVRTC's own declarations of textures and
/// runtime functions. Kernels do not use them, and parsing them takes time for each source.
pub fn options(target: Target, version: (i32, i32)) -> Vec<String> {
    const FIRST_WITH_MINIMAL: (i32, i32) = (12, 4);
    let mut options = vec![
        "-std=c++17".to_owned(),
        format!("--gpu-architecture={target}"),
        "--ptxas-options=-v".to_owned(),
        "--ptxas-options=--warn-on-spills".to_owned(),
    ];
    if version >= FIRST_WITH_MINIMAL {
        options.push("--minimal".to_owned());
    }
    options
}

impl Nvrtc {
    /// Searches for NVRTC and loads the first usable one, in this order:
    ///
    /// 1. the file or folder in `GEMMULE_NVRTC`; if it is set, nothing else is tried;
    /// 2. the loader's path: `libnvrtc.so.13`, `libnvrtc.so.12`, `libnvrtc.so`; skipped if
    ///    `LD_LIBRARY_PATH` has an empty or relative entry whose folder contains such a library;
    /// 3. the usual CUDA folders: `lib64` and `lib` of `$CUDA_PATH` and `$CUDA_HOME`, then of
    ///    `/usr/local/cuda`, `/usr/local/cuda-*` (the newest first), `/opt/cuda`;
    /// 4. Python environments, where `pip install nvidia-cuda-nvrtc` installs it: `$VIRTUAL_ENV`,
    ///    `$CONDA_PREFIX`, and the import path of `python3`.
    ///
    /// Loading a library runs its code. Paths relative to the current folder are therefore not
    /// searched, and a file that another user (except root) could change is not opened. The file and
    /// every folder above it must belong to the user or to root, and must not be writable by the
    /// group or by others. The group may write to a file named by `GEMMULE_NVRTC`. The search log
    /// lists the places that were rejected.
    ///
    /// # Errors
    /// Returns [`JitError::NvrtcMissing`] or [`JitError::NvrtcChoice`], which list every place that
    /// was searched.
    pub fn find() -> Result<Nvrtc, JitError> {
        Nvrtc::find_in(&Surroundings::of_this_process())
    }

    /// Like [`Nvrtc::find`], with explicit search inputs.
    ///
    /// # Errors
    /// Returns the errors of [`Nvrtc::find`].
    pub fn find_in(surroundings: &Surroundings) -> Result<Nvrtc, JitError> {
        let (loaded, looked) = locate::search(surroundings)?;
        Ok(Nvrtc::from_loaded(loaded, looked))
    }

    /// Loads NVRTC from `path` without checking the owner of the file. If `path` is a bare file name, the dynamic loader searches for it.
    ///
    /// # Errors
    /// Returns [`JitError::NvrtcUnusable`] if the file is not an NVRTC that can be loaded.
    pub fn at(path: &Path) -> Result<Nvrtc, JitError> {
        match Api::load(path) {
            Ok(loaded) => Ok(Nvrtc::from_loaded(loaded, Vec::new())),
            Err(why) => Err(JitError::NvrtcUnusable {
                path: path.to_owned(),
                why,
            }),
        }
    }

    fn from_loaded(loaded: Loaded, looked: Vec<Looked>) -> Nvrtc {
        let Loaded {
            api,
            path,
            version,
            archs,
        } = loaded;
        Nvrtc {
            api,
            path,
            version,
            archs,
            looked,
        }
    }

    /// Returns the path of the library.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the version as (major, minor), for example (13, 0).
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Returns the places that were searched, in order. NVRTC was found in the last place. Empty after [`Nvrtc::at`].
    pub fn search_log(&self) -> &[Looked] {
        &self.looked
    }

    /// Returns the targets that this library can compile for.
    pub fn targets(&self) -> Vec<Target> {
        Target::ALL
            .into_iter()
            .filter(|target| self.check_target(*target).is_ok())
            .collect()
    }

    /// Checks that this library can compile for `target`.
    ///
    /// # Errors
    /// Returns [`JitError::NvrtcTooOld`] or [`JitError::TargetDropped`] if the library is too old or too new for the target.
    pub fn check_target(&self, target: Target) -> Result<(), JitError> {
        check_target(&self.path, self.version, &self.archs, target)
    }

    /// Compiles one kernel.
    ///
    /// # Errors
    /// Returns an error if the compilation fails:
    /// - [`JitError::Compile`] if the source is invalid;
    /// - [`JitError::NotOneKernel`] if the source does not define exactly one kernel, named [`Source::symbol`];
    /// - [`JitError::NulInSource`] if the source contains a NUL byte;
    /// - the errors of [`Nvrtc::check_target`] if the library does not support `target`;
    /// - [`JitError::Nvrtc`] if the library itself fails.
    pub fn compile(&self, source: &Source, target: Target) -> Result<Cubin, JitError> {
        self.check_target(target)?;
        let program = Program::create(self, source)?;
        let status = program.compile(&options(target, self.version));
        let log = program.log()?;
        match status {
            SUCCESS => {}
            ERROR_COMPILATION => {
                let ptx = program.ptx();
                let error =
                    diagnose::compile_error(source, target, self.version, &log, ptx.as_deref());
                return Err(error);
            }
            _ => return Err(self.failure("nvrtcCompileProgram", status, log)),
        }
        let bytes = program.cubin()?;
        check_entry(&source.symbol, &log, &bytes)?;
        for line in log.lines().filter(|line| line.contains("warning")) {
            tracing::debug!(symbol = source.symbol, %target, "{line}");
        }
        let report = report::parse_report(&log);
        Ok(Cubin {
            symbol: source.symbol.clone(),
            target,
            bytes,
            report,
        })
    }

    fn check(&self, call: &'static str, status: Status) -> Result<(), JitError> {
        if status == SUCCESS {
            Ok(())
        } else {
            Err(self.failure(call, status, String::new()))
        }
    }

    fn failure(&self, call: &'static str, status: Status, log: String) -> JitError {
        let message = self.api.describe(status);
        JitError::Nvrtc {
            path: self.path.clone(),
            call,
            message,
            log: log.trim_end().to_owned(),
        }
    }
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvrtc")
            .field("path", &self.path)
            .field("version", &self.version)
            .finish()
    }
}

/// Checks that NVRTC of this version compiles for `target`. `archs` are the architectures that it
/// lists.
fn check_target(
    path: &Path,
    version: (i32, i32),
    archs: &[i32],
    target: Target,
) -> Result<(), JitError> {
    let needed = target.first_nvrtc();
    if version < needed {
        let path = path.to_owned();
        return Err(JitError::NvrtcTooOld {
            path,
            version,
            target,
            needed,
        });
    }
    if !archs.contains(&target.arch_number()) {
        let (path, known) = (path.to_owned(), archs.to_vec());
        return Err(JitError::TargetDropped {
            path,
            version,
            target,
            known,
        });
    }
    Ok(())
}

/// Checks that the compiled source contains the kernel `symbol` and no other.
fn check_entry(symbol: &str, log: &str, cubin: &[u8]) -> Result<(), JitError> {
    let found = report::entry_functions(log);
    // The section with a kernel's code is named after the kernel. If the log of a newer assembler names no kernel, this section alone
    // decides.
    let section = format!(".text.{symbol}\0");
    let present = cubin
        .windows(section.len())
        .any(|bytes| bytes == section.as_bytes());
    if present && (found.is_empty() || found == [symbol]) {
        return Ok(());
    }
    Err(JitError::NotOneKernel {
        symbol: symbol.to_owned(),
        found,
    })
}

/// An `nvrtcProgram`, destroyed on drop.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: Handle,
}

impl<'a> Program<'a> {
    fn create(nvrtc: &'a Nvrtc, source: &Source) -> Result<Program<'a>, JitError> {
        let c_string = |text: &str| {
            CString::new(text).map_err(|nul| JitError::NulInSource {
                symbol: source.symbol.clone(),
                at: nul.nul_position(),
            })
        };
        let (text, name) = (
            c_string(&source.text)?,
            c_string(&diagnose::file_name(source))?,
        );
        let mut handle = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: both strings are NUL-terminated and outlive the call, which copies them. There
        // are no headers, so their two lists may be null.
        let status =
            unsafe { (nvrtc.api.create)(&mut handle, text.as_ptr(), name.as_ptr(), 0, none, none) };
        nvrtc.check("nvrtcCreateProgram", status)?;
        Ok(Program { nvrtc, handle })
    }

    fn compile(&self, options: &[String]) -> Status {
        let options: Vec<CString> = options
            .iter()
            .map(|option| CString::new(option.as_str()).expect("`options` writes no NUL"))
            .collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let n_options = i32::try_from(pointers.len()).expect("`options` writes a handful");
        // SAFETY: the program is live; the list holds `n_options` NUL-terminated strings that
        // outlive the call.
        unsafe { (self.nvrtc.api.compile)(self.handle, n_options, pointers.as_ptr()) }
    }

    fn log(&self) -> Result<String, JitError> {
        let api = &self.nvrtc.api;
        let mut size = 0;
        // SAFETY: the program is live and `size` is a live integer.
        let status = unsafe { (api.log_size)(self.handle, &mut size) };
        self.nvrtc.check("nvrtcGetProgramLogSize", status)?;
        let mut bytes = vec![0u8; size];
        // SAFETY: the library writes `size` bytes, including the NUL, and `bytes` has this length.
        let status = unsafe { (api.log)(self.handle, bytes.as_mut_ptr().cast()) };
        self.nvrtc.check("nvrtcGetProgramLog", status)?;
        Ok(text(&bytes))
    }

    /// Returns the PTX, which is the input of the assembler; `None` if the compilation did not get
    /// that far.
    fn ptx(&self) -> Option<String> {
        let api = &self.nvrtc.api;
        let mut size = 0;
        // SAFETY: as in `log`.
        let status = unsafe { (api.ptx_size)(self.handle, &mut size) };
        if status != SUCCESS || size == 0 {
            return None;
        }
        let mut bytes = vec![0u8; size];
        // SAFETY: as in `log`.
        let status = unsafe { (api.ptx)(self.handle, bytes.as_mut_ptr().cast()) };
        (status == SUCCESS)
            .then(|| text(&bytes))
            .filter(|ptx| !ptx.is_empty())
    }

    fn cubin(&self) -> Result<Vec<u8>, JitError> {
        let api = &self.nvrtc.api;
        let mut size = 0;
        // SAFETY: as in `log`.
        let status = unsafe { (api.cubin_size)(self.handle, &mut size) };
        self.nvrtc.check("nvrtcGetCUBINSize", status)?;
        let mut bytes = vec![0u8; size];
        // SAFETY: the library writes `size` bytes, and `bytes` has this length.
        let status = unsafe { (api.cubin)(self.handle, bytes.as_mut_ptr().cast()) };
        self.nvrtc.check("nvrtcGetCUBIN", status)?;
        Ok(bytes)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle came from `nvrtcCreateProgram` and is destroyed only here.
        let status = unsafe { (self.nvrtc.api.destroy)(&mut self.handle) };
        if status != SUCCESS {
            let error = self.nvrtc.api.describe(status);
            tracing::warn!(error, "nvrtcDestroyProgram failed; its memory is lost");
        }
    }
}

/// Returns the text before the first NUL byte.
fn text(bytes: &[u8]) -> String {
    let end = bytes
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Architectures that NVRTC 12.4 and 13.0 list.
    const ARCHS_12_4: [i32; 14] = [50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90];
    const ARCHS_13_0: [i32; 12] = [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121];

    #[test]
    fn nvrtc_13_0_knows_every_target() {
        for target in Target::ALL {
            check_target(Path::new("libnvrtc.so.13"), (13, 0), &ARCHS_13_0, target).unwrap();
        }
    }

    #[test]
    fn an_nvrtc_older_than_the_target_is_named_with_its_version() {
        let path = Path::new("/usr/local/cuda-12.4/lib64/libnvrtc.so.12");
        check_target(path, (12, 4), &ARCHS_12_4, Target::Sm90a).unwrap();
        insta::assert_snapshot!(
            check_target(path, (12, 4), &ARCHS_12_4, Target::Sm120).unwrap_err(),
            @"NVRTC 12.4 (/usr/local/cuda-12.4/lib64/libnvrtc.so.12) is older than the target sm_120, which needs 12.8 or newer. Install a newer one with `pip install nvidia-cuda-nvrtc`, or set GEMMULE_NVRTC to one"
        );
        // NVRTC 11.8 lists 90, but supports only sm_90.
        assert!(matches!(
            check_target(path, (11, 8), &[80, 90], Target::Sm90a),
            Err(JitError::NvrtcTooOld {
                needed: (12, 0),
                ..
            })
        ));
    }

    #[test]
    fn an_nvrtc_that_dropped_the_target_lists_its_targets() {
        insta::assert_snapshot!(
            check_target(Path::new("/x/libnvrtc.so.16"), (16, 0), &[90, 100], Target::Sm80).unwrap_err(),
            @"NVRTC 16.0 (/x/libnvrtc.so.16) does not compile for sm_80; it compiles for sm_90, sm_100. Set GEMMULE_NVRTC to one that does, such as 13.0"
        );
    }

    #[test]
    fn options_name_the_target_and_disable_fast_maths() {
        let options = options(Target::Sm90a, (13, 0));
        assert!(options.contains(&"--gpu-architecture=sm_90a".to_owned()));
        assert!(
            !options
                .iter()
                .any(|option| option.contains("fast") || option.starts_with("-I"))
        );
        assert!(options.contains(&"--minimal".to_owned()));
        let before = super::options(Target::Sm90a, (12, 3));
        assert_eq!(before, options[..options.len() - 1]); // NVRTC 12.3 does not know the last option.
    }

    #[test]
    fn a_unit_must_hold_the_kernel_it_is_named_after() {
        let log = "ptxas info    : Compiling entry function 'k' for 'sm_80'\n";
        check_entry("k", log, b"\0.text.k\0").unwrap();
        check_entry("k", "another wording", b"\0.text.k\0").unwrap();
        assert!(check_entry("k", "another wording", b"\0.text.other\0").is_err());
        insta::assert_snapshot!(
            check_entry("gelu", log, b"\0.text.k\0").unwrap_err(),
            @r#"the source of the kernel `gelu` should define `extern "C" __global__ void gelu(…)` and no other kernel; it defines k"#
        );
        insta::assert_snapshot!(
            check_entry("gelu", "", b"").unwrap_err(),
            @r#"the source of the kernel `gelu` should define `extern "C" __global__ void gelu(…)` and no other kernel; it defines none"#
        );
    }
}
