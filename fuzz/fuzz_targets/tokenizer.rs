#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(
    init: {
        // libFuzzer's hook ends the process at any panic, contained ones included.
        gemmule::cli::silence_contained_panics();
    },
    |text: &str| gemmule_fuzz::tokenizer::run(text)
);
