//! The launches of one batch as text, with the rules that fused operators. Equal entries of different layers are merged.

use std::fmt;

use super::{
    Fusions, LaunchError, Program,
    fusions::{Origin, Refused},
};
use crate::{
    graph::{Iterated, alike},
    machine::Machine,
    select::Batches,
    tensor::Extents,
};

/// The launches of one batch, in order; see [`Program::explain`].
#[derive(Clone, Debug)]
pub struct Launches {
    launches: Vec<Launch>,
    refused: Vec<Refused>,
}

/// A launch of a kernel.
#[derive(Clone, Debug, PartialEq)]
struct Launch {
    /// Name of the value that the launch computes.
    name: String,
    origin: Origin,
    symbol: String,
    /// The batches for which the step launches this kernel. The number of rows in [`Batches`] is that of the launch, which may differ from
    /// the number of tokens.
    batches: Batches,
    /// Estimated time in microseconds; `None` if the kernel is not selected by cost.
    us: Option<f64>,
}

impl Iterated for Launch {
    fn name(&self) -> &str {
        &self.name
    }

    fn renamed(&self, name: &dyn Fn(&str) -> String) -> Self {
        let mut launch = self.clone();
        launch.name = name(&launch.name);
        for node in &mut launch.origin.nodes {
            *node = name(node);
        }
        launch
    }
}

impl Iterated for Refused {
    fn name(&self) -> &str {
        &self.at
    }

    fn renamed(&self, name: &dyn Fn(&str) -> String) -> Self {
        Self {
            rule: self.rule,
            at: name(&self.at),
            because: name(&self.because),
        }
    }
}

impl Program {
    /// Returns the launches of a batch on `machine`, with the estimated times by which the kernels were selected. `fusions` are the
    /// decisions of the lowering that created this program.
    ///
    /// # Errors
    /// Returns an error if [`Step::launch`](super::Step::launch) returns one.
    pub fn explain(
        &self,
        fusions: Fusions,
        extents: &Extents,
        machine: &Machine,
    ) -> Result<Launches, LaunchError> {
        let mut launches: Vec<Launch> = Vec::new();
        for (step, origin) in self.steps.iter().zip(fusions.origins) {
            let Some((kernel, extents)) = step.launch(extents)? else {
                continue;
            };
            let entry = step.dispatch.entry(&extents);
            let batches = entry.map_or(Batches::ALL, |entry| entry.batches);
            let kernel = self.kernels[kernel].as_kernel();
            let cycles = kernel.cycles(extents.rows, machine);
            launches.push(Launch {
                name: step.name.clone(),
                origin,
                symbol: kernel.symbol(),
                batches,
                us: cycles.map(|cycles| cycles / f64::from(machine.clock_mhz)),
            });
        }
        let refused = fusions.refused;
        Ok(Launches { launches, refused })
    }
}

/// Formats the number of equal entries, unless it is 1.
fn times(n: usize) -> String {
    match n {
        1 => String::new(),
        n => format!(", × {n}"),
    }
}

impl fmt::Display for Launches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for alike in alike(&self.launches) {
            let Launch {
                name,
                origin: Origin { rule, nodes },
                symbol,
                batches,
                us,
            } = alike.shown();
            writeln!(f, "launches `{name}`{}", times(alike.n()))?;
            if let (Some((rule, equation)), [_, _, ..]) = (rule, nodes.as_slice()) {
                writeln!(f, "    fused by {rule}, merges {}", nodes.join(", "))?;
                writeln!(f, "    as {equation}")?;
            }
            writeln!(f, "    with {symbol}")?;
            if batches != Batches::ALL {
                writeln!(f, "    for batches with {batches}")?;
            }
            if let Some(us) = us {
                writeln!(f, "    in about {us:.1} µs")?;
            }
        }
        for alike in alike(&self.refused) {
            let Refused { rule, at, because } = alike.shown();
            let n = times(alike.n());
            writeln!(f, "refused `{at}` by {rule}{n}\n    because {because}")?;
        }
        writeln!(f, "{} launches", self.launches.len())
    }
}
