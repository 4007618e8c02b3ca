use std::fmt;

use super::{Place, Program};

/// One line per launch: value, kernels with their limits, operands.
impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, step) in self.steps.iter().enumerate() {
            write!(f, "{at:3} {} =", step.name)?;
            for variant in &step.variants {
                write!(f, " {}", self.kernels[variant.kernel].as_kernel().symbol())?;
                if let Some(limit) = variant.limit {
                    let or = if Some(variant) == step.variants.last() {
                        ""
                    } else {
                        " or"
                    };
                    write!(f, " if {limit:?}{or}")?;
                }
            }
            f.write_str(" (")?;
            for (i, &operand) in step.operands.iter().enumerate() {
                let tensor = &self.tensors[operand];
                let comma = if i == 0 { "" } else { ", " };
                let mark = if matches!(tensor.place, Place::Weight(_)) {
                    "@"
                } else {
                    ""
                };
                write!(f, "{comma}{mark}{}", tensor.name)?;
            }
            write!(f, ") over {}", step.rows)?;
            match step.when {
                Some(range) => writeln!(f, " if {range}")?,
                None => writeln!(f)?,
            }
        }
        Ok(())
    }
}
