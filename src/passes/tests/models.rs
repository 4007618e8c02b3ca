//! Unfused graphs of primitive operators, like those of descriptions.

use std::collections::BTreeMap;

use crate::{
    graph::{Graph, NodeId, Op, WeightExpr},
    ops::{Activation, BatchInput, Epilogue, HeadView, Rotation, SoftCap},
};

/// A builder of graphs. It panics on errors, because shapes in tests are valid.
#[derive(Default)]
pub struct Builder {
    pub graph: Graph,
    named: BTreeMap<String, NodeId>,
}

impl Builder {
    pub fn add(&mut self, name: &str, op: Op, operands: &[NodeId]) -> NodeId {
        let id = self.graph.add(name, op, operands).unwrap();
        self.named.insert(name.to_owned(), id);
        id
    }

    /// Returns the weight of this name, adding it if necessary.
    pub fn weight(&mut self, name: &str, dims: &[u64]) -> NodeId {
        if let Some(&id) = self.named.get(name) {
            return id;
        }
        let expr = WeightExpr::Stored {
            name: name.to_owned(),
            dims: dims.to_vec(),
        };
        self.add(name, Op::Weight(expr), &[])
    }

    /// Returns the existing value of this name.
    pub fn get(&self, name: &str) -> NodeId {
        self.named[name]
    }

    /// Returns the graph with these values as outputs. Each output has the name of its value.
    pub fn with_outputs(mut self, names: &[&str]) -> Graph {
        for &name in names {
            let id = self.get(name);
            self.graph.add_output(name, id);
        }
        self.graph.verify().unwrap();
        self.graph
    }

    pub fn width(&self, id: NodeId) -> u64 {
        self.graph.shape(id).width().unwrap()
    }

    /// Adds `name.matmul`: `x · (weights.weight)ᵀ`.
    pub fn matmul(&mut self, name: &str, weights: &str, x: NodeId, out: u64) -> NodeId {
        let w = self.weight(&format!("{weights}.weight"), &[out, self.width(x)]);
        let epilogue = Epilogue::default();
        self.add(&format!("{name}.matmul"), Op::Linear { epilogue }, &[x, w])
    }

    /// Adds a projection with its bias: `name.matmul`, then `name`.
    pub fn linear(&mut self, name: &str, weights: &str, x: NodeId, out: u64) -> NodeId {
        let y = self.matmul(name, weights, x, out);
        let b = self.weight(&format!("{weights}.bias"), &[out]);
        self.add(name, Op::AddBias, &[y, b])
    }

    pub fn layer_norm(&mut self, name: &str, weights: &str, x: NodeId) -> NodeId {
        let gamma = self.weight(&format!("{weights}.weight"), &[self.width(x)]);
        let beta = self.weight(&format!("{weights}.bias"), &[self.width(x)]);
        self.add(name, Op::LayerNorm { eps: 1e-12 }, &[x, gamma, beta])
    }

    pub fn embedding(&mut self, name: &str, ids: BatchInput, rows: u64, width: u64) -> NodeId {
        let input = format!("{ids:?}");
        let ids = match self.named.get(&input) {
            Some(&id) => id,
            None => self.add(&input, Op::Input(ids), &[]),
        };
        let table = self.weight(&format!("{name}.weight"), &[rows, width]);
        self.add(name, Op::Embedding { offset: 0 }, &[ids, table])
    }

    /// Adds token embeddings, the input in the tests of most passes.
    pub fn tokens(&mut self, width: u64) -> NodeId {
        self.embedding("tokens", BatchInput::TokenIds, 13, width)
    }

    pub fn split(&mut self, name: &str, x: NodeId, heads: u32) -> NodeId {
        self.add(name, Op::SplitHeads { heads }, &[x])
    }

    /// Adds attention for split heads: the nodes `scores`, `scaled`, `probabilities`, `context` and `merged`, with names that start with
    /// `prefix`.
    pub fn attention(&mut self, prefix: &str, qkv: [NodeId; 3], scale: f32) -> NodeId {
        self.capped_attention(prefix, qkv, scale, None)
    }

