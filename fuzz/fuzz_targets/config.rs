#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|text: &[u8]| -> Corpus {
    match gemmule_fuzz::config::run(text) {
        true => Corpus::Keep,
        false => Corpus::Reject,
    }
});
