#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| gemmule_fuzz::ids::run(text));