    /// Like [`attention`](Self::attention), with a soft cap on the scaled scores.
    pub fn capped_attention(
        &mut self,
        prefix: &str,
        [q, k, v]: [NodeId; 3],
        scale: f32,
        cap: Option<SoftCap>,
    ) -> NodeId {
        let heads = |b: &Self, id: NodeId| {
            let dims = &b.graph.shape(id).0;
            let constant = |i: usize| u32::try_from(dims[i].as_constant().unwrap()).unwrap();
            (constant(0), constant(2))
        };
        let view = HeadView::HeadMajor;
        let name = |stem: &str| format!("{prefix}{stem}");
        let (n, head) = heads(self, q);
        let scores = Op::Scores {
            heads: n,
            kv_heads: heads(self, k).0,
            head,
            q: view,
            k: view,
        };
        let scores = self.add(&name("scores"), scores, &[q, k]);
        let scaled = self.add(&name("scaled"), Op::Scale { by: scale }, &[scores]);
        let scaled = match cap {
            Some(cap) => self.add(&name("capped"), Op::SoftCap(cap), &[scaled]),
            None => scaled,
        };
        let softmax = Op::Softmax {
            scale: 1.0,
            causal: false,
            by: Default::default(),
        };
        let probabilities = self.add(&name("probabilities"), softmax, &[scaled]);
        let (kv_heads, head) = heads(self, v);
        let context = Op::Context {
            heads: n,
            kv_heads,
            head,
            v: view,
            out: view,
        };
        let context = self.add(&name("context"), context, &[probabilities, v]);
        self.add(&name("merged"), Op::MergeHeads, &[context])
    }

    pub fn rms_norm(&mut self, name: &str, x: NodeId, heads: u32) -> NodeId {
        let part = self.width(x) / u64::from(heads);
        let gamma = self.weight(&format!("{name}.weight"), &[part]);
        let op = Op::RmsNorm {
            eps: 1e-6,
            heads,
            from: 0,
            centered: false,
        };
        self.add(name, op, &[x, gamma])
    }

    /// Adds the query, key and value projections of `x`, splits their heads, and adds attention.
    pub fn self_attention(
        &mut self,
        prefix: &str,
        weights: &str,
        x: NodeId,
        heads: u32,
        bias: bool,
    ) -> NodeId {
        let width = self.width(x);
        let split = ["query", "key", "value"].map(|role| {
            let (name, weights) = (format!("{prefix}{role}"), format!("{weights}{role}"));
            let y = match bias {
                true => self.linear(&name, &weights, x, width),
                false => self.matmul(&name, &weights, x, width),
            };
            self.split(&format!("{prefix}{role}.heads"), y, heads)
        });
        let head = width as f32 / heads as f32;
        self.attention(prefix, split, head.sqrt().recip())
    }
}

/// A post-norm encoder with pooled outputs.
#[derive(Clone, Copy, Debug)]
pub struct Encoder {
    pub layers: u32,
    pub width: u64,
    pub heads: u32,
    pub inner: u64,
    /// Whether query, key and value have biases.
    pub bias: bool,
    /// Whether all layers share the weights of a single layer.
    pub shared: bool,
}

impl Encoder {
    pub const SMALL: Encoder = Encoder {
        layers: 2,
        width: 16,
        heads: 2,
        inner: 24,
        bias: true,
        shared: false,
    };

    pub fn build(self) -> Graph {
        let mut b = Builder::default();
        let word = b.embedding("word", BatchInput::TokenIds, 13, self.width);
        let kind = b.embedding("kind", BatchInput::TypeIds, 2, self.width);
        let position = b.embedding("position", BatchInput::Positions, 9, self.width);
        let sum = b.add("word+kind", Op::Add, &[word, kind]);
        let sum = b.add("embedded", Op::Add, &[sum, position]);
        let mut x = b.layer_norm("embeddings", "embeddings.norm", sum);
        for layer in 0..self.layers {
            x = self.layer(&mut b, layer, x);
        }
        let first = b.add("first", Op::FirstToken, &[x]);
        let pooled = b.linear("pooled.linear", "pooler", first, self.width);
        let pooled = b.add("pooled", Op::Activate(Activation::Tanh), &[pooled]);
        let mean = b.add("mean", Op::MeanPool, &[x]);
        let sentence = b.add("sentence", Op::L2Normalize { eps: 1e-12 }, &[mean]);
        let mut graph = b.graph;
        graph.add_output("last_hidden_state", x);
        graph.add_output("pooled", pooled);
        graph.add_output("sentence", sentence);
        graph.verify().unwrap();
        graph
    }

    /// Builds the encoder with only the pooler's output.
    pub fn pooled(self) -> Graph {
        let mut graph = self.build();
        graph.select_outputs(&["pooled"]).unwrap();
        graph
    }

    fn layer(self, b: &mut Builder, layer: u32, x: NodeId) -> NodeId {
        let at = format!("layers.{layer}.");
        let weights = if self.shared { "shared." } else { &at };
        let name = |stem: &str| format!("{at}{stem}");
        let stored = |stem: &str| format!("{weights}{stem}");
        let merged = b.self_attention(&at, weights, x, self.heads, self.bias);
        let y = b.linear(&name("output"), &stored("output"), merged, self.width);
        let y = b.add(&name("attended"), Op::Add, &[y, x]);
        let x = b.layer_norm(&name("attention_norm"), &stored("attention_norm"), y);
        let y = b.linear(&name("inner"), &stored("inner"), x, self.inner);
        let y = b.add(&name("gelu"), Op::Activate(Activation::GeluExact), &[y]);
        let y = b.linear(&name("outer"), &stored("outer"), y, self.width);
        let y = b.add(&name("fed"), Op::Add, &[x, y]);
        b.layer_norm(&name("norm"), &stored("norm"), y)
    }
}

