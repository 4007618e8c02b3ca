#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(
    init: {
        // libFuzzer's panic hook aborts the process at any panic. Skip this hook for panics that gemmule catches.
        gemmule::cli::silence_contained_panics();
    },
    |text: &str| gemmule_fuzz::tokenizer::run(text)
);
