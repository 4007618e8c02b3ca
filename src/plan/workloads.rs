//! Usage records for tests, from transformer models of several layers and from random graphs.

use proptest::prelude::*;

use super::UsageRecord;

/// Numbers operators and collects the records of their tensors.
struct Recorder {
    records: Vec<UsageRecord>,
    names: Vec<String>,
    op: u32,
}

impl Recorder {
    /// Appends an operator that reads `operands` and writes a tensor of `bytes`.
    fn op(&mut self, name: String, bytes: u64, operands: &[usize]) -> usize {
        for &operand in operands {
            self.records[operand].last_op = self.op;
        }
        self.records.push(UsageRecord {
            first_op: self.op,
            last_op: self.op,
            bytes,
        });
        self.names.push(name);
        self.op += 1;
        self.records.len() - 1
    }
}

/// The shape of a transformer encoder.
#[derive(Clone, Copy, Debug)]
pub(super) struct Encoder {
    pub n_layers: usize,
    pub width: u64,
    pub n_heads: u64,
    pub inner: u64,
    /// Whether operators are unfused: attention stores its scores, and biases, activations and residuals are separate operators.
    pub unfused: bool,
}

pub(super) const BASE: Encoder = Encoder {
    n_layers: 12,
    width: 768,
    n_heads: 12,
    inner: 3072,
    unfused: false,
};
pub(super) const BASE_UNFUSED: Encoder = Encoder {
    unfused: true,
    ..BASE
};

/// Returns the names and the records of an encoder's intermediate tensors, for `batch` sequences of
/// `length` tokens of two bytes each.
pub(super) fn encoder(shape: Encoder, batch: u64, length: u64) -> (Vec<String>, Vec<UsageRecord>) {
    let Encoder {
        n_layers,
        width,
        n_heads,
        inner,
        unfused,
    } = shape;
    let tokens = batch * length;
    let rows = |columns: u64| 2 * tokens * columns;
    let scores = 2 * batch * n_heads * length * length;
    let mut r = Recorder {
        records: Vec::new(),
        names: Vec::new(),
        op: 0,
    };
    let sum = r.op("embeddings.sum".into(), rows(width), &[]);
    let mut x = r.op("embeddings.norm".into(), rows(width), &[sum]);
    for layer in 0..n_layers {
        let name = |part: &str| format!("layer.{layer}.{part}");
        if unfused {
            let mut heads = Vec::new();
            for part in ["q", "k", "v"] {
                let y = r.op(name(part), rows(width), &[x]);
                let biased = r.op(name(&format!("{part}.bias")), rows(width), &[y]);
                heads.push(r.op(name(&format!("{part}.heads")), rows(width), &[biased]));
            }
            let logits = r.op(name("scores"), scores, &heads[..2]);
            let scaled = r.op(name("scaled"), scores, &[logits]);
            let masked = r.op(name("masked"), scores, &[scaled]);
            let probs = r.op(name("probs"), scores, &[masked]);
            let context = r.op(name("context"), rows(width), &[probs, heads[2]]);
            let merged = r.op(name("merged"), rows(width), &[context]);
            let out = r.op(name("out"), rows(width), &[merged]);
            let residual = r.op(name("residual"), rows(width), &[out, x]);
            x = r.op(name("norm"), rows(width), &[residual]);
            let up = r.op(name("up"), rows(inner), &[x]);
            let gelu = r.op(name("gelu"), rows(inner), &[up]);
            let down = r.op(name("down"), rows(width), &[gelu]);
            let residual = r.op(name("residual2"), rows(width), &[down, x]);
            x = r.op(name("norm2"), rows(width), &[residual]);
        } else {
            let qkv = r.op(name("qkv"), rows(3 * width), &[x]);
            let context = r.op(name("context"), rows(width), &[qkv]);
            let out = r.op(name("out"), rows(width), &[context]);
            x = r.op(name("norm"), rows(width), &[out, x]);
            let gelu = r.op(name("gelu"), rows(inner), &[x]);
            let down = r.op(name("down"), rows(width), &[gelu]);
            x = r.op(name("norm2"), rows(width), &[down, x]);
        }
    }
    r.op("pooled".into(), 2 * batch * width, &[x]);
    (r.names, r.records)
}

/// Returns sizes from 0 to 64 MiB, log-uniform. Half of them are products of a width and a token count.
fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![
        1 => Just(0),
        10 => (0u32..26, 1.0f64..2.0).prop_map(|(log, mantissa)| (mantissa * f64::from(1u32 << log)) as u64),
        10 => (1u64..512, prop::sample::select(vec![64u64, 768, 1536, 6144])).prop_map(|(tokens, row)| tokens * row * 8),
    ]
}

/// Returns the records of a random graph. Each operator writes one tensor, and reads up to three earlier tensors, mostly recent ones.
pub(super) fn random_graph(
    n_ops: impl Into<prop::collection::SizeRange>,
) -> impl Strategy<Value = Vec<UsageRecord>> {
    let operand = prop_oneof![4 => 1usize..6, 1 => 1usize..60];
    let op = (bytes(), prop::collection::vec(operand, 0..4));
    prop::collection::vec(op, n_ops).prop_map(|ops| {
        let mut records: Vec<UsageRecord> = Vec::with_capacity(ops.len());
        for (op, (bytes, operands)) in ops.into_iter().enumerate() {
            for back in operands {
                if let Some(operand) = op.checked_sub(back) {
                    records[operand].last_op = op as u32;
                }
            }
            records.push(UsageRecord {
                first_op: op as u32,
                last_op: op as u32,
                bytes,
            });
        }
        records
    })
}

/// Returns records with arbitrary lifetimes, which may not correspond to any graph.
pub(super) fn random_lifetimes(
    n: impl Into<prop::collection::SizeRange>,
) -> impl Strategy<Value = Vec<UsageRecord>> {
    let record = (0u32..100, 0u32..40, bytes()).prop_map(|(first_op, span, bytes)| UsageRecord {
        first_op,
        last_op: first_op + span,
        bytes,
    });
    prop::collection::vec(record, n)
}

pub(super) fn random_records() -> impl Strategy<Value = Vec<UsageRecord>> {
    prop_oneof![random_graph(1..150), random_lifetimes(1..150)]
}
