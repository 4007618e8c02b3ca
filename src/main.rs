use std::process::ExitCode;

fn main() -> ExitCode {
    gemmule::cli::main()
}
