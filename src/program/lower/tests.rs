//! Lowers every operator for every shape that shape inference accepts, and compares the results with the interpreter.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use super::{LowerOptions, lower};
use crate::{
    graph::{Bound, Graph, NodeId, Op, WeightExpr},
    kernels::{Instructions, KernelSpec},
    machine::{Machine, testing},
    ops::{
        Activation, AttentionProblem, BatchInput, Bias, Epilogue, HeadView, PoolWeights,
        PositionBias, Rotation, Side, SoftCap,
    },
    passes::{
        self,
        tests::{
            interpret,
            models::{Decoder, Encoder},
        },
    },
    program::{AttentionChoice, Padding, Program, Storage},
    runtime::{
        AllocatorChoice, Output,
        batch::Batch,
        cpu::{CpuModel, CpuSession, Threads},
        weights::{CheckpointError, WeightSource},
    },
    tensor::{DType, Extents, Format},
};

const LENS: [u32; 4] = [3, 1, 5, 2];

/// The weights that the interpreter uses.
struct Interpreted;

impl WeightSource for Interpreted {
    fn read(&self, name: &str, dims: &[u64]) -> Result<Vec<f32>, CheckpointError> {
        let n = dims.iter().product();
        let values = (0..n).map(interpret::stored(name)).map(|x| x as f32);
        Ok(values.collect())
    }

    fn check(&self, _: &[(&str, &[u64])]) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn surplus(&self, _: &[(&str, &[u64])]) -> Vec<String> {
        Vec::new()
    }
}

/// Operands of every kind of shape, in several sizes.
struct Operands {
    graph: Graph,
    all: Vec<NodeId>,
}

impl Operands {
    fn add(&mut self, name: &str, op: Op, operands: &[NodeId]) -> NodeId {
        let id = self.graph.add(name, op, operands).expect("it can be");
        self.all.push(id);
        id
    }

    fn weight(&mut self, dims: &[u64]) -> NodeId {
        let words: Vec<String> = dims.iter().map(u64::to_string).collect();
        let name = format!("weight.{}", words.join("x"));
        let dims = dims.to_vec();
        let expr = WeightExpr::Stored {
            name: name.clone(),
            dims,
        };
        self.add(&name, Op::Weight(expr), &[])
    }

    fn new() -> Self {
        let mut to = Self {
            graph: Graph::new(),
            all: Vec::new(),
        };
        let ids = to.add("ids", Op::Input(BatchInput::TokenIds), &[]);
        let [mut wide, mut heads_of] = [Vec::new(), Vec::new()];
        for width in [6, 9, 16] {
            to.weight(&[width]);
            let table = to.weight(&[13, width]);
            let embedded = Op::Embedding { offset: 0 };
            let x = to.add(&format!("tokens.{width}"), embedded, &[ids, table]);
            to.add(&format!("batch.{width}"), Op::FirstToken, &[x]);
            wide.push(x);
        }
        // Tables with one row per possible id.
        to.weight(&[14, 6]);
        // A residual as wide as the value that it is added to.
        to.weight(&[16, 16]);
        to.weight(&[14]);
        // Biases by distance, and slopes, for scores with three heads.
        to.weight(&[3, 3]);
        to.weight(&[1, 3]);
        to.weight(&[3]);
        for (x, heads, head) in [(wide[0], 3, 2), (wide[0], 2, 3), (wide[2], 2, 8)] {
            let split = Op::SplitHeads { heads };
            let x = to.add(&format!("heads.{heads}x{head}"), split, &[x]);
            let (q, k) = (HeadView::HeadMajor, HeadView::HeadMajor);
            let scores = Op::Scores {
                heads,
                kv_heads: heads,
                head,
                q,
                k,
            };
            to.add(&format!("scores.{heads}x{head}"), scores, &[x, x]);
            heads_of.push(x);
        }
        to
    }
}

