//! Storage type of a program, and formats of its weights and KV cache, by device.

use std::collections::BTreeMap;

use super::super::{Builder, DeviceName, EngineError, default_dtype, weights};
use crate::{
    program::Program,
    runtime::weights::WeightSource,
    tensor::{DType, Format},
};

impl Builder {
    /// Returns the storage type of the program, and the format of the weights of linear layers if it differs from that type.
    pub(super) fn computes_in(
        &self,
        device: &DeviceName,
    ) -> Result<(DType, Option<Format>), EngineError> {
        const BF16: Format = Format::Plain(DType::BF16);
        let dtype = self.dtype.unwrap_or_else(|| default_dtype(device));
        match (device, dtype, self.quantize) {
            (_, _, Some(format @ Format::E4m3)) => Err(EngineError::WithoutScales { format }),
            (DeviceName::Cuda(_), DType::F32, Some(format @ Format::Scaled(_))) => {
                Err(EngineError::FormatOfF32 { format })
            }
            (DeviceName::Cuda(_), _, Some(format @ Format::Plain(_))) if format != dtype.into() => {
                Err(EngineError::TwoFormats { format })
            }
            (DeviceName::Cuda(_), _, format) => {
                Ok((dtype, format.filter(|&format| format != dtype.into())))
            }
            (DeviceName::Cpu { .. }, DType::BF16, None | Some(BF16)) => {
                Ok((DType::F32, Some(BF16)))
            }
            (DeviceName::Cpu { .. }, DType::BF16, Some(format)) => {
                Err(EngineError::TwoFormats { format })
            }
            (DeviceName::Cpu { .. }, DType::F32 | DType::F16, format) => {
                Ok((dtype, format.filter(|&format| format != dtype.into())))
            }
        }
    }

    /// Returns two maps from the names of quantized checkpoint tensors to their formats. Tensors of the first map keep their published
    /// values. Tensors of the second map have GPTQ's `desc_act` (columns sorted by quantization group), and keep their published values if
    /// their inputs can be computed in the order of the groups. Both maps are empty:
    ///
    /// - on a CPU, for a program in f32, and with [`Builder::dequantize`], because all tensors are dequantized,
    /// - with [`Builder::quantize`], and
    /// - for an artifact.
    ///
    /// # Errors
    /// Returns an error if the order of a tensor's columns cannot be read.
    pub(super) fn published(
        &self,
        device: &DeviceName,
        program: &Program,
        source: &dyn WeightSource,
    ) -> Result<[BTreeMap<String, Format>; 2], EngineError> {
        let keeps = match device {
            DeviceName::Cpu { .. } => false,
            DeviceName::Cuda(_) => program.dtype.has_mma(),
        };
        let is_settled = self.quantize.is_some() || self.start.artifact().is_some();
        if !keeps || self.dequantize || is_settled {
            return Ok([BTreeMap::new(), BTreeMap::new()]);
        }
        let (mut published, mut ordered) = (BTreeMap::new(), BTreeMap::new());
        for (name, dims) in weights::stored(program) {
            if let Some(format) = source.published(name, dims) {
                published.insert(name.to_owned(), Format::Scaled(format));
            } else if let Some((format, _)) = source.ordered(name, dims)? {
                ordered.insert(name.to_owned(), Format::Scaled(format));
            }
        }
        Ok([published, ordered])
    }

    /// Returns whether the program has a KV cache in E4M3 and reads the checkpoint's scales for it. The program of an artifact reads no
    /// scales of a KV cache.
    pub(super) fn has_cache_scales(&self, program: &Program, source: &dyn WeightSource) -> bool {
        let is_e4m3 = !program.caches.is_empty() && program.cache_format() == Format::E4m3;
        if !is_e4m3 || !source.has_cache_scales() {
            return false;
        }
        match self.start.artifact() {
            Some(_) => {
                tracing::warn!(
                    "the artifact's KV cache in e4m3 has no scales, so the checkpoint's scales of keys and values are not used; `--model` or `--weights` uses them"
                );
                false
            }
            None => {
                tracing::info!("the KV cache has the checkpoint's scales of keys and values");
                true
            }
        }
    }

    /// Returns the format of the KV cache of a program with storage type `dtype`; `None` if the KV cache is also stored in `dtype`.
    pub(super) fn caches_in(&self, dtype: DType) -> Result<Option<Format>, EngineError> {
        let Some(format) = self.kv_cache else {
            return Ok(None);
        };
        if !self.cached {
            return Err(EngineError::CacheWithoutTexts { format });
        }
        match format {
            Format::Plain(stored) if stored == dtype => Ok(None),
            Format::E4m3 => {
                tracing::info!("KV cache: {format} (as requested)");
                Ok(Some(format))
            }
            Format::Plain(_) | Format::Scaled(_) => Err(EngineError::CacheFormat { format, dtype }),
        }
    }

    /// Checks that no option is set that applies only to a CPU.
    pub(super) fn check_for_cuda(&self, device: &DeviceName) -> Result<(), EngineError> {
        if self.threads.is_none() {
            return Ok(());
        }
        Err(EngineError::CpuOnly {
            option: "a number of threads",
            device: device.to_string(),
        })
    }
}

/// Logs the number of weights that keep their published values, and the number of weights with `desc_act` that are dequantized. `n_ordered`
/// is the total number of weights with `desc_act`.
pub(super) fn log_kept(program: &Program, n_ordered: usize) {
    let n = weights::n_packed(program);
    tracing::info!("{n} matrices of the program keep the published values of the checkpoint");
    if let n @ 1.. = n_ordered.saturating_sub(weights::n_ordered(program)) {
        tracing::info!(
            "{n} matrices of the checkpoint with an order of inputs (`desc_act`) are dequantized, because no linear layer computes their inputs in this order"
        );
    }
}
