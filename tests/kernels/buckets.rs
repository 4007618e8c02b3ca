//! Checks, for batches of all shipped models, that the bucket of a batch (its shape rounded up, so that similar batches share a CUDA graph)
//! launches the same kernels as the batch, and takes little more memory.

use std::sync::LazyLock;

use crate::common::{hopper, usual};
use gemmule::{
    DType,
    engine::{CompileOptions, compile, description},
    graph::Op,
    kernels::trial::uniform,
    measure::shipped_configs,
    passes,
    plan::{Allocator, ChunkAllocator, ChunkPolicy, lower_bound},
    program::{AttentionChoice, Buckets, Program},
    tensor::Extents,
};

/// The result of [`programs`], which is computed once, because two tests use it.
static PROGRAMS: LazyLock<Vec<(String, Program)>> = LazyLock::new(programs);

/// Returns labeled programs of all shipped models, for cards with and without Hopper's instructions. Attention is default, grouped, short
/// or unfused. Grouped and short attention are left out for models that these kernels do not support.
fn programs() -> Vec<(String, Program)> {
    let all: Vec<String> = passes::all().iter().map(|p| p.name().to_owned()).collect();
    let mut programs = Vec::new();
    for (name, model, config) in shipped_configs().expect("the configs are sound") {
        let model = description(model).expect("it is shipped");
        // Short and grouped attention require attention to all keys without a cap or a bias, and one key head for each query head.
        let options = CompileOptions::new(DType::F16, usual());
        let compiled = compile(&model, &config, &options).expect("it compiles");
        let mut nodes = compiled.graph.topological().into_iter();
        let is_full = nodes.all(|id| match compiled.graph.op(id) {
            Op::Attention(of) => of.is_full(),
            _ => true,
        });
        for (machine, attention, without) in [
            (usual(), AttentionChoice::Auto, &all[..0]),
            (hopper(), AttentionChoice::Auto, &all[..0]),
            (hopper(), AttentionChoice::Grouped, &all[..0]),
            (usual(), AttentionChoice::Short, &all[..0]),
            (usual(), AttentionChoice::Auto, &all[..]),
        ] {
            if !is_full && attention != AttentionChoice::Auto {
                continue;
            }
            let card = machine.name.clone();
            let options = CompileOptions {
                attention,
                without: without.iter().cloned().collect(),
                ..CompileOptions::new(DType::F16, machine)
            };
            let compiled = compile(&model, &config, &options).expect("it compiles");
            let passes = if without.is_empty() {
                "fused"
            } else {
                "unfused"
            };
            let label = format!("{name}, {card}, {attention}, {passes}");
            programs.push((label, compiled.program));
        }
    }
    programs
}

/// Returns whether the program with this label stores attention scores in tensors.
fn stores_scores(name: &str) -> bool {
    name.ends_with("unfused") || name.contains("grouped")
}

fn batches() -> Vec<Extents> {
    let mut state = 3;
    let mut draw = |below: u64| uniform(&mut state) % below;
    let mut batches: Vec<Extents> = (1..=512)
        .step_by(7)
        .map(|n| Extents::of(&[n]).expect("a batch"))
        .collect();
    for _ in 0..300 {
        let (n, longest) = (1 + draw(40), 1 + draw(512));
        let lens: Vec<u32> = (0..n).map(|_| 1 + draw(longest) as u32).collect();
        batches.push(Extents::of(&lens).expect("a batch"));
    }
    batches
}

/// Returns, for each step of a program, the kernel that it launches for a batch, `None` if it launches none, or an error.
fn kernels(program: &Program, batch: &Extents) -> Vec<Result<Option<usize>, String>> {
    let steps = program.steps.iter();
    let launched = steps.map(|step| step.launch(batch).map_err(|e| e.to_string()));
    launched
        .map(|l| l.map(|l| l.map(|(kernel, _)| kernel)))
        .collect()
}

#[test]
fn a_bucket_has_the_kernels_of_its_batches_and_is_its_own() {
    let batches = batches();
    for (name, program) in PROGRAMS.iter() {
        let buckets = Buckets::of(program);
        let mut shared = 0;
        for batch in &batches {
            let bucket = buckets.of_batch(batch);
            assert!(
                kernels(program, batch) == kernels(program, &bucket),
                "{name}: {batch:?}, {bucket:?}"
            );
            assert_eq!(buckets.of_batch(&bucket), bucket, "{name}: {batch:?}");
            if bucket == *batch {
                continue;
            }
            shared += 1;
            assert!(
                bucket.tokens >= batch.tokens && bucket.batch >= batch.batch,
                "{name}: {batch:?}"
            );
            assert!(
                bucket.longest >= batch.longest && bucket.pairs >= batch.pairs,
                "{name}: {batch:?}"
            );
            // If the bucket has more sequences than the batch, it also has more tokens, because an added sequence needs a token.
            assert!(
                bucket.batch == batch.batch || bucket.tokens > batch.tokens,
                "{name}: {batch:?}"
            );
            let more = bucket.tokens - batch.tokens;
            assert!(
                more < 8 || more * 32 <= batch.tokens,
                "{name}: {batch:?}, {bucket:?}"
            );
        }
        match stores_scores(name) {
            true => assert_eq!(shared, 0, "{name}"),
            false => assert!(shared > 50, "{name}: {shared}"),
        }
    }
}

#[test]
fn a_bucket_takes_at_most_a_tenth_more_than_its_batch_must() {
    let batches = batches();
    let mut worst: f64 = 0.0;
    for (name, program) in PROGRAMS.iter() {
        let buckets = Buckets::of(program);
        let bound = |e: &Extents| Some(lower_bound(&program.usage(e).ok()?) as f64);
        for batch in &batches {
            let Some(bound) = bound(batch) else {
                continue;
            };
            let usage = program
                .usage(&buckets.of_batch(batch))
                .expect("as the batch's");
            let plan = ChunkAllocator::default().plan(&usage).expect("a plan");
            let ratio = plan.footprint() as f64 / bound;
            // For few tokens, one default chunk may be larger than all tensors together.
            let chunk = ChunkPolicy::default().default_chunk as f64;
            // If scores are stored, three large tensors are alive at the same time, each in a separate chunk with headroom.
            let most = match stores_scores(name) {
                true => 1.20,
                false => 1.10,
            };
            assert!(
                ratio <= most + chunk / bound,
                "{name}: {batch:?} takes {ratio} of its bound"
            );
            worst = worst.max(ratio);
        }
    }
    assert!(worst > 1.03, "{worst}");
}