/// Returns every operator, with attributes that fit some of the operands.
fn operators() -> Vec<Op> {
    let eps = 1e-3;
    let side = |offset, stride| HeadView::TokenMajor { offset, stride };
    let mut ops = interpret::rows::samples();
    ops.extend([
        Op::Embedding { offset: 0 },
        Op::Rotary {
            rotation: Rotation {
                heads: 2,
                frequencies: vec![1.0, 0.25],
                factor: 1.5,
            },
            from: 1,
            head: 4,
        },
        Op::RelativeScores {
            heads: 3,
            head: 2,
            of: Side::Query,
        },
        Op::RelativeScores {
            heads: 3,
            head: 3,
            of: Side::Key,
        },
        Op::SplitHeads { heads: 3 },
        Op::SplitHeads { heads: 2 },
        Op::MergeHeads,
        Op::Softmax {
            scale: 0.5,
            causal: false,
            by: PositionBias::default(),
        },
        Op::Softmax {
            scale: 0.5,
            causal: true,
            by: PositionBias::default(),
        },
        Op::Softmax {
            scale: 0.5,
            causal: true,
            by: PositionBias {
                window: Some(1),
                ..PositionBias::default()
            },
        },
        Op::Softmax {
            scale: 0.5,
            causal: false,
            by: PositionBias {
                bias: Some(Bias::Table { reach: 1 }),
                ..PositionBias::default()
            },
        },
        Op::Softmax {
            scale: 0.5,
            causal: false,
            by: PositionBias {
                window: Some(2),
                bias: Some(Bias::Slopes),
                cap: SoftCap::new(1.5).ok(),
                sinks: false,
            },
        },
        Op::Softmax {
            scale: 0.5,
            causal: false,
            by: PositionBias {
                sinks: true,
                ..PositionBias::default()
            },
        },
        Op::FirstToken,
        Op::LastToken,
        Op::MeanPool,
        Op::MaxPool,
        Op::WeightedPool(PoolWeights::Position),
        Op::WeightedPool(PoolWeights::RootLength),
        Op::Draw,
        Op::EmbeddingLayerNorm {
            eps,
            offsets: vec![0],
        },
        Op::MeanPoolNormalize { eps },
    ]);
    for bias in [false, true] {
        for activation in Activation::ALL.map(Some).into_iter().chain([None]) {
            let epilogue = Epilogue::new(bias, activation);
            for epilogue in [epilogue, epilogue.with_residual()] {
                ops.push(Op::Linear { epilogue });
            }
        }
    }
    for (heads, head) in [(3, 2), (2, 3), (2, 8)] {
        let stride = heads * head;
        for view in [HeadView::HeadMajor, side(0, stride)] {
            let (q, k, v) = (view, view, view);
            ops.push(Op::Scores {
                heads,
                kv_heads: heads,
                head,
                q,
                k,
            });
            for out in [HeadView::HeadMajor, side(0, stride), side(1, stride + 1)] {
                ops.push(Op::Context {
                    heads,
                    kv_heads: heads,
                    head,
                    v,
                    out,
                });
            }
            ops.push(Op::Attention(AttentionProblem::full(
                heads,
                head,
                0.5,
                [q, k, v],
            )));
        }
    }
    // One head that starts in the middle of a row.
    for (head, offset) in [(4, 1), (8, 8)] {
        let view = side(offset, 16);
        let (heads, q, k, v) = (1, view, view, view);
        ops.push(Op::Scores {
            heads,
            kv_heads: heads,
            head,
            q,
            k,
        });
        let full = AttentionProblem::full(heads, head, 0.5, [q, k, v]);
        ops.push(Op::Attention(full));
        let table = Bias::Table { reach: 1 };
        for (window, bias, cap, sinks) in [
            (Some(1), None, None, false),
            (None, Some(table), None, false),
            (None, None, SoftCap::new(0.5).ok(), false),
            (Some(1), None, None, true),
            (None, Some(table), None, true),
        ] {
            let by = PositionBias {
                window,
                bias,
                cap,
                sinks,
            };
            ops.push(Op::Attention(AttentionProblem { by, ..full }));
        }
        ops.push(Op::Attention(AttentionProblem {
            causal: true,
            ..full
        }));
    }
    ops
}

