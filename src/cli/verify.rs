use std::{path::PathBuf, process::ExitCode};

use super::{Outcome, align_right, model::Runnable, print, table};
use crate::measure::{Bound, Reference};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Runnable,
    /// Safetensors file with the results of another implementation: ids, lens and named values
    #[arg(long, value_name = "FILE")]
    reference: PathBuf,
}

pub(super) fn run(args: Args) -> Outcome {
    let reference = Reference::read(&args.reference)?;
    let engine = Runnable::build(args.model.builder()?.intermediates(reference.names()))?;
    let bound = Bound::of(engine.precision());
    let mut session = engine.session()?;
    let mut rows = table(&["case", "value", "max error", "mean error", "cosine", ""]);
    let mut failed = 0;
    for case in &reference.cases {
        for c in case.compare(&mut session)? {
            let good = bound.holds(&c);
            failed += usize::from(!good);
            rows.add_row([
                c.case,
                c.name,
                format!("{:.2e}", c.max),
                format!("{:.2e}", c.mean),
                format!("{:.6}", c.cosine),
                if good {
                    "ok".to_owned()
                } else {
                    "OUT OF BOUNDS".to_owned()
                },
            ]);
        }
    }
    align_right(&mut rows, 2..5);
    print(&format!(
        "{rows}\n{}, {}; limits: max error {:e} on rows of unit length, {:e} on others (times the largest value above 1); cosine {} on rows of {} values or more\n",
        engine.device(),
        engine.precision(),
        bound.unit,
        bound.max,
        bound.cosine,
        Bound::WIDE
    ))?;
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
