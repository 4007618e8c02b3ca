use std::fmt;

use super::{Program, Storage};

/// Prints one line per step with its value, operands and rows, and one line per range of its dispatch.
impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, step) in self.steps.iter().enumerate() {
            write!(f, "{at:3} {} (", step.name)?;
            for (i, &operand) in step.operands.iter().enumerate() {
                let tensor = &self.tensors[operand];
                let comma = if i == 0 { "" } else { ", " };
                let mark = if matches!(tensor.place, Storage::Weight(_)) {
                    "@"
                } else {
                    ""
                };
                write!(f, "{comma}{mark}{}", tensor.name)?;
            }
            writeln!(f, ") over {}", step.rows)?;
            for entry in step.dispatch.entries() {
                let symbol = self.kernels[entry.choice].as_kernel().symbol();
                writeln!(f, "      {}: {symbol}", entry.batches)?;
            }
        }
        Ok(())
    }
}
