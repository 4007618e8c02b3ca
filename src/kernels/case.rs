//! Batches with which kernels are checked.

/// A batch with which a kernel is checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// Name in reports, e.g. `tiny`, `ragged` or `model`.
    pub name: &'static str,
    pub lens: Vec<u32>,
    /// Number of tokens of each sequence that are already in the KV cache.
    pub cached: Vec<u32>,
    /// Number of source tokens of each sequence, for kernels with cross-attention; empty otherwise.
    pub sources: Vec<u32>,
}

impl Case {
    /// Creates a batch of sequences without cached tokens.
    pub fn new(name: &'static str, lens: &[u32]) -> Self {
        Self {
            name,
            lens: lens.to_vec(),
            cached: vec![0; lens.len()],
            sources: Vec::new(),
        }
    }

    /// Batches for kernels that use a KV cache: new sequences, decode steps of one token, and chunks of sequences mixed with
    /// decode steps.
    pub fn cached() -> Vec<Case> {
        let of = |name, lens: &[u32], cached: &[u32]| Case {
            cached: cached.to_vec(),
            ..Case::new(name, lens)
        };
        vec![
            of("one_token", &[1], &[0]),
            of("fresh", &[2, 1, 33, 64], &[0, 0, 0, 0]),
            of("step", &[1, 1, 1, 1, 1], &[31, 32, 63, 1, 500]),
            of("mixed", &[1, 40, 1, 7, 3], &[100, 33, 0, 250, 64]),
        ]
    }

    /// Batches for kernels that attend to cached source texts: decode steps of one token, whole sequences, and mixtures of decode steps and
    /// whole sequences.
    pub fn with_sources() -> Vec<Case> {
        let of = |name, lens: &[u32], cached: &[u32], sources: &[u32]| Case {
            cached: cached.to_vec(),
            sources: sources.to_vec(),
            ..Case::new(name, lens)
        };
        vec![
            of("one_token", &[1], &[0], &[1]),
            of("fresh", &[2, 1, 33, 64], &[0, 0, 0, 0], &[33, 1, 7, 90]),
            of(
                "step",
                &[1, 1, 1, 1, 1],
                &[31, 32, 0, 1, 500],
                &[31, 32, 64, 3, 260],
            ),
            of(
                "mixed",
                &[1, 40, 1, 7, 3],
                &[100, 33, 0, 250, 64],
                &[5, 65, 127, 2, 31],
            ),
        ]
    }

    /// Batches for any kernel: a single token, ragged lengths, and a batch of realistic size.
    pub fn standard() -> Vec<Case> {
        vec![
            Case::new("one_token", &[1]),
            Case::new("tiny", &[2, 1, 3]),
            Case::new("ragged", &[17, 18, 52, 63, 77]),
            Case::new(
                "model",
                &[
                    128, 48, 65, 26, 89, 61, 96, 61, 89, 115, 86, 29, 95, 62, 65, 114,
                ],
            ),
        ]
    }
}
