//! Comparison with other implementations, the peers: a Python script of this project runs PyTorch
//! in a separate process and prints JSON lines. `bench/scripts/peers.py` documents the format of
//! these lines.

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

/// Code that the scripts share. The binary contains it, and writes it to the folder of each script that it runs.
const SHARED: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/peers.py"));

/// The Python interpreter that runs the peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// `python3`, if it has PyTorch and PyTorch supports the device. Otherwise there are no peers, and a message states the reason.
    Auto,
    Off,
    /// The Python at this path. If it cannot run the peers, the command fails.
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

/// Reason why a Python cannot time peers.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoPeers {
    #[error(
        "`{}` cannot be run ({source}); use --peers PYTHON with a Python that has PyTorch",
        python.display()
    )]
    NoPython {
        python: PathBuf,
        source: std::io::Error,
    },
    #[error("`{}` ended with {status}: {stderr}", python.display())]
    Refused {
        python: PathBuf,
        status: ExitStatus,
        stderr: String,
    },
    #[error("`{}` did not report a device: {output}", python.display())]
    NoAnswer { python: PathBuf, output: String },
}

/// A Python that can time peers.
pub(crate) struct Peers {
    python: PathBuf,
    /// Folder with the script, the shared code and the request.
    folder: tempfile::TempDir,
    script: &'static str,
    device: usize,
    /// Name of the device and version of PyTorch.
    pub what: String,
}

impl Peers {
    /// Probes the chosen Python. If the `python3` of [`Choice::Auto`] cannot be used, prints the reason to standard error and returns
    /// `None`.
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
                say(&format!("no comparison with peers: {why}"));
                Ok(None)
            }
            (Err(why), _) => Err(why).into_diagnostic(),
        }
    }

    fn probe(&self) -> Result<String, NoPeers> {
        let (answer, status, stderr) = self.call(&["--probe"], |out| {
            let mut answer = String::new();
            // Ignore an error of reading. Output with invalid UTF-8 is then refused below, because it is not a valid response.
            let _ = out.take(1 << 16).read_to_string(&mut answer);
            answer
        })?;
        if !status.success() {
            return Err(NoPeers::Refused {
                python: self.python.clone(),
                status,
                stderr,
            });
        }
        probe_line(&answer).ok_or_else(|| NoPeers::NoAnswer {
            python: self.python.clone(),
            output: printable(&answer),
        })
    }

    /// Times the items of a request. `items` describes them, and `progress` receives the number of
    /// finished items. Failures of single peers and invalid lines become remarks.
    pub fn time(
        &self,
        request: &impl Serialize,
        items: &[String],
        progress: &dyn Fn(usize),
    ) -> Result<Answers, Report> {
        let file = self.folder.path().join("request.json");
        write_file(&file, &serde_json::to_vec(request).into_diagnostic()?)?;
        let (mut answers, status, stderr) = self
            .call(&["--request", "request.json"], |out| {
                Answers::read(out, items, progress)
            })
            .into_diagnostic()?;
        if !status.success() {
            answers
                .remarks
                .push(format!("the peers ended early, with {status}: {stderr}"));
        }
        Ok(answers)
    }

    /// Runs the script and passes its output to `read`. Also returns the end of its standard error.
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
        let stderr = errors.join().unwrap_or_default();
        Ok((answer, status, stderr))
    }
}

/// A child process that is killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Killing fails only if the process has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the last lines of a stream. Reads it to the end, so that the writer never blocks.
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
