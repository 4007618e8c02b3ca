#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(
    init: {
        // libFuzzer's panic hook ends the process at any panic, even one that the library catches.
        gemmule::cli::silence_contained_panics();
    },
    |text: &str| gemmule_fuzz::tokenizer::run(text)
);
