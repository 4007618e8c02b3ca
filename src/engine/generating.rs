//! Methods of [`Engine`] that generate tokens.

use std::ops::ControlFlow;

use super::{Engine, EngineError};
use crate::generate::{
    Event, Generation, GenerationModel, Generator, GeneratorBytes, SamplingParams, Stop,
};

impl Engine {
    /// Creates a generator with a KV cache of `cache_bytes`, rounded down to whole blocks.
    ///
    /// # Errors
    /// Returns [`GenerateError::NotGenerating`](crate::generate::GenerateError::NotGenerating) if the engine was not
    /// built with [`Builder::generating`](crate::Builder::generating), or an error if memory cannot be allocated.
    pub fn generator(&self, cache_bytes: u64) -> Result<Generator, EngineError> {
        Ok(self.generation_model().generator(cache_bytes)?)
    }

    /// Returns whether the model generates from a source text, as translation models do, instead of continuing a prompt.
    pub fn has_source(&self) -> bool {
        self.generation_model().has_source()
    }

    /// Continues each prompt and returns the results in the order of the prompts. The KV cache has the size that
    /// [`cache_bytes_at_most`](Self::cache_bytes_at_most) returns, and limits how many prompts run concurrently. See
    /// [`Generator::write_all`].
    ///
    /// # Errors
    /// Returns an error if the options are invalid for every prompt, if memory cannot be allocated, or if an entire
    /// step fails.
    pub fn generate(
        &self,
        prompts: &[Vec<u32>],
        options: &SamplingParams,
        on_event: impl FnMut(usize, &Event) -> ControlFlow<Stop>,
    ) -> Result<Vec<Generation>, EngineError> {
        Ok(self
            .generation_model()
            .generate(prompts, options, on_event)?)
    }

    /// Returns the memory that a generator with `cache_bytes` of KV cache needs if it runs prompts of lengths `prompts`, with as many
    /// concurrent prompts as fit in the cache. Does not create the generator. For an engine on a GPU, memory for requests whose tokens the
    /// host selects is not counted.
    ///
    /// # Errors
    /// Returns [`GenerateError::NotGenerating`](crate::generate::GenerateError::NotGenerating) if the engine was not
    /// built with [`Builder::generating`](crate::Builder::generating), or an error if sizes exceed the limits of the
    /// memory planner.
    pub fn generator_bytes(
        &self,
        prompts: &[usize],
        options: &SamplingParams,
        cache_bytes: u64,
    ) -> Result<GeneratorBytes, EngineError> {
        Ok(self
            .generation_model()
            .generator_bytes(prompts, options, cache_bytes)?)
    }

    /// Returns the KV cache size, in bytes, for running prompts of lengths `prompts` concurrently. If `options` do not limit the number of
    /// new tokens, each prompt is assumed to fill the model's remaining positions. Its new tokens are then assumed to take at most 1 GiB,
    /// or the memory of 4,096 new tokens if that is more.
    ///
    /// # Errors
    /// Returns [`GenerateError::NotGenerating`](crate::generate::GenerateError::NotGenerating) if the engine was not
    /// built with [`Builder::generating`](crate::Builder::generating).
    pub fn cache_bytes_needed(
        &self,
        prompts: &[usize],
        options: &SamplingParams,
    ) -> Result<u64, EngineError> {
        Ok(self
            .generation_model()
            .cache_bytes_needed(prompts, options)?)
    }

    /// Returns a KV cache size, in bytes, for prompts of lengths `prompts`. It has room for the longest prompts, up to the number that the
    /// GPU or CPU runs concurrently. It is at most half of the free memory of a GPU. On a CPU, it is at most 4 GiB if `options` do not
    /// limit the new tokens. It is never less than the longest prompt needs alone.
    ///
    /// # Errors
    /// Returns the errors of [`default_cache_bytes`](Self::default_cache_bytes).
    pub fn cache_bytes_at_most(
        &self,
        prompts: &[usize],
        options: &SamplingParams,
    ) -> Result<u64, EngineError> {
        Ok(self
            .generation_model()
            .cache_bytes_at_most(prompts, options)?)
    }

    /// Returns the default KV cache size, in bytes, for requests that are not known in advance. Each sequence is assumed to have the
    /// model's max length, or 4,096 positions if that is less. On a CPU, the cache has room for eight sequences. On a GPU, it has room for
    /// the max number of concurrent sequences if they need at most half of the free memory. Otherwise it takes half of the free memory, or
    /// the memory of eight sequences if that is more.
    ///
    /// # Errors
    /// Returns the errors of [`cache_bytes_needed`](Self::cache_bytes_needed) and errors of the device.
    pub fn default_cache_bytes(&self, options: &SamplingParams) -> Result<u64, EngineError> {
        Ok(self.generation_model().default_cache_bytes(options)?)
    }

    pub(crate) fn generation_model(&self) -> GenerationModel<'_> {
        GenerationModel {
            model: &self.model,
            limits: self.limits,
            plain_launches: self.plain_launches,
            graphs: self.graphs,
        }
    }
}