/// Returns all tuples of `n` operands. Tuples of four or more operands are formed from a small subset only.
fn tuples(graph: &Graph, all: &[NodeId], n: usize) -> Vec<Vec<NodeId>> {
    const FEW: [&str; 12] = [
        "ids",
        "tokens.6",
        "batch.6",
        "heads.3x2",
        "scores.3x2",
        "weight.6",
        "weight.13x6",
        "tokens.16",
        "weight.16",
        "weight.16x16",
        "weight.3x3",
        "weight.1x3",
    ];
    let is_one = |id: &NodeId| n < 4 || FEW.contains(&graph.node(*id).name.as_str());
    let all: Vec<NodeId> = all.iter().copied().filter(is_one).collect();
    (0..n).fold(vec![Vec::new()], |tuples, _| {
        let longer = |tuple: Vec<NodeId>| {
            let tuples = all.iter().map(|&id| [tuple.as_slice(), &[id]].concat());
            tuples.collect::<Vec<_>>()
        };
        tuples.into_iter().flat_map(longer).collect()
    })
}

#[test]
fn every_accepted_shape_lowers_and_matches_the_interpreter() {
    let mut n_accepted: BTreeMap<String, usize> = BTreeMap::new();
    for op in operators() {
        let n = n_accepted.entry(op.name().into_owned()).or_default();
        let Operands { mut graph, all } = Operands::new();
        let mut n_nodes = 0;
        for operands in tuples(&graph, &all, op.arity()) {
            // Ids may exceed the number of rows of a bias table.
            let is_bias =
                |&id: &NodeId| ["weight.3x3", "weight.1x3"].contains(&graph.node(id).name.as_str());
            if matches!(op, Op::Embedding { .. } | Op::EmbeddingLayerNorm { .. })
                && operands.iter().any(is_bias)
            {
                continue;
            }
            let name = format!("value.{n_nodes}");
            if let Ok(id) = graph.add(name.clone(), op.clone(), &operands) {
                graph.add_output(name, id);
                n_nodes += 1;
            }
        }
        if n_nodes > 0 {
            lowers_and_matches_the_interpreter(&graph);
        }
        *n += n_nodes;
    }
    for (op, n) in &n_accepted {
        assert!(*n > 0, "no operands fit {op}");
    }
}

/// Runs a program on a CPU, with the interpreter's weights and batch.
fn computed(program: Program, lens: &[u32]) -> Vec<Output> {
    let threads = Threads::usual().expect("threads");
    let model = CpuModel::load(program, threads, &Interpreted, &|_, _| ()).expect("it loads");
    let mut session =
        CpuSession::new(Arc::new(model), &AllocatorChoice::default()).expect("a session");
    let ids = interpret::Batch::new(lens).ids(BatchInput::TokenIds);
    let ids = ids.into_iter().map(|id| id as u32).collect();
    let batch = Batch::from_packed(ids, lens).expect("a batch");
    session.run(&batch).expect("it runs")
}

/// The results of programs with and without quantized rows differ only by the rounding of the rows. With packed int8 weights, the CPU
/// executor rounds the rows in both programs, so only products with an unpacked weight differ.
#[test]
fn quantized_rows_change_results_by_their_rounding() {
    // Rounding to E4M3 has a relative error of 2.6 % on average, and rounding to int8 has one of about 1 %.
    let hopper = testing::hopper();
    quantized_rows_change_results(Format::FP8, &hopper, 1e-3..0.15);
    quantized_rows_change_results(Format::FP8_128, &hopper, 1e-3..0.15);
    quantized_rows_change_results(Format::INT8, &hopper, 1e-3..0.06);
    quantized_rows_change_results(Format::INT8, &testing::usual(), 0.0..0.06);
}

