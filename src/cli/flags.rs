//! Command-line options that fix an error of the library.
//!
//! Errors of the library do not name command-line options, because programs that embed the library have none. The command line adds the
//! options as the help below an error.

use miette::Report;

use crate::{
    EngineError,
    jit::{JitError, TargetError},
    runtime::cuda::CudaError,
};

/// Returns the help for an error; `None` if no option fixes it.
pub(super) fn help(error: &Report) -> Option<String> {
    let error = error.downcast_ref::<EngineError>()?;
    Some(match error {
        #[cfg(feature = "hub")]
        EngineError::TwoModels { .. } => "leave --weights out".to_owned(),
        #[cfg(feature = "hub")]
        EngineError::FolderOnHub { model } => {
            format!("`--model {model}`, without --weights, fetches it from the hub")
        }
        EngineError::TuneOnCpu { .. } => "leave --tune and --timings out".to_owned(),
        EngineError::TuneArtifact { .. } => {
            "give --tune or --timings to `gemmule compile`".to_owned()
        }
        EngineError::TuneInvariant => "leave --invariant out, or --tune and --timings".to_owned(),
        EngineError::CardOfOtherTarget { .. } => "leave --card or --arch out".to_owned(),
        EngineError::ArtifactAttention { asked, .. } => {
            format!("`gemmule compile --attention {asked}`")
        }
        EngineError::ArtifactInvariant { .. } => "`gemmule compile --invariant`".to_owned(),
        EngineError::LeftOut { .. } => "--allow-unused-layers leaves them out".to_owned(),
        EngineError::SeveralScores { .. } => {
            "`gemmule run --pair` prints all scores, and `gemmule classify` scores single texts"
                .to_owned()
        }
        EngineError::Threads { .. } => "--threads sets their number".to_owned(),
        EngineError::CpuOnly { .. } => "--threads belongs to --device cpu".to_owned(),
        EngineError::Jit(JitError::Target(TargetError::CardTooOld { .. }))
        | EngineError::Jit(JitError::Target(TargetError::NoTargetForCard { .. }))
        | EngineError::Cuda(CudaError::Jit(JitError::Target(_))) => {
            "--device cpu runs without the card".to_owned()
        }
        _ => return None,
    })
}
