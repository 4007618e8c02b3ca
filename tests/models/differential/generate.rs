//! Generates a random description from a seed.

use std::fmt::Write as _;

use crate::common::mates::Numbers;
use gemmule::model::operators;

/// The item to which a row of a value belongs: a token, or a sequence of the batch.
#[derive(Clone, Copy, PartialEq)]
enum Of {
    Tokens,
    Batch,
}

#[derive(Clone, Copy, PartialEq)]
enum Shape {
    Rows(Of, u32),
    /// Heads of tokens: the number of heads, and the width of each.
    Heads(u32, u32),
    Scores(u32),
}

#[derive(Clone)]
struct Value {
    name: String,
    shape: Shape,
    /// Approximate magnitude of the elements.
    size: f32,
}

impl Value {
    fn width(&self) -> u32 {
        match self.shape {
            Shape::Rows(_, width) => width,
            Shape::Heads(heads, head) => heads * head,
            Shape::Scores(heads) => heads,
        }
    }
}

/// Possible widths of rows: odd and even numbers, some of them multiples of eight.
const WIDTHS: [u32; 8] = [1, 2, 3, 7, 8, 16, 24, 33];
const HEADS: [u32; 3] = [1, 2, 3];
/// Possible numbers of heads of grouped-query attention: query heads, and key and value heads.
const GROUPS: [(u32, u32); 3] = [(2, 1), (4, 2), (6, 2)];
/// Keys of the test's config.json. Each contains a method of scaling the frequencies of rotary embeddings.
const SCALINGS: [&str; 6] = ["default", "linear", "dynamic", "ntk", "llama3", "yarn"];
const HEAD: [u32; 6] = [1, 2, 3, 5, 8, 16];

struct Writer {
    numbers: Numbers,
    text: String,
    values: Vec<Value>,
    /// Names of values that must not be operands of other statements, so they become outputs.
    ends: Vec<String>,
    n_names: u32,
    /// Names and dimensions of weights that any statement may read.
    weights: Vec<(String, Vec<u32>)>,
    in_loop: bool,
}

/// Returns the source of a random description, and whether it is valid. About 5 % of the descriptions are invalid on purpose.
pub fn description(seed: u64) -> (String, bool) {
    let mut to = Writer {
        numbers: Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        text: String::new(),
        values: Vec::new(),
        ends: Vec::new(),
        n_names: 0,
        weights: Vec::new(),
        in_loop: false,
    };
    to.embedded();
    for _ in 0..1 + to.numbers.below(3) {
        match to.chance(40) {
            true => to.repeated(),
            false => to.block(),
        }
    }
    for _ in 0..to.numbers.below(5) {
        to.any();
    }
    for _ in 0..to.numbers.below(4) {
        to.pooled();
    }
    for _ in 0..to.numbers.below(3) {
        to.any();
    }
    let is_right = !to.chance(5);
    if !is_right {
        to.wrong();
    }
    (to.finish(), is_right)
}

