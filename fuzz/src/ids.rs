//! Reads arbitrary text as a file of token ids. The result must be a consistent batch or an error.

use std::path::Path;

use gemmule::{cli::parse_ids, runtime::batch::Limits};

pub fn run(text: &str) {
    let Ok(batch) = parse_ids(Path::new("ids.json"), text) else {
        return;
    };
    let (n, extents) = (batch.token_ids().len(), batch.extents());
    assert_eq!(extents.tokens, n as u64);
    assert_eq!(batch.type_ids().len(), n);
    assert_eq!(batch.positions().len(), n);
    assert_eq!(batch.cu_lens().last().copied(), i32::try_from(n).ok());
    assert_eq!(
        batch.pair_offsets().last().copied(),
        i64::try_from(extents.pairs).ok()
    );
    if let Some(padded) = batch.padded() {
        let cells = extents.batch * extents.longest;
        assert_eq!(padded.token_ids.len() as u64, cells);
        let n_ones = padded.mask.iter().filter(|&&m| m == 1).count();
        assert_eq!(n_ones, n);
    }
    let limits = Limits {
        vocabulary: 100,
        segments: Some(2),
        skipped: Some(1),
        longest: Some(4),
        extended: None,
        end: None,
    };
    if batch.check(&limits).is_ok() {
        assert!(batch.token_ids().iter().all(|id| (0..100).contains(id)));
    }
    // The number of segment ids must equal the number of tokens.
    assert!(batch.clone().with_type_ids(vec![1; n]).is_ok());
    assert!(batch.with_type_ids(vec![1; n + 1]).is_err());
}
