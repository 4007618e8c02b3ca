//! Quantized checkpoints: finds the matrices that `quantization_config` of config.json describes, and dequantizes their rows.

use std::{collections::BTreeMap, path::Path};

use gemmule_weights::quantized::{
    Config, Info, Matrices, Matrix, Quantized, QuantizedError, Values as Stored, check_plain,
};

use super::{
    CheckpointError, Codes, room,
    shard::{Place, Shard},
};
use crate::{
    files::{self, Kind},
    tensor::Scaled,
};

pub(super) const CONFIG: &str = "config.json";

/// Facts about the quantization of a checkpoint, which are logged.
pub(super) struct Notes {
    summary: String,
    n_matrices: usize,
    of_activations: usize,
    unknown: Vec<String>,
}

impl Notes {
    pub fn log(&self) {
        for key in &self.unknown {
            tracing::warn!("`{key}` of config.json is not known, and is ignored");
        }
        if self.n_matrices == 0 {
            tracing::warn!(
                "config.json has a quantization ({}), but the checkpoint has no quantized weights; they are read as they are",
                self.summary
            );
            return;
        }
        let activations = match self.of_activations {
            0 => String::new(),
            n => format!(
                "; its {n} scales of activations, keys and values are not used, except for a KV cache in fp8"
            ),
        };
        tracing::info!(
            "the checkpoint is quantized: {}; its {} quantized weights are dequantized when they are read, unless they keep their published values{activations}",
            self.summary,
            self.n_matrices,
        );
    }
}

/// A failed read of a checkpoint, or a problem in its contents.
enum Failure {
    Read(CheckpointError),
    Problem(QuantizedError),
}

impl From<QuantizedError> for Failure {
    fn from(problem: QuantizedError) -> Self {
        Self::Problem(problem)
    }
}

impl Failure {
    fn of(self, config: &Path, main: &Path) -> CheckpointError {
        match self {
            Self::Read(error) => error,
            Self::Problem(QuantizedError::Memory { tensor, bytes }) => {
                CheckpointError::OutOfMemory { tensor, bytes }
            }
            Self::Problem(problem) => CheckpointError::Quantized {
                file: match problem.is_of_config() {
                    true => config.to_owned(),
                    false => main.to_owned(),
                },
                problem,
            },
        }
    }
}

/// Reads the quantization of a folder from its config.json. Returns `None` if the config.json describes no quantization.
///
/// # Errors
/// Returns an error for an unsupported quantization.
pub(super) fn configured(folder: &Path) -> Result<Option<Config>, CheckpointError> {
    let file = folder.join(CONFIG);
    if !file.exists() {
        return Ok(None);
    }
    let text = files::text(&file, Kind::Config)?;
    let json = serde_json::from_str(&text).map_err(|error| CheckpointError::Config {
        file: file.clone(),
        problem: error.to_string(),
    })?;
    Config::parse(&json).map_err(|problem| CheckpointError::Quantized { file, problem })
}

/// Finds the quantized matrices among the tensors of a folder. Returns `None` if there is no configuration and no tensor is quantized.
///
/// # Errors
/// Returns an error if the tensors contradict the configuration, or if a tensor is quantized although there is no configuration.
pub(super) fn find(
    config: Option<&Config>,
    folder: &Path,
    main: &Path,
    shards: &[Shard],
    stored: &BTreeMap<&str, &Place>,
) -> Result<Option<(Matrices, Notes)>, CheckpointError> {
    let failed = |failure: Failure| failure.of(&folder.join(CONFIG), main);
    // Skip tensors of unknown types, because no supported layout has such tensors.
    let infos = stored.iter().filter_map(|(&name, place)| {
        let element = *place.stored.element.as_ref().ok()?;
        let dims = place.stored.dims.clone();
        Some((name.to_owned(), Info { element, dims }))
    });
    let infos: BTreeMap<String, Info> = infos.collect();
    let Some(config) = config else {
        check_plain(&infos).map_err(|problem| failed(problem.into()))?;
        return Ok(None);
    };
    let read = |name: &str| {
        let place = stored[name];
        let bytes = shards[place.shard].bytes(name, &place.stored);
        bytes.map_err(Failure::Read)
    };
    let matrices = config.matrices(&infos, read).map_err(failed)?;
    let notes = Notes {
        summary: config.summary().to_owned(),
        n_matrices: matrices.matrices.len(),
        of_activations: matrices.of_activations,
        unknown: config.unknown().to_vec(),
    };
    Ok(Some((matrices, notes)))
}

