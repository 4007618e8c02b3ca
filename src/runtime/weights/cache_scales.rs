//! Scales of a KV cache in E4M3 that a quantized checkpoint publishes.

use std::{collections::BTreeMap, path::Path};

use gemmule_weights::quantized::{self, Config, Info};

use super::{
    CheckpointError,
    shard::{Place, Shard},
};
use crate::graph::{CacheRows, WeightNames};

/// Returns the names under which a checkpoint may store the scale of the cached keys or values (`rows`) that the layer `linear` computes.
/// The names lack the prefix of the checkpoint, such as `model.`.
pub(super) fn names(linear: &str, rows: CacheRows) -> Vec<String> {
    let rows = match rows {
        CacheRows::Keys => quantized::CacheRows::Keys,
        CacheRows::Values => quantized::CacheRows::Values,
    };
    rows.scale_names(linear)
}

/// Tensors of a quantized checkpoint, in which the scales are looked up.
pub(super) struct CacheScales<'a> {
    /// The quantization, and the path of its config.json.
    pub config: Option<(&'a Config, &'a Path)>,
    /// Path of the single file of weights or of the index, for error messages.
    pub main: &'a Path,
    pub shards: &'a [Shard],
    pub parts: &'a BTreeMap<String, Place>,
    pub names: &'a WeightNames,
}

impl CacheScales<'_> {
    /// Returns the scale of the cached keys or values (`rows`) that the layer `linear` computes.
    ///
    /// # Errors
    /// Returns an error if the checkpoint has no such scale, if the scale is not a positive number, or if it is published twice with
    /// different values.
    pub fn read(&self, linear: &str, rows: CacheRows) -> Result<f32, CheckpointError> {
        let main = self.main;
        let wrong = |file: &Path, problem| CheckpointError::Quantized {
            file: file.to_owned(),
            problem,
        };
        if let Some((config, file)) = self.config {
            let check = config.check_cache();
            check.map_err(|problem| wrong(file, problem))?;
        }
        let names = names(linear, rows);
        let spellings = names.iter().flat_map(|name| self.names.spellings(name));
        let mut found: Option<(String, f32)> = None;
        for name in spellings {
            let Some(place) = self.parts.get(&name) else {
                continue;
            };
            let info = Info {
                element: self.element(&name, place)?,
                dims: place.stored.dims.clone(),
            };
            let bytes = self.shards[place.shard].bytes(&name, &place.stored)?;
            let scale = quantized::cache_scale(&name, &info, &bytes);
            let scale = scale.map_err(|problem| wrong(main, problem))?;
            match &found {
                Some((read, other)) if *other != scale => {
                    return Err(CheckpointError::TwoTensors {
                        file: main.to_owned(),
                        read: read.clone(),
                        other: name,
                    });
                }
                Some(_) => {}
                None => found = Some((name, scale)),
            }
        }
        found
            .map(|(_, scale)| scale)
            .ok_or_else(|| CheckpointError::NoCacheScale {
                linear: linear.to_owned(),
                expected: names,
            })
    }

    fn element(
        &self,
        name: &str,
        place: &Place,
    ) -> Result<gemmule_weights::Element, CheckpointError> {
        let element = place.stored.element.as_ref().copied();
        element.map_err(|found| CheckpointError::DType {
            file: self.shards[place.shard].file().to_owned(),
            tensor: name.to_owned(),
            found: found.clone(),
        })
    }
}
