//! Other implementations, timed beside ours: a Python script of the project's own that runs PyTorch
//! in a process of its own and answers in JSON lines. `bench/scripts/peers.py` says what the lines are.

mod answers;
#[cfg(test)]
mod tests;

use std::{
    convert::Infallible,
    io::Read,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    str::FromStr,
    thread,
};

use miette::{IntoDiagnostic, Report};
use serde::Serialize;

pub(crate) use answers::{Answers, PeerTime};

use gemmule::cli::{say, write_file};

use answers::{printable, probe_line};

/// What the scripts share; written beside each of them, so that an installed binary has it.
const SHARED: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/peers.py"));

/// Which Python runs the peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// `python3` where it has PyTorch and PyTorch has the device; else there are no peers, and a
    /// line says why.
    Auto,
    Off,
    /// This one, or the run fails.
    Python(PathBuf),
}

impl FromStr for Choice {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "auto" => Self::Auto,
            "off" => Self::Off,
            python => Self::Python(python.into()),
        })
    }
}

/// A script that times peers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Script {
    pub name: &'static str,
    pub text: &'static str,
}

pub(crate) const KERNELS: Script = Script {
    name: "kernel_peers.py",
    text: include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/scripts/kernel_peers.py"
    )),
};

pub(crate) const ENCODER: Script = Script {
    name: "encoder_peers.py",
    text: include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/scripts/encoder_peers.py"
    )),
};

/// Why there are no peers.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoPeers {
    #[error(
        "`{}` cannot be run ({source}); give the Python that has PyTorch with --peers PYTHON",
        python.display()
    )]
    NoPython {
        python: PathBuf,
        source: std::io::Error,
    },
    #[error("`{}` ended with {status}: {said}", python.display())]
    Refused {
        python: PathBuf,
        status: ExitStatus,
        said: String,
    },
    #[error("`{}` gave no answer that names a device: {said}", python.display())]
    NoAnswer { python: PathBuf, said: String },
}

/// A Python that can time peers.
pub(crate) struct Peers {
    python: PathBuf,
    /// Holds the script, what it shares and the request.
    folder: tempfile::TempDir,
    script: &'static str,
    device: usize,
    /// Name of the device and version of PyTorch.
    pub what: String,
}

impl Peers {
    /// Asks the chosen Python. With [`Choice::Auto`] a line on standard error says why there is none.
    pub fn find(choice: &Choice, script: Script, device: usize) -> Result<Option<Self>, Report> {
        let python = match choice {
            Choice::Off => return Ok(None),
            Choice::Auto => Path::new("python3"),
            Choice::Python(python) => python,
        };
        let folder = tempfile::tempdir().into_diagnostic()?;
        for (name, text) in [("peers.py", SHARED), (script.name, script.text)] {
            write_file(&folder.path().join(name), text.as_bytes())?;
        }
        let mut peers = Self {
            python: python.to_owned(),
            folder,
            script: script.name,
            device,
            what: String::new(),
        };
        match (peers.probe(), choice) {
            (Ok(what), _) => {
                peers.what = what;
                Ok(Some(peers))
            }
            (Err(why), Choice::Auto) => {
                say(&format!("no peers beside ours: {why}"));
                Ok(None)
            }
            (Err(why), _) => Err(why).into_diagnostic(),
        }
    }

    fn probe(&self) -> Result<String, NoPeers> {
        let (answer, status, said) = self.call(&["--probe"], |out| {
            let mut answer = String::new();
            // What is not text is no answer either.
            let _ = out.take(1 << 16).read_to_string(&mut answer);
            answer
        })?;
        if !status.success() {
            return Err(NoPeers::Refused {
                python: self.python.clone(),
                status,
                said,
            });
        }
        probe_line(&answer).ok_or_else(|| NoPeers::NoAnswer {
            python: self.python.clone(),
            said: printable(&answer),
        })
    }

    /// Times what a request asks for. `items` are its parts in words; `progress` gets how many of
    /// them are done. What single peers failed with, and lines that are no answer, are among the remarks.
    pub fn time(
        &self,
        request: &impl Serialize,
        items: &[String],
        progress: &dyn Fn(usize),
    ) -> Result<Answers, Report> {
        let file = self.folder.path().join("request.json");
        write_file(&file, &serde_json::to_vec(request).into_diagnostic()?)?;
        let (mut answers, status, said) = self
            .call(&["--request", "request.json"], |out| {
                Answers::read(out, items, progress)
            })
            .into_diagnostic()?;
        if !status.success() {
            answers
                .remarks
                .push(format!("the peers ended early, with {status}: {said}"));
        }
        Ok(answers)
    }

    /// Runs the script; `read` takes what it writes. Also returns the end of its standard error.
    fn call<T>(
        &self,
        args: &[&str],
        read: impl FnOnce(ChildStdout) -> T,
    ) -> Result<(T, ExitStatus, String), NoPeers> {
        let no_python = |source| NoPeers::NoPython {
            python: self.python.clone(),
            source,
        };
        let child = Command::new(&self.python)
            .current_dir(self.folder.path())
            .arg(self.script)
            .args(["--device", &self.device.to_string()])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(no_python)?;
        let mut child = Running(child);
        let (Some(out), Some(errors)) = (child.0.stdout.take(), child.0.stderr.take()) else {
            unreachable!("both streams were asked for as pipes");
        };
        let errors = thread::spawn(move || tail(errors));
        let answer = read(out);
        let status = child.0.wait().map_err(no_python)?;
        let said = errors.join().unwrap_or_default();
        Ok((answer, status, said))
    }
}

/// A child that does not outlive what waits for it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended is not there to be killed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The last lines of a stream, which is read to its end so that its writer never waits.
fn tail(mut stream: impl Read) -> String {
    const KEPT: usize = 2000;
    let mut kept = Vec::new();
    let mut piece = [0; 4096];
    while let Ok(n @ 1..) = stream.read(&mut piece) {
        kept.extend_from_slice(&piece[..n]);
        let surplus = kept.len().saturating_sub(KEPT);
        kept.drain(..surplus);
    }
    let text = String::from_utf8_lossy(&kept);
    let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    let last = &lines[lines.len().saturating_sub(3)..];
    printable(&last.join("; "))
}