/// Reads a matrix that is published in `format`. Also returns the number of its values that are not finite.
///
/// # Errors
/// Returns the errors of `read`, and an error for a scale that the format cannot hold.
pub(super) fn read_codes(
    matrix: &Matrix,
    format: Scaled,
    main: &Path,
    read: impl FnMut(&str) -> Result<Vec<u8>, CheckpointError>,
) -> Result<(Codes, usize), CheckpointError> {
    let width = format.width(matrix.dims()[1] as usize);
    let quantized = read_matrix(matrix, main, read)?;
    let groups = matrix.groups_of(&quantized, width);
    let groups = groups.map_err(|problem| Failure::Problem(problem).of(Path::new(CONFIG), main))?;
    let held = groups
        .into_iter()
        .map(|(scale, zero)| match format.holds_scale(scale) {
            true => Ok((scale, format.zero_point(zero))),
            false => Err(CheckpointError::ScaleRange {
                file: main.to_owned(),
                tensor: matrix.name().to_owned(),
                scale,
            }),
        });
    let groups = held.collect::<Result<_, _>>()?;
    let (elements, n_bad) = match quantized.values {
        Stored::E4M3(codes) => {
            let n_bad = codes.iter().filter(|&code| code & 0x7f == 0x7f).count();
            (codes, n_bad)
        }
        Stored::Integers { codes, .. } => (codes, 0),
    };
    Ok((Codes { elements, groups }, n_bad))
}

/// Reads the stored tensors of a quantized matrix and combines them. `read` returns the bytes of a tensor.
fn read_matrix(
    matrix: &Matrix,
    main: &Path,
    mut read: impl FnMut(&str) -> Result<Vec<u8>, CheckpointError>,
) -> Result<Quantized, CheckpointError> {
    let quantized = matrix.read(|name| read(name).map_err(Failure::Read));
    quantized.map_err(|failure| failure.of(Path::new(CONFIG), main))
}

/// Returns the column indices of a matrix, sorted by group; `None` if its groups differ in size.
///
/// # Errors
/// Returns the errors of `read`, and an error for groups that are out of range.
pub(super) fn column_order(
    matrix: &Matrix,
    main: &Path,
    mut read: impl FnMut(&str) -> Result<Vec<u8>, CheckpointError>,
) -> Result<Option<Vec<u32>>, CheckpointError> {
    let order = matrix.column_order(|name| read(name).map_err(Failure::Read));
    order.map_err(|failure| failure.of(Path::new(CONFIG), main))
}

/// A quantized matrix whose rows are dequantized one by one.
pub(super) struct Rows {
    quantized: Quantized,
    row: Vec<f32>,
}

impl Rows {
    /// Reads the tensors of a matrix.
    pub fn read(
        matrix: &Matrix,
        main: &Path,
        read: impl FnMut(&str) -> Result<Vec<u8>, CheckpointError>,
    ) -> Result<Self, CheckpointError> {
        let quantized = read_matrix(matrix, main, read)?;
        let mut row = room(matrix.name(), quantized.columns as u64)?;
        row.resize(quantized.columns, 0.0);
        Ok(Self { quantized, row })
    }

    /// Passes each dequantized row to `take`, and returns the number of values that are not finite.
    pub fn each(mut self, mut take: impl FnMut(&[f32])) -> usize {
        let mut n_bad = 0;
        for row in 0..self.quantized.rows {
            self.quantized.row(row, &mut self.row);
            n_bad += self.row.iter().filter(|value| !value.is_finite()).count();
            take(&self.row);
        }
        n_bad
    }
}