/// A pre-norm decoder with caches, grouped heads and gates.
#[derive(Clone, Copy, Debug)]
pub struct Decoder {
    pub width: u64,
    /// Width between the two linear layers of a feed-forward network.
    pub inner: u64,
    pub layers: u32,
    pub kv_heads: u32,
    /// Number of query heads per key head.
    pub group: u32,
    /// Head size, a multiple of 2.
    pub head: u32,
    pub bias: bool,
    /// Whether the heads of queries and keys are normalized.
    pub normed: bool,
    /// Whether the heads have rotary position embeddings.
    pub turned: bool,
    /// Whether the scores have a soft cap.
    pub capped: bool,
}

impl Decoder {
    pub const SMALL: Decoder = Decoder {
        width: 16,
        inner: 24,
        layers: 2,
        kv_heads: 2,
        group: 2,
        head: 8,
        bias: false,
        normed: true,
        turned: true,
        capped: false,
    };

    pub fn build(self) -> Graph {
        let mut b = Builder::default();
        let mut x = b.tokens(self.width);
        for layer in 0..self.layers {
            x = self.layer(&mut b, layer, x);
        }
        let x = b.rms_norm("final", x, 1);
        let last = b.add("last", Op::LastToken, &[x]);
        let logits = b.matmul("logits", "head", last, 13);
        let mut graph = b.graph;
        graph.add_output("last_hidden_state", x);
        graph.add_output("logits", logits);
        graph.verify().unwrap();
        graph
    }

    fn linear(self, b: &mut Builder, name: &str, x: NodeId, out: u64) -> NodeId {
        match self.bias {
            true => b.linear(name, name, x, out),
            false => b.matmul(name, name, x, out),
        }
    }

    fn layer(self, b: &mut Builder, layer: u32, x: NodeId) -> NodeId {
        let name = |stem: &str| format!("layers.{layer}.{stem}");
        let heads = self.kv_heads * self.group;
        let normal = b.rms_norm(&name("input"), x, 1);
        let parts = [("query", heads), ("key", self.kv_heads)];
        let [query, key] = parts.map(|(part, heads)| {
            let at = name(part);
            let width = u64::from(heads) * u64::from(self.head);
            let mut value = self.linear(b, &at, normal, width);
            if self.normed {
                value = b.rms_norm(&format!("{at}.normed"), value, heads);
            }
            if self.turned {
                let frequencies = (0..self.head / 2).map(|i| 1.0 / (1 + i) as f32);
                let op = Op::Rotary {
                    rotation: Rotation {
                        heads,
                        frequencies: frequencies.collect(),
                        factor: 1.0,
                    },
                    from: 0,
                    head: self.head,
                };
                value = b.add(&format!("{at}.turned"), op, &[value]);
            }
            value
        });
        let width = u64::from(self.kv_heads) * u64::from(self.head);
        let value = self.linear(b, &name("value"), normal, width);
        let [key, value] = [("keys", key), ("values", value)].map(|(stem, x)| {
            let op = Op::Cache {
                name: name(stem),
                from: 0,
                heads: self.kv_heads,
                head: self.head,
                format: None,
                scaled: false,
            };
            b.add(&name(stem), op, &[x])
        });
        let split = [
            ("q", query, heads),
            ("k", key, self.kv_heads),
            ("v", value, self.kv_heads),
        ];
        let split = split.map(|(stem, x, heads)| b.split(&name(stem), x, heads));
        let cap = self
            .capped
            .then(|| SoftCap::new(0.4).expect("it is in range"));
        let merged = b.capped_attention(&name(""), split, 0.5, cap);
        let y = self.linear(b, &name("output"), merged, b.width(x));
        let x = b.add(&name("attended"), Op::Add, &[y, x]);
        let normal = b.rms_norm(&name("inner"), x, 1);
        let [gate, up] = ["gate", "up"].map(|part| self.linear(b, &name(part), normal, self.inner));
        let gate = b.add(&name("activated"), Op::Activate(Activation::Silu), &[gate]);
        let y = b.add(&name("gated"), Op::Multiply, &[gate, up]);
        let y = self.linear(b, &name("down"), y, b.width(x));
        b.add(&name("fed"), Op::Add, &[x, y])
    }
}
