use std::{error::Error, sync::OnceLock};

use rayon::{ThreadPoolBuildError, ThreadPoolBuilder};

use super::EngineError;

/// The threads that work is shared out to: those of the pool that the caller is in, else of the
/// global one, which is started at the first call.
///
/// # Errors
/// The global pool's threads cannot be started. Without this call the first work to be shared out
/// would panic.
pub fn threads() -> Result<usize, EngineError> {
    /// A pool that failed to start is not tried again by rayon.
    static STARTED: OnceLock<Result<(), String>> = OnceLock::new();
    STARTED
        .get_or_init(|| started(ThreadPoolBuilder::new().build_global()))
        .clone()
        .map_err(|problem| EngineError::Threads { problem })?;
    Ok(rayon::current_num_threads())
}

fn started(built: Result<(), ThreadPoolBuildError>) -> Result<(), String> {
    match built {
        Ok(()) => Ok(()),
        // What the system said is the source. Without one the pool is there already, as the
        // program that uses this library made it.
        Err(error) => error.source().map_or(Ok(()), |e| Err(e.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_is_there_is_no_error_and_one_that_cannot_start_is() {
        let spawn = |_: rayon::ThreadBuilder| Err(std::io::Error::other("no thread left"));
        let failed = ThreadPoolBuilder::new()
            .num_threads(1)
            .spawn_handler(spawn)
            .build();
        let failed = failed.map(drop);
        assert_eq!(started(failed), Err("no thread left".to_owned()));
        assert!(threads().is_ok_and(|n| n > 0));
        let again = ThreadPoolBuilder::new().build_global();
        assert!(again.is_err());
        assert_eq!(started(again), Ok(()));
    }
}
