//! Storage type of a program, and formats of its weights and KV cache, by device.

use std::collections::BTreeMap;

use super::super::{Builder, DeviceName, EngineError, default_dtype, weights};
use crate::{
    program::Program,
    runtime::weights::WeightSource,
    tensor::{DType, Format},
};

impl Builder {
    /// Returns the storage type of the program, and the format of the weights of linear layers if it differs.
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

    /// Returns the formats of the checkpoint tensors that keep their published quantized values. A CPU dequantizes all tensors.
    pub(super) fn published(
        &self,
        device: &DeviceName,
        program: &Program,
        source: &dyn WeightSource,
    ) -> BTreeMap<String, Format> {
        let keeps = match device {
            DeviceName::Cpu { .. } => false,
            DeviceName::Cuda(_) => program.dtype.has_mma(),
        };
        let is_settled = self.quantize.is_some() || self.start.artifact().is_some();
        if !keeps || self.dequantize || is_settled {
            return BTreeMap::new();
        }
        let stored = weights::stored(program).into_iter();
        let format = |(name, dims): (&str, &[u64])| {
            let format = source.published(name, dims)?;
            Some((name.to_owned(), Format::Scaled(format)))
        };
        stored.filter_map(format).collect()
    }

    /// Returns the format of the KV cache of a program in `dtype`, if it differs from that type.
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

    /// Returns an error for options that only apply to a CPU.
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
