use super::*;
use crate::{
    DType,
    engine::{CompileOptions, compile, description},
    machine,
    plan::ChunkPolicy,
    runtime::AllocatorChoice,
};

/// A fake device with `capacity` bytes.
#[derive(Default)]
struct Device {
    capacity: u64,
    chunks: Vec<u64>,
    n_failures: usize,
}

#[derive(Debug, PartialEq)]
struct Full;

impl ChunkOwner for Device {
    type Error = Full;

    fn follow(&mut self, held: &[u64]) -> Result<bool, Full> {
        let before = std::mem::take(&mut self.chunks);
        for (id, &bytes) in held.iter().enumerate() {
            let kept = before.get(id).copied().unwrap_or(0) == bytes;
            self.chunks.push(if kept { bytes } else { 0 });
        }
        let changed = before != held;
        for (id, &bytes) in held.iter().enumerate() {
            if self.bytes() - self.chunks[id] + bytes > self.capacity {
                self.n_failures += 1;
                return Err(Full);
            }
            self.chunks[id] = bytes;
        }
        Ok(changed)
    }

    fn clear(&mut self) {
        self.chunks.clear();
    }

    fn bytes(&self) -> u64 {
        self.chunks.iter().sum()
    }
}

fn program() -> Program {
    let config = serde_json::json!({
        "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 256, "vocab_size": 20, "max_position_embeddings": 65536,
        "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    });
    let bert = description("bert").unwrap();
    let options = CompileOptions::new(DType::F32, machine::testing::usual());
    compile(&bert, &config, &options).unwrap().program
}

fn batch(len: u32) -> Extents {
    Extents::of(&[len]).unwrap()
}

fn choices() -> [AllocatorChoice; 5] {
    [
        AllocatorChoice::default(),
        AllocatorChoice::Turbo,
        AllocatorChoice::Gsoc,
        AllocatorChoice::Caching,
        AllocatorChoice::Maximum(batch(60_000)),
    ]
}

fn workspace(program: &Program, choice: &AllocatorChoice, capacity: u64) -> Workspace<Device> {
    let device = Device {
        capacity,
        ..Device::default()
    };
    Workspace::new(Planner::new(program, choice).unwrap(), device)
}

#[test]
fn every_allocator_creates_the_chunks_of_its_plan() {
    let program = program();
    for choice in choices() {
        let mut workspace = workspace(&program, &choice, u64::MAX);
        for len in [300, 9000, 300, 300, 1, 60_000, 60_000, 40] {
            let before = workspace.chunks().chunks.clone();
            let (plan, changed) = workspace.make_room(&program, &batch(len)).unwrap();
            plan.validate(&program.usage(&batch(len)).unwrap()).unwrap();
            let chunks = &workspace.chunks().chunks;
            for (id, &bytes) in plan.chunks.iter().enumerate() {
                assert!(bytes == 0 || chunks[id] == bytes, "{choice:?}");
            }
            let work = workspace.work();
            assert_eq!(work.request.held, workspace.chunks().bytes());
            assert_eq!(work.request.footprint, plan.footprint());
            assert_eq!(changed, *chunks != before, "{choice:?}, {len}");
            assert!(work.planning > Duration::ZERO);
        }
    }
}

#[test]
fn a_batch_that_does_not_fit_leaves_room_for_one_that_does() {
    let program = program();
    for choice in choices() {
        let small = Planner::footprint(&program, &choice, &batch(300), &batch(300)).unwrap();
        let large = Planner::footprint(&program, &choice, &batch(60_000), &batch(60_000)).unwrap();
        let capacity = match choice {
            // With a declared maximum, every batch takes the same memory.
            AllocatorChoice::Maximum(_) => large.chunks - 1,
            _ => small.chunks,
        };
        let mut workspace = workspace(&program, &choice, capacity);
        for _ in 0..3 {
            let error = workspace.make_room(&program, &batch(60_000)).unwrap_err();
            let NoRoom::Memory { bytes, source } = error else {
                panic!("{choice:?}: {error:?}");
            };
            assert_eq!((bytes, source), (large.chunks, Full), "{choice:?}");
            assert_eq!(workspace.chunks().bytes(), 0);
            assert_eq!(workspace.work().request.held, 0);
            match (choice, workspace.make_room(&program, &batch(300))) {
                (AllocatorChoice::Maximum(_), Err(NoRoom::Memory { bytes, .. })) => {
                    assert_eq!(bytes, large.chunks);
                }
                (AllocatorChoice::Maximum(_), other) => panic!("{other:?}"),
                (_, room) => {
                    let (plan, changed) = room.unwrap();
                    assert_eq!((plan.footprint(), changed), (small.chunks, true));
                }
            }
        }
    }
}

#[test]
fn chunks_of_earlier_batches_make_room_for_a_batch_that_needs_them() {
    let program = program();
    let choice = AllocatorChoice::Caching;
    let alone = Planner::footprint(&program, &choice, &batch(24_000), &batch(24_000)).unwrap();
    let mut workspace = workspace(&program, &choice, alone.chunks);
    // The second batch needs segments of different sizes. The allocator keeps the segments of the first batch until `make_room` releases
    // them.
    workspace.make_room(&program, &batch(20_000)).unwrap();
    let (plan, changed) = workspace.make_room(&program, &batch(24_000)).unwrap();
    assert_eq!((plan.footprint(), changed), (alone.chunks, true));
    assert_eq!(workspace.chunks().n_failures, 1);
    assert_eq!(workspace.work().request.newly_allocated, alone.chunks);
}

#[test]
fn a_batch_beyond_the_declared_maximum_is_rejected() {
    let program = program();
    let maximum = Extents::of(&[512; 8]).unwrap();
    let choice = AllocatorChoice::Maximum(maximum);
    let refused = |lens: &[u32]| {
        let batch = Extents::of(lens).unwrap();
        let error = Planner::footprint(&program, &choice, &batch, &batch).unwrap_err();
        let mut workspace = workspace(&program, &choice, u64::MAX);
        match workspace.make_room(&program, &batch).unwrap_err() {
            NoRoom::Plan(other) => assert_eq!(other.to_string(), error.to_string()),
            other => panic!("{other:?}"),
        }
        // A batch within the maximum still runs afterwards.
        workspace.make_room(&program, &maximum).unwrap();
        error.to_string()
    };
    insta::assert_snapshot!(refused(&[100; 9]), @"the batch of 9 sequences, 900 tokens, 100 in the longest, 90000 pairs of tokens is beyond the declared maximum of 8 sequences, 4096 tokens, 512 in the longest, 2097152 pairs of tokens; declare a larger maximum, or send a smaller batch");
    insta::assert_snapshot!(refused(&[513]), @"the batch of 1 sequence, 513 tokens, 513 in the longest, 263169 pairs of tokens is beyond the declared maximum of 8 sequences, 4096 tokens, 512 in the longest, 2097152 pairs of tokens; declare a larger maximum, or send a smaller batch");
}

#[test]
fn an_invalid_policy_is_rejected() {
    let policy = ChunkPolicy {
        default_chunk: 1000,
        ..ChunkPolicy::default()
    };
    let error = Planner::new(&program(), &AllocatorChoice::Chunk(policy)).err();
    insta::assert_snapshot!(error.unwrap(), @"the chunk policy has default_chunk = 1000: it must be a multiple of 256 from 256 to 1152921504606846976");
}
