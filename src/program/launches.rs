//! The launches of one batch as text. Equal launches of different layers are merged.

use std::fmt;

use super::{LaunchError, Program};
use crate::{
    graph::{index_ranges, iteration},
    machine::Machine,
    tensor::Extents,
};

/// The launches of one batch, in order; see [`Program::explain`].
#[derive(Clone, Debug)]
pub struct Launches {
    launches: Vec<Launch>,
}

/// Launches of the same kernel in several iterations of a loop, or a single launch.
#[derive(Clone, Debug)]
struct Launch {
    /// Name of the value up to the iteration's index; the whole name outside of loops.
    prefix: String,
    /// Iterations that launch the kernel; empty outside of loops.
    indices: Vec<u64>,
    /// Name of the value after the index; empty outside of loops.
    rest: String,
    kernel: usize,
    symbol: String,
    /// Estimate for one launch in microseconds; `None` if the kernel is not selected by cost.
    us: Option<f64>,
}

impl Launch {
    /// Returns the number of launches.
    fn n(&self) -> usize {
        self.indices.len().max(1)
    }
}

impl Program {
    /// Returns the launches of a batch on `machine`, with the estimates that the kernels were selected by.
    ///
    /// # Errors
    /// Returns the errors of [`Step::launch`](super::Step::launch).
    pub fn explain(&self, extents: &Extents, machine: &Machine) -> Result<Launches, LaunchError> {
        let mut launches: Vec<Launch> = Vec::new();
        for step in &self.steps {
            let Some((kernel, extents)) = step.launch(extents)? else {
                continue;
            };
            let (prefix, index, rest) = match iteration(&step.name) {
                Some((prefix, index)) => {
                    let after = prefix.len() + index.to_string().len();
                    (prefix, Some(index), &step.name[after..])
                }
                None => (step.name.as_str(), None, ""),
            };
            let same = launches.iter_mut().find(|known| {
                let is_new = |index| !known.indices.contains(&index);
                let named = (known.prefix.as_str(), known.rest.as_str()) == (prefix, rest);
                index.is_some_and(is_new) && named && known.kernel == kernel
            });
            if let Some(known) = same {
                known.indices.extend(index);
                continue;
            }
            let of = self.kernels[kernel].as_kernel();
            let cycles = of.cycles(extents.rows, machine);
            launches.push(Launch {
                prefix: prefix.to_owned(),
                indices: index.into_iter().collect(),
                rest: rest.to_owned(),
                kernel,
                symbol: of.symbol(),
                us: cycles.map(|cycles| cycles / f64::from(machine.clock_mhz)),
            });
        }
        Ok(Launches { launches })
    }
}

impl fmt::Display for Launches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for launch in &self.launches {
            let index = match launch.indices.as_slice() {
                [] => String::new(),
                [one] => one.to_string(),
                all => index_ranges(all.to_vec()),
            };
            write!(f, "launches `{}{index}{}`", launch.prefix, launch.rest)?;
            if launch.n() > 1 {
                write!(f, ", × {}", launch.n())?;
            }
            write!(f, "\n    with {}", launch.symbol)?;
            match launch.us {
                Some(us) => writeln!(f, "\n    in about {us:.1} µs")?,
                None => writeln!(f)?,
            }
        }
        let n: usize = self.launches.iter().map(Launch::n).sum();
        writeln!(f, "{n} launches")
    }
}