fn quantized_rows_change_results(format: Format, machine: &Machine, bounds: Range<f64>) {
    let is_it = |kernel: &&KernelSpec| match kernel {
        KernelSpec::QuantizeRows(_) => format != Format::FP8_128,
        KernelSpec::QuantizeGroups(_) => format == Format::FP8_128,
        _ => false,
    };
    let decoder = Decoder {
        width: 1024,
        inner: 2048,
        layers: 1,
        kv_heads: 32,
        ..Decoder::SMALL
    };
    let graph = decoder.build().without_caches();
    let nodes = graph.topological().into_iter();
    let weights = nodes.filter(|&id| matches!(graph.op(id), Op::Linear { .. }));
    let weights = weights.filter_map(|id| graph.operand(id, "weight"));
    // Published weights keep their format in all layers, including the head.
    let published = weights.map(|id| (graph.node(id).name.clone(), format));
    let options = passes::Options {
        published: published.collect(),
        ..passes::Options::default()
    };
    let (graph, _) = passes::optimize(graph, &options).expect("it is sound");
    let program = |quantizes_rows, invariant| {
        let options = LowerOptions {
            invariant,
            quantizes_rows,
            ..lower_options(DType::F16, machine)
        };
        let program = lower(&graph, &options).expect("it lowers");
        program.validate().expect("it is sound");
        program
    };
    let conversions = |program: &Program, lens: &[u32]| {
        let extents = Extents::of(lens).expect("a batch");
        let launched = program.launched(&extents).expect("it has launches");
        let kernels = launched.iter().map(|&(_, kernel)| &program.kernels[kernel]);
        kernels.filter(is_it).count()
    };
    let lens = [400, 200];
    let (mut exact, mut rounded) = (program(false, false), program(true, false));
    assert_eq!(conversions(&exact, &lens), 0);
    assert_eq!(conversions(&program(true, true), &lens), 0);
    // On Hopper, products of few rows use the streaming GEMM without a conversion. Cards without a streaming GEMM are not checked, because
    // products in int8 may be faster there even for few rows.
    if machine.instructions == Instructions::Hopper {
        assert_eq!(conversions(&rounded, &[5]), 0);
    }
    assert!(conversions(&rounded, &lens) >= 2);
    // The CPU executes only programs in f32, so all planned tensors become f32, including those of 8-bit values.
    for program in [&mut exact, &mut rounded] {
        program.dtype = DType::F32;
        let tensors = program.tensors.iter_mut();
        let planned = tensors.filter(|tensor| matches!(tensor.place, Storage::Planned { .. }));
        planned.for_each(|tensor| tensor.element = DType::F32.into());
    }
    let (want, got) = (computed(exact, &lens), computed(rounded, &lens));
    for (want, got) in want.iter().zip(&got) {
        assert_eq!(want.values.len(), got.values.len());
        let squares = |values: &mut dyn Iterator<Item = f32>| -> f64 {
            values.map(|v| f64::from(v) * f64::from(v)).sum()
        };
        let pairs = want.values.iter().zip(&got.values);
        let off = squares(&mut pairs.map(|(want, got)| want - got));
        let error = (off / squares(&mut want.values.iter().copied())).sqrt();
        assert!(bounds.contains(&error), "{format}, {}: {error}", want.name);
    }
}

fn lowers_and_matches_the_interpreter(graph: &Graph) {
    graph.verify().expect("the graph is sound");
    let (hopper, usual) = (testing::hopper(), testing::usual());
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        for machine in [&hopper, &usual] {
            let program = lower(graph, &lower_options(dtype, machine)).expect("all of it lowers");
            program.validate().expect("it is sound");
        }
    }
    let program = lower(graph, &lower_options(DType::F32, &usual)).expect("it lowers");
    let plain = interpret::Batch::new(&LENS);
    let outputs = computed(program, &LENS);
    let wanted = interpret::evaluate(graph, &plain);
    assert_eq!(outputs.len(), graph.outputs().len());
    for output in outputs {
        let want = &wanted[&output.name];
        let id = graph.outputs().iter().find(|(n, _)| *n == output.name);
        let text = || {
            id.map(|&(_, id)| format!("{} {}", graph.op(id), graph.shape(id)))
                .unwrap_or_default()
        };
        assert_eq!(output.values.len(), want.len(), "{}", text());
        let largest = want.iter().fold(1.0, |m: f64, v| m.max(v.abs()));
        for (got, want) in output.values.iter().zip(want) {
            let error = (f64::from(*got) - want).abs();
            assert!(
                error <= 2e-5 * largest,
                "{}: {got}, expected {want}",
                text()
            );
        }
    }
}

