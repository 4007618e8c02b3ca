//! Positioned reads and writes, which several threads can do on the same open file. Positions are byte offsets from the start of the file.

use std::{fs::File, io};

/// Fills `to` with the bytes of `file` from offset `at` on.
#[cfg(unix)]
pub(crate) fn read_at(file: &File, to: &mut [u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, to, at)
}

/// Writes `bytes` to `file` at offset `at`.
#[cfg(all(unix, feature = "serve"))]
pub(crate) fn write_at(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, at)
}

/// Fills `to` with the bytes of `file` from offset `at` on.
#[cfg(not(unix))]
pub(crate) fn read_at(file: &File, to: &mut [u8], at: u64) -> io::Result<()> {
    seek(file, at, |mut file| io::Read::read_exact(&mut file, to))
}

/// Writes `bytes` to `file` at offset `at`.
#[cfg(all(not(unix), feature = "serve"))]
pub(crate) fn write_at(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    seek(file, at, |mut file| io::Write::write_all(&mut file, bytes))
}

/// Moves the position of the file handle to `at` and runs `work`. Threads share the position, so a lock is held until `work` returns.
#[cfg(not(unix))]
fn seek(mut file: &File, at: u64, work: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
    use std::sync::{Mutex, PoisonError};
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    io::Seek::seek(&mut file, io::SeekFrom::Start(at))?;
    work(file)
}
