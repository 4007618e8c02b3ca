//! Memory of a generator, computed before allocation.

use super::{
    GenerateError, GenerationModel, LoadedModel, Parts, SamplingParams,
    admit::{Space, blocks_needed, tokens_before},
    check_generating, default_prompt_tokens,
    device::room,
};
use crate::{
    program::{Program, Storage},
    runtime::{AllocatorChoice, GraphChoice, Planner, batch::BatchError, cuda::LoopRoom},
    tensor::Extents,
};

/// Memory of a generator in bytes, by purpose. Page-locked host memory is not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GeneratorBytes {
    /// Weights, shared by all generators of an engine.
    pub weights: u64,
    /// Blocks of the KV cache.
    pub cache: u64,
    /// Intermediate tensors, sized for the largest batches.
    pub intermediates: u64,
    /// Batch metadata and, on a device, the state of the decode loop.
    pub state: u64,
}

impl GeneratorBytes {
    /// Returns the sum of all bytes.
    pub fn all(&self) -> u64 {
        self.weights + self.cache + self.intermediates + self.state
    }
}

impl GenerationModel<'_> {
    pub(crate) fn generator_bytes(
        &self,
        prompts: &[usize],
        options: &SamplingParams,
        cache_bytes: u64,
    ) -> Result<GeneratorBytes, GenerateError> {
        check_generating(self.program())?;
        let graphs = match self.model {
            LoadedModel::Cpu(_) => None,
            LoadedModel::Cuda(_) => Some(self.graphs),
        };
        let positions = self.limits.longest;
        let workload = Workload {
            prompts,
            options,
            positions,
            cache_bytes,
        };
        Ok(GeneratorBytes {
            weights: self.model.weight_bytes(),
            ..workload.held(self.program(), graphs)?
        })
    }
}

/// The workload of a generator.
struct Workload<'a> {
    prompts: &'a [usize],
    options: &'a SamplingParams,
    positions: Option<u32>,
    cache_bytes: u64,
}

impl Workload<'_> {
    /// Returns the memory that the workload needs, without the weights. `graphs` is `None` for a CPU.
    fn held(
        &self,
        program: &Program,
        graphs: Option<GraphChoice>,
    ) -> Result<GeneratorBytes, GenerateError> {
        let parts = Parts::of(program);
        let beams = self.options.beams;
        let blocks = self.cache_bytes / program.block_bytes().max(1);
        let fits = |n: &usize| self.positions.is_none_or(|most| *n <= most as usize);
        let lens = self.prompts.iter().copied().filter(fits);
        let mut lens: Vec<usize> = lens.map(|n| n.max(1)).collect();
        let space = Space {
            positions: self.positions,
            parts,
            blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
        };
        lens.sort_unstable();
        if lens.is_empty() {
            lens.push(1);
        }
        // Count the shortest prompts first to get the max number of prompts that run at once.
        let (mut n, mut taken, mut tokens, mut source) = (0, 0u64, 0, 0);
        for &len in &lens {
            let before = tokens_before(parts, len);
            let new = space.new_tokens(len, self.options);
            taken += u64::from(blocks_needed(parts, len, new, beams));
            n += usize::from(taken <= blocks);
            tokens = tokens.max(before + new);
            source = source.max(parts.map_or(0, |parts| parts.positions(len)));
        }
        let rows = n.max(1) * beams.map_or(1, |beams| beams.n);
        let max_prompt_tokens = default_prompt_tokens(graphs.is_some());
        let piece = |len: usize| match parts {
            Some(_) => len,
            None => len.min(max_prompt_tokens),
        };
        // The largest prefill batch consists of the longest prompts. A source is not split over batches.
        let mut filled: Vec<u32> = Vec::new();
        let mut sum = 0;
        for len in lens.iter().rev().take(n.max(1)).map(|&len| piece(len)) {
            sum += len;
            if !filled.is_empty() && sum > max_prompt_tokens {
                break;
            }
            filled.push(len as u32);
        }
        let extents = |lens: &[u32], part| -> Result<Extents, GenerateError> {
            let fresh = Extents::continuing(lens, &vec![0; lens.len()], blocks);
            let fresh = fresh.map_err(BatchError::from)?;
            Ok(Extents { part, ..fresh })
        };
        let (encode, decode) = parts.map_or((0, 0), |parts| (parts.encode, parts.decode));
        let fill = extents(&filled, encode)?;
        let choice = AllocatorChoice::default();
        let planned = |batches: &[Extents]| -> Result<u64, GenerateError> {
            let mut planner = Planner::new(program, &choice)?;
            let mut max = 0;
            // Plan all batches twice, because the memory chunks that one batch allocates are kept for the next batch.
            for batch in batches.iter().chain(batches) {
                planner.plan(program, batch)?;
                max = max.max(planner.held().iter().sum::<u64>());
            }
            Ok(max)
        };
        let Some(graphs) = graphs else {
            // A CPU step contains the next tokens of decoding sequences and, for decoder-only models, prompt tokens.
            let mut step = vec![1; rows];
            step[0] += parts.map_or(fill.tokens as u32, |_| 0);
            let keys = (rows * tokens) as u64;
            let step = Extents {
                slots: keys,
                source_slots: (rows * source) as u64,
                source_pairs: (rows * source) as u64,
                ..extents(&step, decode)?
            };
            return Ok(GeneratorBytes {
                weights: 0,
                cache: blocks * program.block_bytes(),
                intermediates: planned(&[fill, step])?,
                state: batch_bytes(program, &fill)?.max(batch_bytes(program, &step)?),
            });
        };
        let wanted = room(rows, tokens, source);
        let room = LoopRoom {
            rows: wanted.rows.next_power_of_two(),
            ..wanted
        };
        // The decode loop has one more block for idle rows.
        let blocks = blocks + 1;
        let bucket = graphs.buckets(program, &choice).of_batch(&fill);
        let step = room.extents(room.rows, blocks, decode);
        Ok(GeneratorBytes {
            weights: 0,
            cache: blocks * program.block_bytes(),
            intermediates: planned(&[bucket])? + planned(&[step])?,
            state: batch_bytes(program, &bucket)? + room.bytes(),
        })
    }
}