/// Returns the options of a program that is fused and not invariant.
fn lower_options(dtype: DType, machine: &Machine) -> LowerOptions<'_> {
    LowerOptions {
        dtype,
        padding: Padding::Removed,
        machine,
        timings: None,
        attention: AttentionChoice::Auto,
        invariant: false,
        quantizes_rows: true,
        no_fused_launches: false,
    }
}

/// Returns an encoder whose linear layers multiply E4M3.
fn encoder_in_fp8() -> Graph {
    let encoder = Encoder {
        width: 64,
        inner: 96,
        ..Encoder::SMALL
    };
    let options = passes::Options {
        quantize: Some(Format::FP8),
        fp8_inputs: true,
        ..passes::Options::default()
    };
    let (graph, _) = passes::optimize(encoder.build(), &options).expect("it is sound");
    graph
}

#[test]
fn a_program_in_fp8_is_sound_and_one_with_an_impossible_bound_is_refused() {
    let (machine, graph) = (testing::hopper(), encoder_in_fp8());
    let options = |invariant| LowerOptions {
        invariant,
        ..lower_options(DType::F16, &machine)
    };
    let program = lower(&graph, &options(true)).expect("it lowers");
    program.validate().expect("it is sound");
    let good = lower(&graph, &options(false)).expect("it lowers");
    good.validate().expect("it is sound");
    let converts = |kernel: &KernelSpec| {
        matches!(kernel, KernelSpec::ToE4m3(_) | KernelSpec::NormToE4m3(_))
            || matches!(kernel, KernelSpec::GemmWgmma(k) if k.problem.to_e4m3)
            || matches!(kernel, KernelSpec::MhaToE4m3(_))
    };
    // The results of these nodes are converted to E4M3: the embeddings, the attention, both norms and the inner layer.
    assert!(good.kernels.iter().any(converts));
    let first_bound = |program: &mut Program, damage: fn(&mut Bound)| {
        for tensor in &mut program.tensors {
            if let Storage::Weight(WeightExpr::Scale(bound)) = &mut tensor.place
                && bound.linear.is_some()
            {
                damage(bound);
                return;
            }
        }
        panic!("an inner layer has a bound");
    };
    let damages: [fn(&mut Bound); 5] = [
        |bound| bound.gamma.clear(),
        |bound| bound.beta.extend(bound.beta.clone()),
        |bound| bound.gamma.extend(bound.gamma.clone()),
        |bound| bound.linear.iter_mut().for_each(|l| l.from = u64::MAX),
        |bound| bound.linear.iter_mut().for_each(|l| l.outputs = 0),
    ];
    for (i, damage) in damages.into_iter().enumerate() {
        let mut program = good.clone();
        first_bound(&mut program, damage);
        assert!(program.validate().is_err(), "damage {i}");
    }
}

#[test]
fn a_program_in_fp8_runs_on_a_card_with_products_in_e4m3_but_without_those_of_hopper() {
    let (ada, graph) = (testing::ada(), encoder_in_fp8());
    for invariant in [false, true] {
        let options = LowerOptions {
            invariant,
            ..lower_options(DType::BF16, &ada)
        };
        let program = lower(&graph, &options).expect("it lowers");
        program.validate().expect("it is sound");
        let is_product =
            |kernel: &KernelSpec| matches!(kernel, KernelSpec::Gemm(k) if k.problem.is_fp8());
        assert!(program.kernels.iter().any(is_product));
        for kernel in &program.kernels {
            let kernel = kernel.as_kernel();
            assert!(
                ada.instructions.includes(kernel.instructions()),
                "{}",
                kernel.symbol()
            );
        }
    }
}
