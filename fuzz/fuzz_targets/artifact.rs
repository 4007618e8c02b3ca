#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;

fuzz_target!(
    init: {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/artifact");
        std::fs::create_dir_all(&corpus).expect("the corpus can be made");
        for (n, seed) in gemmule_fuzz::artifact::seeds().into_iter().enumerate() {
            std::fs::write(corpus.join(format!("seed-{n}")), seed).expect("room for a seed");
        }
    },
    |body: &[u8]| gemmule_fuzz::artifact::run(body)
);
