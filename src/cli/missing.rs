//! Commands of features that this program was built without.

use std::ffi::OsString;

use miette::miette;

use super::Outcome;

/// Accepts any arguments, so that [`run`] reports the missing feature instead of an unknown argument.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(super) struct Args {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    _arguments: Vec<OsString>,
}

/// Returns an error that says how to build the program with the feature that the command needs.
pub(super) fn run(command: &str, feature: &str) -> Outcome {
    Err(miette!(
        "`gemmule {command}` needs the feature `{feature}`, and this program was built without it; build it with `cargo install --path . --features {feature}` (`gemmule doctor` lists the features of a program)"
    ))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn any_arguments_lead_to_the_error_that_names_the_feature() {
        let arguments = "embed --model a --input b.jsonl -x --help --output=c.npy";
        let parsed = Program::try_parse_from(arguments.split(' ')).expect("any arguments");
        assert_eq!(parsed.args._arguments.len(), 7);
        let error = run("embed", "corpora").expect_err("it is not built");
        let error = error.to_string();
        assert!(error.contains("`gemmule embed` needs the feature `corpora`"));
        assert!(error.contains("--features corpora"), "{error}");
    }
}