impl Writer {
    fn chance(&mut self, percent: u32) -> bool {
        self.numbers.below(100) < percent
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.numbers.below(all.len() as u32) as usize]
    }

    fn fresh(&mut self) -> u32 {
        self.n_names += 1;
        self.n_names
    }

    /// Adds a statement, and returns its value.
    fn value(&mut self, op: &str, shape: Shape, size: f32) -> Value {
        let name = format!("v{}", self.fresh());
        self.named(&name, op);
        let value = Value { name, shape, size };
        self.values.push(value.clone());
        value
    }

    fn named(&mut self, name: &str, op: &str) {
        writeln!(self.text, "        Let(\"{name}\", {op}),").expect("a string takes everything");
    }

    /// Returns a random value that satisfies `fits`; `None` if the description has none. Values that are defined later are chosen more
    /// often.
    fn pick(&mut self, fits: impl Fn(&Value) -> bool) -> Option<Value> {
        let fitting: Vec<usize> = (0..self.values.len())
            .filter(|&i| fits(&self.values[i]))
            .collect();
        if fitting.is_empty() {
            return None;
        }
        let n = fitting.len() as u32;
        let at = self.numbers.below(n).max(self.numbers.below(n));
        Some(self.values[fitting[at as usize]].clone())
    }

    fn tokens(&mut self) -> Value {
        let is_rows = |v: &Value| matches!(v.shape, Shape::Rows(Of::Tokens, _));
        self.pick(is_rows).expect("embeddings come first")
    }

    /// Returns the name of a weight with dimensions `dims`. The name ends with `kind`. Sometimes, other statements also read this weight.
    fn weight(&mut self, dims: &[u32], kind: &str) -> String {
        let same: Vec<String> = self
            .weights
            .iter()
            .filter(|(name, of)| of == dims && name.ends_with(kind))
            .map(|(name, _)| name.clone())
            .collect();
        if !same.is_empty() && self.chance(20) {
            return same[self.numbers.below(same.len() as u32) as usize].clone();
        }
        let n = self.fresh();
        if self.in_loop && self.chance(60) {
            return format!("layer.{{i}}.w{n}.{kind}");
        }
        let name = format!("w{n}.{kind}");
        self.weights.push((name.clone(), dims.to_vec()));
        name
    }

    /// Adds up to five embeddings and their sum, optionally normalized.
    fn embedded(&mut self) {
        let width = self.one_of(&WIDTHS);
        let n = 1 + self.numbers.below(5);
        let mut sum: Option<Value> = None;
        for i in 0..n {
            let ids = match i {
                0 => "token_ids",
                _ => self.one_of(&["token_ids", "type_ids", "positions"]),
            };
            let offset = self.one_of(&[0, 0, 1, 2]);
            let rows = match ids {
                "type_ids" => 2 + offset,
                _ => 8 + offset + self.numbers.below(5),
            };
            let mut fields = format!("ids: \"{ids}\", rows: {rows}, width: {width}");
            let is_computed = ids == "positions" && width >= 4 && width.is_multiple_of(2);
            match is_computed && self.chance(50) {
                true => {
                    let style = self.one_of(&["over_width", "over_half"]);
                    write!(fields, ", sinusoid: {style}").expect("a string takes everything");
                }
                false => {
                    let table = self.weight(&[rows, width], "table");
                    write!(fields, ", table: \"{table}\"").expect("a string takes everything");
                }
            }
            if offset > 0 {
                write!(fields, ", offset: {offset}").expect("a string takes everything");
            }
            if ids == "positions" && self.chance(30) {
                fields += ", skips: 0";
            }
            let op = format!("embedding({fields})");
            let x = self.value(&op, Shape::Rows(Of::Tokens, width), 0.2);
            sum = Some(match sum {
                None => x,
                Some(sum) => self.add(&sum, &x),
            });
        }
        let sum = sum.expect("there is one at least");
        if self.chance(75) {
            self.layer_norm(&sum);
        }
    }

    fn add(&mut self, a: &Value, b: &Value) -> Value {
        let (a, b) = match self.chance(50) {
            true => (a, b),
            false => (b, a),
        };
        let op = format!("add(a: \"{}\", b: \"{}\")", a.name, b.name);
        let size = a.size + b.size;
        let sum = self.value(&op, a.shape, size);
        self.tamed(sum)
    }

    /// Multiplies `gate`, an activated projection of `x`, by another projection of `x`.
    fn gated(&mut self, x: &Value, gate: &Value, bias: bool) -> Value {
        let up = self.linear(x, gate.width(), bias);
        let (a, b) = match self.chance(50) {
            true => (gate, &up),
            false => (&up, gate),
        };
        let op = format!("multiply(a: \"{}\", b: \"{}\")", a.name, b.name);
        let size = a.size * b.size;
        let product = self.value(&op, gate.shape, size);
        self.tamed(product)
    }

    fn tamed(&mut self, x: Value) -> Value {
        if x.size <= 4.0 {
            return x;
        }
        let op = format!("scale(x: \"{}\", by: \"1 / {}\")", x.name, x.size.ceil());
        self.value(&op, x.shape, 1.0)
    }

    /// Returns the call of a random norm of the rows of `x`.
    fn norm(&mut self, x: &Value) -> String {
        let norm = self.one_of(operators::norms::ALL);
        let has = |field: &str| norm.fields().contains(&field);
        let (dims, eps) = ([x.width()], self.one_of(&["0.01", "0.001"]));
        let mut op = format!("{}(x: \"{}\", eps: {eps}", norm.name, x.name);
        let plus_one = has("plus_one") && self.chance(50);
        if plus_one {
            op += ", plus_one: true";
        }
        // The weight is optional only in `layer_norm`, the only norm that may have a bias.
        let bare = has("bias") && !plus_one && self.chance(20);
        if has("weight") && !bare {
            // With `plus_one`, the norm adds 1 to the stored weight. The name ends differently, so other norms do not share the weight.
            let kind = if plus_one { "less_one" } else { "weight" };
            let weight = self.weight(&dims, kind);
            write!(op, ", weight: \"{weight}\"").expect("a string takes everything");
        }
        if has("bias") && self.chance(75) {
            let bias = self.weight(&dims, "bias");
            write!(op, ", bias: \"{bias}\"").expect("a string takes everything");
        }
        op + ")"
    }

    /// Splits the rows into `heads` equal parts, and applies RMSNorm or LayerNorm to each part.
    fn norm_heads(&mut self, x: &Value, heads: u32) -> Value {
        let head = x.width() / heads;
        if self.chance(40) {
            let weight = self.weight(&[heads, head], "weight");
            let pairs = match self.chance(50) && head > 1 {
                true => format!(", interleaved: {}", head / 2 * 2),
                false => String::new(),
            };
            let op = format!(
                "layer_norm(x: \"{}\", weight: \"{weight}\", eps: 0.01, heads: {heads}{pairs})",
                x.name
            );
            return self.value(&op, x.shape, 1.0);
        }
        let plus_one = self.chance(30);
        let kind = if plus_one { "less_one" } else { "weight" };
        let weight = self.weight(&[head], kind);
        let op = format!(
            "rms_norm(x: \"{}\", weight: \"{weight}\", eps: 0.01, heads: {heads}, plus_one: {plus_one})",
            x.name
        );
        self.value(&op, x.shape, 1.0)
    }

    /// Returns the fields of a rotary embedding that rotates the first `columns` columns of each head. Sometimes, its frequencies are
    /// scaled. `columns` must be even.
    fn turning(&mut self, columns: u32) -> String {
        let theta = self.one_of(&[100, 10_000]);
        let mut fields = format!("width: {columns}, theta: {theta}");
        if self.chance(60) {
            let scaling = self.one_of(&SCALINGS);
            write!(fields, ", scaling: [\"absent\", \"{scaling}\"]")
                .expect("a string takes everything");
        }
        if self.chance(10) {
            fields += ", longest: 6";
        }
        fields
    }

    fn turn(&mut self, x: &Value, heads: u32, turning: &str) -> Value {
        let op = format!("rotary(x: \"{}\", heads: {heads}, {turning})", x.name);
        self.value(&op, x.shape, x.size * 1.2)
    }

    fn columns(&mut self, x: &Value, from: u32, width: u32) -> Value {
        let Shape::Rows(of, _) = x.shape else {
            unreachable!("only rows have columns")
        };
        let op = format!("columns(x: \"{}\", from: {from}, width: {width})", x.name);
        self.value(&op, Shape::Rows(of, width), x.size)
    }

    fn same(&mut self, x: &Value) -> Value {
        self.value(&format!("same(x: \"{}\")", x.name), x.shape, x.size)
    }

    /// Adds a `When` statement, which selects one of two values. The selection depends on the layer's index or on config.json. The values
    /// have the shape of `x`.
    fn either(&mut self, x: &Value) -> Value {
        let test = match (self.in_loop, self.numbers.below(3)) {
            (true, 0) => "holds: \"i == 0\"",
            (true, 1) => "key: \"kinds.{i}\", is: \"odd\"",
            (true, _) => "key: \"absent.{i}\", is: \"odd\", absent: \"i % 2 == 1\"",
            (false, 0) => "holds: \"width < n_layers\"",
            (false, 1) => "key: \"hidden_act\", is: [\"relu\", \"gelu_new\"]",
            (false, _) => "key: \"absent\", is: null",
        };
        let name = format!("v{}", self.fresh());
        let (n_values, n_weights) = (self.values.len(), self.weights.len());
        write!(self.text, "        When({test}").expect("a string takes everything");
        let mut size = x.size;
        for field in ["body", "otherwise"] {
            writeln!(self.text, ", {field}: [").expect("a string takes everything");
            let y = match self.numbers.below(4) {
                0 => x.clone(),
                1 => self.activate(x),
                2 => self.scale(x),
                _ if matches!(x.shape, Shape::Rows(..)) => self.layer_norm(x),
                _ => self.scale(x),
            };
            self.named(&name, &format!("same(x: \"{}\")", y.name));
            self.text.push_str("        ]");
            size = size.max(y.size);
            // Forget the names that are defined in this branch, because statements outside the branch must not use them.
            self.values.truncate(n_values);
            self.weights.truncate(n_weights);
        }
        self.text.push_str("),\n");
        let value = Value {
            name,
            shape: x.shape,
            size,
        };
        self.values.push(value.clone());
        value
    }

    fn layer_norm(&mut self, x: &Value) -> Value {
        let op = self.norm(x);
        self.value(&op, x.shape, 1.0)
    }

    fn l2_normalize(&mut self, x: &Value) -> Value {
        let eps = self.one_of(&["0.01", "0.001"]);
        let op = format!("l2_normalize(x: \"{}\", eps: {eps})", x.name);
        self.value(&op, x.shape, 1.0)
    }

    fn linear(&mut self, x: &Value, out: u32, bias: bool) -> Value {
        let Shape::Rows(of, width) = x.shape else {
            unreachable!("only rows are multiplied by weights")
        };
        let weight = self.weight(&[out, width], "weight");
        let size = x.size * 0.2 * (width as f32).sqrt() + 0.1;
        let op = match (bias, self.chance(15)) {
            (true, false) => {
                let bias = self.weight(&[out], "bias");
                format!(
                    "linear(x: \"{}\", out: {out}, weight: \"{weight}\", bias: \"{bias}\")",
                    x.name
                )
            }
            _ if self.chance(15) => {
                let (from, behind) = (self.numbers.below(4), self.numbers.below(3));
                let of = from + out + behind;
                let weight = self.weight(&[of, width], "stacked");
                format!(
                    "linear(x: \"{}\", out: {out}, weight: \"{weight}\", of: {of}, from: {from})",
                    x.name
                )
            }
            _ => format!(
                "linear(x: \"{}\", out: {out}, weight: \"{weight}\")",
                x.name
            ),
        };
        let y = self.value(&op, Shape::Rows(of, out), size);
        match bias && !op.contains("bias") {
            true => self.add_bias(&y),
            false => y,
        }
    }

    fn add_bias(&mut self, x: &Value) -> Value {
        let bias = self.weight(&[x.width()], "bias");
        let op = format!("add_bias(x: \"{}\", bias: \"{bias}\")", x.name);
        self.value(&op, x.shape, x.size + 0.2)
    }

    fn activate(&mut self, x: &Value) -> Value {
        let x = &x.name;
        let (op, size) = match self.numbers.below(8) {
            0 => (format!("relu(x: \"{x}\")"), 1.0),
            1 => (format!("tanh(x: \"{x}\")"), 1.0),
            2 => (format!("gelu(x: \"{x}\", form: exact)"), 1.0),
            3 => (format!("gelu(x: \"{x}\", form: tanh)"), 1.0),
            4 => (format!("quick_gelu(x: \"{x}\")"), 1.0),
            5 => (format!("log1p_relu(x: \"{x}\")"), 1.0),
            6 => (format!("silu(x: \"{x}\")"), 1.0),
            _ => (format!("activation(x: \"{x}\", kind: \"act\")"), 1.0),
        };
        let like = self.values.iter().find(|v| v.name == *x);
        let (shape, before) = like.map_or((Shape::Scores(1), 1.0), |v| (v.shape, v.size));
        self.value(
            &op,
            shape,
            if op.starts_with("tanh") { size } else { before },
        )
    }

    /// Applies a soft cap, whose bound may be smaller or larger than the values.
    fn soft_cap(&mut self, x: &Value) -> Value {
        let cap = self.one_of(&[0.5f32, 2.0, 50.0]);
        let op = format!("soft_cap(x: \"{}\", cap: {cap:?})", x.name);
        self.value(&op, x.shape, x.size.min(cap))
    }

    fn scale(&mut self, x: &Value) -> Value {
        let (by, factor) = self.one_of(&[
            ("0.5", 0.5),
            ("\"1 / sqrt(8)\"", 0.35),
            ("\"0 - 1\"", 1.0),
            ("2", 2.0),
            ("\"1 / width\"", 0.05),
        ]);
        let op = format!("scale(x: \"{}\", by: {by})", x.name);
        self.value(&op, x.shape, x.size * factor)
    }

    /// Adds attention between tokens, optionally with other operators between its steps.
    fn attention(&mut self, x: &Value) -> Value {
        let head = self.one_of(&HEAD);
        let (heads, kv_heads) = match self.chance(25) {
            true => self.one_of(&GROUPS),
            false => {
                let heads = self.one_of(&HEADS);
                (heads, heads)
            }
        };
        let bias = self.chance(60);
        let same = self.chance(85);
        // Sometimes project queries, keys and values with one matrix.
        let stacked = self.chance(20).then(|| {
            let width = (heads + 2 * kv_heads) * head;
            self.linear(x, width, bias)
        });
        let normed = self.chance(15);
        let turning = match head.is_multiple_of(2) && self.chance(35) {
            true => {
                let columns = if self.chance(75) { head } else { 2 };
                Some(self.turning(columns))
            }
            false => None,
        };
        let mut split: Vec<Value> = Vec::new();
        let mut projected: Vec<Value> = Vec::new();
        let mut column = 0;
        for role in 0..3 {
            if role == 1 && heads == kv_heads && self.chance(10) {
                split.push(split[0].clone());
                projected.push(projected[0].clone());
                column += heads * head;
                continue;
            }
            let from = match same {
                true => x.clone(),
                false => self.tokens(),
            };
            let own = if role == 0 { heads } else { kv_heads };
            let mut y = match &stacked {
                Some(stacked) => self.columns(stacked, column, own * head),
                None => {
                    let head = match role == 2 && self.chance(10) {
                        true => self.one_of(&HEAD),
                        false => head,
                    };
                    let has_bias = if self.chance(90) { bias } else { !bias };
                    self.linear(&from, own * head, has_bias)
                }
            };
            column += own * head;
            if role < 2 {
                // Normally, both queries and keys are normalized and rotated. Sometimes, this is left out for one of them.
                if normed && self.chance(95) {
                    y = self.norm_heads(&y, own);
                }
                if let Some(turning) = turning.as_ref().filter(|_| self.chance(95)) {
                    y = self.turn(&y, own, turning);
                }
            }
            let op = format!("split_heads(x: \"{}\", heads: {own})", y.name);
            let shape = Shape::Heads(own, y.width() / own);
            split.push(self.value(&op, shape, y.size));
            projected.push(y);
        }
        let (q, k, mut v) = (split[0].clone(), split[1].clone(), split[2].clone());
        let op = format!(
            "matmul(a: \"{}\", b: \"{}\", transpose_b: true)",
            q.name, k.name
        );
        let size = q.size * k.size * (head as f32).sqrt();
        let mut scores = self.value(&op, Shape::Scores(heads), size);
        if heads == kv_heads && self.chance(15) {
            let of = self.numbers.below(2) as usize;
            let other = self.relative_scores(&projected[of], heads, ["query", "key"][of]);
            scores = self.add(&scores, &other);
        }
        for _ in 0..self.one_of(&[0, 1, 1, 1, 2]) {
            scores = self.scale(&scores);
        }
        scores = self.pointwise(scores, 12);
        scores = self.tamed(scores);
        if self.chance(20) {
            scores = self.soft_cap(&scores);
        }
        let by = self.by_distance(heads);
        let op = format!("softmax(x: \"{}\"{by})", scores.name);
        let mut weights = self.value(&op, scores.shape, 1.0);
        weights = self.pointwise(weights, 5);
        v = self.pointwise(v, 5);
        let op = format!("matmul(a: \"{}\", b: \"{}\")", weights.name, v.name);
        let Shape::Heads(_, of_value) = v.shape else {
            unreachable!("values were split")
        };
        let shape = Shape::Heads(heads, of_value);
        let mut context = self.value(&op, shape, v.size * weights.size);
        context = self.pointwise(context, 8);
        let op = format!("merge_heads(x: \"{}\")", context.name);
        let shape = Shape::Rows(Of::Tokens, context.width());
        self.value(&op, shape, context.size)
    }

    /// Computes attention scores with a vector for each distance between two tokens (`relative_scores`). The vectors are a table in the
    /// checkpoint, or a linear projection of such a table.
    fn relative_scores(&mut self, x: &Value, heads: u32, of: &str) -> Value {
        let (span, reach) = self.one_of(&[(1, None), (3, None), (4, Some(9)), (7, Some(12))]);
        let (n, width) = (self.fresh(), x.width());
        let from = match self.chance(50) {
            true => self.one_of(&WIDTHS),
            false => width,
        };
        let table = self.weight(&[2 * span, from], "distances");
        let reach = reach.map_or(String::new(), |reach| format!(", reach: {reach}"));
        let name = format!("t{n}");
        self.named(
            &name,
            &format!("position_table(table: \"{table}\", width: {from}, span: {span}{reach})"),
        );
        let mut table = name.clone();
        if from != width {
            table = format!("p{n}");
            let weight = self.weight(&[width, from], "weight");
            let op = format!("linear(x: \"{name}\", out: {width}, weight: \"{weight}\")");
            self.named(&table, &op);
        }
        let op = format!(
            "relative_scores(x: \"{}\", table: \"{table}\", heads: {heads}, of: {of})",
            x.name
        );
        let size = x.size * 0.3 * (width as f32).sqrt();
        self.value(&op, Shape::Scores(heads), size)
    }

    /// Returns random arguments of a softmax as text: masks and biases that depend on the distance between two tokens, and sinks. The text is
    /// often empty.
    fn by_distance(&mut self, heads: u32) -> String {
        let mut fields = String::new();
        if self.chance(15) {
            fields += ", causal: true";
        }
        if self.chance(15) {
            write!(fields, ", window: {}", self.numbers.below(5))
                .expect("a string takes everything");
        }
        match self.numbers.below(8) {
            0 if self.chance(50) => fields += ", bias: alibi(scale: 0.3)",
            0 => fields += ", bias: alibi",
            1 => {
                let (buckets, reach) = self.one_of(&[(4, 3), (6, 5), (8, 40)]);
                let table = self.weight(&[buckets, heads], "biases");
                let bidirectional = self.chance(50);
                write!(
                    fields,
                    ", bias: relative_bias(table: \"{table}\", buckets: {buckets}, reach: {reach}, bidirectional: {bidirectional})"
                )
                .expect("a string takes everything");
            }
            _ => {}
        }
        if self.chance(25) {
            let sinks = self.weight(&[heads], "sinks");
            write!(fields, ", sinks: \"{sinks}\"").expect("a string takes everything");
        }
        fields
    }

    /// Adds another value to `x`, applies an activation, and scales the result. Each step is done with a probability of `percent` %.
    fn pointwise(&mut self, mut x: Value, percent: u32) -> Value {
        if self.chance(percent) {
            let shape = x.shape;
            let other = self.pick(|v| v.shape == shape).unwrap_or_else(|| x.clone());
            x = self.add(&x, &other);
        }
        if self.chance(percent) {
            x = self.activate(&x);
        }
        if self.chance(percent) {
            x = self.scale(&x);
        }
        x
    }

    /// Adds a residual block: attention or another branch, the sum of its result and its input, and usually a LayerNorm.
    fn block(&mut self) {
        let x = self.tokens();
        let y = self.branch(&x);
        let sum = self.add(&x, &y);
        let sum = match self.chance(15) {
            true => {
                let shape = sum.shape;
                let other = self.pick(|v| v.shape == shape);
                self.add(&sum, &other.unwrap_or(x))
            }
            false => sum,
        };
        if self.chance(80) {
            self.layer_norm(&sum);
        }
    }

    /// Adds a branch that reads `x`: attention or a feed-forward network. Its result has the width of `x`, so that it can be added to `x`.
    fn branch(&mut self, x: &Value) -> Value {
        let bias = self.chance(70);
        let inner = match self.chance(60) {
            true => self.attention(x),
            false => {
                let out = self.one_of(&WIDTHS);
                let y = self.linear(x, out, bias);
                let y = self.activate(&y);
                match self.chance(30) {
                    true => self.gated(x, &y, bias),
                    false => y,
                }
            }
        };
        self.linear(&inner, x.width(), bias)
    }

    /// Adds a `Repeat` statement of layers. The value that a layer computes is the input of the next layer.
    fn repeated(&mut self) {
        let x = self.tokens();
        let n = self.fresh();
        let times = self.one_of(&["2", "\"n_layers\"", "\"n_layers - 1\""]);
        writeln!(
            self.text,
            "        Repeat(times: {times}, index: \"i\", name: \"layer{n}\", body: ["
        )
        .expect("a string takes everything");
        let n_values = self.values.len();
        self.in_loop = true;
        let mut last = x.clone();
        for _ in 0..1 + self.numbers.below(2) {
            if self.chance(30) {
                last = self.either(&last);
            }
            let y = self.branch(&last);
            last = self.add(&last, &y);
            if self.chance(50) {
                last = self.layer_norm(&last);
            }
        }
        let op = self.norm(&last);
        self.named(&x.name, &op);
        self.in_loop = false;
        self.values.truncate(n_values);
        for value in self.values.iter_mut().filter(|v| v.name == x.name) {
            value.size = 1.0;
        }
        self.text.push_str("        ]),\n");
    }

    /// Pools rows of tokens to one row for each sequence, and processes the result.
    fn pooled(&mut self) {
        let x = self.tokens();
        let op = self.one_of(&[
            "first_token",
            "last_token",
            "mean_pool",
            "max_pool",
            "weighted_mean_pool",
            "root_length_pool",
        ]);
        let op = format!("{op}(x: \"{}\")", x.name);
        let mut x = self.value(&op, Shape::Rows(Of::Batch, x.width()), x.size);
        if self.chance(40) {
            x = self.l2_normalize(&x);
        }
        if self.chance(40) {
            let out = self.one_of(&WIDTHS);
            x = self.linear(&x, out, true);
            x = self.activate(&x);
        }
        if self.chance(15) {
            let log_variance = self.linear(&x, x.width(), true);
            let log_variance = self.value(
                &format!("tanh(x: \"{}\")", log_variance.name),
                log_variance.shape,
                1.0,
            );
            let op = format!(
                "draw(mean: \"{}\", log_variance: \"{}\")",
                x.name, log_variance.name
            );
            x = self.value(&op, x.shape, x.size + 5.0);
        }
        if self.chance(30) {
            self.concat(&x);
        }
    }

    /// Concatenates the rows of `x` with those of other values that have the same number of rows.
    fn concat(&mut self, x: &Value) -> Value {
        let Shape::Rows(of, mut width) = x.shape else {
            return x.clone();
        };
        let mut names = vec![format!("\"{}\"", x.name)];
        let mut size = x.size;
        for _ in 0..1 + self.one_of(&[0, 0, 1, 2, 14]) {
            let is_one = |v: &Value| matches!(v.shape, Shape::Rows(o, w) if o == of && w <= 40);
            if let Some(other) = self.pick(is_one) {
                names.push(format!("\"{}\"", other.name));
                width += other.width();
                size = size.max(other.size);
            }
        }
        if names.len() < 2 {
            return x.clone();
        }
        let op = format!("concat(of: [{}])", names.join(", "));
        self.value(&op, Shape::Rows(of, width), size)
    }

    /// Applies a random operator to a random value.
    fn any(&mut self) {
        let Some(x) = self.pick(|_| true) else { return };
        let x = self.tamed(x);
        let is_rows = matches!(x.shape, Shape::Rows(..));
        match (self.numbers.below(14), is_rows) {
            (0, _) => self.scale(&x),
            (1, _) => self.activate(&x),
            (2 | 3, _) => {
                let shape = x.shape;
                let other = self.pick(|v| v.shape == shape).unwrap_or_else(|| x.clone());
                self.add(&x, &other)
            }
            (4, true) => self.layer_norm(&x),
            (5, true) => self.l2_normalize(&x),
            (6, true) => self.add_bias(&x),
            (7, true) => {
                let (out, bias) = (self.one_of(&WIDTHS), self.chance(50));
                self.linear(&x, out, bias)
            }
            (8, true) => self.concat(&x),
            (9, true) => {
                let from = self.numbers.below(x.width());
                let width = 1 + self.numbers.below(x.width() - from);
                self.columns(&x, from, width)
            }
            (10, _) => self.same(&x),
            (11, _) => self.either(&x),
            (12, _) => {
                let x = self.tokens();
                match (x.width() % 2, self.chance(50)) {
                    (0, true) => {
                        let turning = self.turning(x.width());
                        self.turn(&x, 1, &turning)
                    }
                    _ => {
                        self.log_probability(&x);
                        x
                    }
                }
            }
            _ => self.scale(&x),
        };
    }

    /// Computes the log-probability of each token from logits.
    fn log_probability(&mut self, x: &Value) {
        // The width of the logits is the number of token ids.
        let logits = self.linear(x, 16, false);
        let logits = self.tamed(logits);
        let op = format!("log_probability(x: \"{}\")", logits.name);
        let name = format!("v{}", self.fresh());
        self.named(&name, &op);
        self.ends.push(name);
    }

    /// Adds an invalid statement.
    fn wrong(&mut self) {
        let x = self.tokens();
        let (name, width) = (x.name.as_str(), x.width());
        let op = match self.numbers.below(9) {
            0 => format!("split_heads(x: \"{name}\", heads: {})", width + 1),
            1 => format!("merge_heads(x: \"{name}\")"),
            2 => format!("softmax(x: \"{name}\")"),
            3 => format!("matmul(a: \"{name}\", b: \"{name}\", transpose_b: true)"),
            4 => format!("concat(of: [\"{name}\"])"),
            5 => format!("linear(x: \"{name}\", out: 0, weight: \"wrong\")"),
            6 => format!("max_pool(x: \"no{name}\")"),
            7 => {
                let end = format!("v{}", self.fresh());
                self.named(&end, &format!("log_probability(x: \"{name}\")"));
                format!("scale(x: \"{end}\", by: 2)")
            }
            _ => format!("l2_normalize(x: \"{name}\", eps: 0)"),
        };
        self.value(&op, x.shape, 1.0);
    }

    /// Completes the description. Its outputs are the last value and some other values.
    fn finish(mut self) -> String {
        let last = self.values.last().map(|v| v.name.clone());
        let mut outputs: Vec<String> = last.into_iter().collect();
        outputs.append(&mut self.ends);
        for _ in 0..self.numbers.below(4) {
            if let Some(value) = self.pick(|_| true)
                && !outputs.contains(&value.name)
            {
                outputs.push(value.name);
            }
        }
        let map: Vec<String> = outputs
            .iter()
            .map(|name| format!("\"out_{name}\": \"{name}\""))
            .collect();
        let names: Vec<String> = outputs.iter().map(|n| format!("\"out_{n}\"")).collect();
        format!(
            "Model(\n    name: \"random\",\n    dims: {{\"width\": Key(\"width\"), \"n_layers\": Key(\"n_layers\")}},\n    activations: {{\"act\": Key(\"hidden_act\")}},\n    graph: [\n{}    ],\n    outputs: {{{}}},\n    default: [{}],\n)\n",
            self.text,
            map.join(", "),
            names.join(", ")
        )
    }
}