/// Returns the bytes of a batch's metadata, such as the slot tables.
fn batch_bytes(program: &Program, batch: &Extents) -> Result<u64, GenerateError> {
    let data = program.tensors.iter();
    let data = data.filter(|tensor| matches!(tensor.place, Storage::Batch(_)));
    let mut bytes = 0;
    for tensor in data {
        bytes += program.bytes(tensor, batch)?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    //! Checks LightSeq's claim about memory (Wang et al. 2021, section 2.3) against the computed sizes: eight translation models
    //! (Transformer-big), each with a batch of 8, 256 tokens, 4 beams and a vocabulary of 30,000, fit in the 16 GB of one card.

    use std::collections::HashSet;

    use serde_json::json;

    use super::*;
    use crate::{
        DType,
        engine::{CompileOptions, compile, description},
        graph::WeightExpr,
        machine::testing,
        program::NEXT_LOGITS,
        search::{Beams, Rules},
    };

    const REQUESTS: usize = 8;
    const TOKENS: usize = 256;
    const BEAMS: usize = 4;
    const CARD: u64 = 16_000_000_000;

    /// Vaswani et al. 2017, table 3: the big model.
    fn transformer_big() -> Program {
        let config = json!({
            "model_type": "marian", "vocab_size": 30_000, "max_position_embeddings": 512, "d_model": 1024,
            "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 16, "decoder_attention_heads": 16,
            "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "activation_function": "relu", "scale_embedding": true,
        });
        let options = CompileOptions {
            outputs: Some(vec![NEXT_LOGITS.to_owned()]),
            cached: true,
            ..CompileOptions::new(DType::F16, testing::usual())
        };
        let model = description("marian").expect("it is shipped");
        compile(&model, &config, &options)
            .expect("it compiles")
            .program
    }

    fn weight_bytes(program: &Program) -> u64 {
        let mut seen: HashSet<&WeightExpr> = HashSet::new();
        let elements = program.tensors.iter().filter_map(|t| match &t.place {
            Storage::Weight(expr) if seen.insert(expr) => Some(expr.dims().iter().product::<u64>()),
            _ => None,
        });
        elements.sum::<u64>() * program.dtype.bytes()
    }

    #[test]
    fn eight_transformers_translate_in_the_memory_of_one_card() {
        let program = transformer_big();
        let parts = Parts::of(&program);
        let beams = Some(Beams::of(BEAMS));
        let options = SamplingParams {
            rules: Rules {
                max_new_tokens: TOKENS,
                ..Rules::default()
            },
            beams,
            ..SamplingParams::default()
        };
        let blocks = REQUESTS as u64 * u64::from(blocks_needed(parts, TOKENS, TOKENS, beams));
        let workload = Workload {
            prompts: &[TOKENS; REQUESTS],
            options: &options,
            positions: Some(512),
            cache_bytes: blocks * program.block_bytes(),
        };
        let held = workload.held(&program, Some(GraphChoice::default()));
        let one = GeneratorBytes {
            weights: weight_bytes(&program),
            ..held.expect("the sizes fit")
        };
        let said = format!("{one:?}, eight {}", 8 * one.all());
        insta::assert_snapshot!(said);
        assert!(8 * one.all() < CARD, "{said}");
    }
}
