#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|source: &str| gemmule_fuzz::description::run(source));
