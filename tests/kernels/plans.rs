//! Tests of memory plans of the shipped models: tensors that are alive at the same time never overlap, and for every sequence length the
//! planned memory is close to its lower bound.

use gemmule::{
    DType,
    engine::{CompileOptions, compile, description},
    measure::shipped_configs,
    passes,
    plan::{Allocator, ChunkAllocator, ChunkPolicy, lower_bound},
    tensor::Extents,
};

fn check(lens: &[u32], program: &gemmule::program::Program, name: &str) {
    let extents = Extents::of(lens).expect("a batch");
    let usage = program.usage(&extents).expect("the sizes fit");
    let plan = ChunkAllocator::default().plan(&usage).expect("a plan");
    plan.validate(&usage).expect("a sound plan");
    let (footprint, bound) = (plan.footprint() as f64, lower_bound(&usage) as f64);
    let chunk = ChunkPolicy::default().default_chunk as f64;
    assert!(
        footprint <= 1.10 * bound + chunk,
        "{name} at {lens:?}: {footprint} for {bound}"
    );
}

#[test]
fn every_shipped_model_is_planned_close_to_the_bound_at_every_length() {
    for (name, model, config) in shipped_configs().expect("the configs are sound") {
        let model = description(model).expect("it is shipped");
        let fused = crate::common::options(DType::F16);
        let without = passes::all().iter().map(|p| p.name().to_owned()).collect();
        let unfused = CompileOptions {
            without,
            ..crate::common::options(DType::F32)
        };
        for (options, step) in [(fused, 1), (unfused, 37)] {
            let program = compile(&model, &config, &options)
                .expect("it compiles")
                .program;
            for n in (1..=512).step_by(step) {
                check(&[n], &program, name);
                check(&[n, 1, n.div_ceil(2), 512 - n / 2], &program, name);
            }
        }
    }
}
