//! Conversion of a GGUF file to the contents of a folder saved by Hugging Face transformers: config.json, tokenizer.json,
//! tokenizer_config.json, generation_config.json, and tensors under their published names.
//!
//! For some architectures, llama.cpp's converter permutes rows, transposes weights or adds 1 to the weights of norms. [`Folder::read`]
//! undoes these changes.

mod arrange;
mod config;
mod files;
mod names;
mod rope;
mod settings;
mod tokenizer;

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::{
    Format, Gguf, GgufError, Tensor, blocks,
    error::{Result, wrong_key, wrong_tensor},
};
use crate::{Element, pickle::shown};
use arrange::Arrangement;
use names::Architecture;

/// A GGUF file of a supported architecture, with the names that Hugging Face transformers uses.
#[derive(Debug)]
pub struct Folder {
    gguf: Gguf,
    architecture: &'static Architecture,
    config: Json,
    weights: BTreeMap<String, Weight>,
}

/// A tensor under its published name.
#[derive(Clone, Debug)]
pub struct Weight {
    /// Sizes in row-major order.
    pub dims: Vec<u64>,
    /// Format in the file.
    pub format: Format,
    tensor: Tensor,
    arrangement: Arrangement,
}

impl Weight {
    /// Returns the name of the tensor in the file.
    pub fn stored_name(&self) -> &str {
        &self.tensor.name
    }

    /// Returns the element type of [`Folder::read_raw`]. Returns `None` if the elements are quantized, or if the file stores each value
    /// plus one.
    pub fn element(&self) -> Option<Element> {
        match (self.format, self.arrangement) {
            (_, Arrangement::MinusOne) => None,
            (Format::F32, _) => Some(Element::F32),
            (Format::F16, _) => Some(Element::F16),
            (Format::BF16, _) => Some(Element::BF16),
            _ => None,
        }
    }

    /// Returns the type of the integers that [`Folder::read_integers`] reads. Each element of the matrix is an integer times the scale that
    /// it shares with its neighbors ([`RUN`](Self::RUN)). Returns `None` if the tensor is not a matrix in Q4_0 or Q8_0, or if the file
    /// stores its transpose or stores each value plus one.
    pub fn integers(&self) -> Option<Integers> {
        let are_rows = match self.arrangement {
            Arrangement::None | Arrangement::Halves { .. } => self.dims.len() == 2,
            Arrangement::MinusOne | Arrangement::Transposed => false,
        };
        match self.format {
            Format::Q4_0 if are_rows => Some(Integers::Int4),
            Format::Q8_0 if are_rows => Some(Integers::Int8),
            _ => None,
        }
    }

    /// Divides a matrix into parts of `rows` rows; the last part may have fewer. Returns `None` if the tensor is not a matrix, or if its
    /// rows are not stored in their published order.
    pub fn in_parts(&self, rows: u64) -> Option<Vec<Self>> {
        let ([n, width], Arrangement::None | Arrangement::MinusOne) =
            (self.dims.as_slice(), self.arrangement)
        else {
            return None;
        };
        let (rows, row_bytes) = (rows.max(1), self.tensor.bytes / (*n).max(1));
        let parts = (0..n.div_ceil(rows)).map(|part| {
            let from = part * rows;
            let dims = vec![rows.min(n - from), *width];
            let tensor = Tensor {
                dims: dims.clone(),
                bytes: dims[0] * row_bytes,
                offset: self.tensor.offset + from * row_bytes,
                ..self.tensor.clone()
            };
            Self {
                dims,
                tensor,
                ..self.clone()
            }
        });
        Some(parts.collect())
    }

    /// Number of adjacent elements of a row that share a scale; see [`Self::integers`].
    pub const RUN: u64 = 32;
}

/// Type of the integers of a matrix. [`Folder::read_integers`] returns each integer as an unsigned byte, its code. [`Weight::RUN`] adjacent
/// elements share one scale, which is stored in f16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Integers {
    /// The integer is a code from 0 to 15, minus 8.
    Int4,
    /// The integer is a code from 0 to 255, minus 128.
    Int8,
}

impl Folder {
    /// Converts the metadata and the names of a file. Does not read weights.
    ///
    /// # Errors
    /// Returns an error if the architecture or a tensor is not supported, or if metadata is missing or contradicts the tensors.
    pub fn new(gguf: Gguf) -> Result<Self, GgufError> {
        let known = Self::translate(&gguf);
        let (architecture, config, weights) = known.map_err(|problem| gguf.error(problem))?;
        Ok(Self {
            gguf,
            architecture,
            config,
            weights,
        })
    }

    fn translate(gguf: &Gguf) -> Result<(&'static Architecture, Json, BTreeMap<String, Weight>)> {
        let architecture = Architecture::of(gguf)?;
        let settings = settings::Settings { gguf, architecture };
        let config = config::config(&settings)?;
        let weights = names::weights(&settings)?;
        Ok((architecture, config, weights))
    }

    /// Returns the file.
    pub fn gguf(&self) -> &Gguf {
        &self.gguf
    }

    /// Returns the contents of config.json.
    pub fn config(&self) -> &Json {
        &self.config
    }

    /// Returns the contents of tokenizer.json.
    ///
    /// # Errors
    /// Returns an error if the tokenizer is missing, unsupported or damaged.
    pub fn tokenizer(&self) -> Result<Json, GgufError> {
        tokenizer::tokenizer(&self.settings()).map_err(|problem| self.gguf.error(problem))
    }

    /// Returns the contents of tokenizer_config.json: special tokens and the chat template.
    ///
    /// # Errors
    /// Returns an error if the tokenizer is missing or damaged.
    pub fn tokenizer_config(&self) -> Result<Json, GgufError> {
        tokenizer::tokenizer_config(&self.settings()).map_err(|problem| self.gguf.error(problem))
    }

    /// Returns the contents of generation_config.json: the tokens that start, end and pad a sequence.
    ///
    /// # Errors
    /// Returns an error if the tokenizer is damaged.
    pub fn generation_config(&self) -> Result<Json, GgufError> {
        tokenizer::generation_config(&self.settings()).map_err(|problem| self.gguf.error(problem))
    }

    /// Returns the contents of `1_Pooling/config.json` of sentence-transformers; `None` if the file does not name a kind of pooling.
    ///
    /// # Errors
    /// Returns an error for an unsupported kind of pooling.
    pub fn pooling_config(&self) -> Result<Option<Json>, GgufError> {
        config::pooling(&self.settings()).map_err(|problem| self.gguf.error(problem))
    }

    fn settings(&self) -> settings::Settings<'_> {
        settings::Settings {
            gguf: &self.gguf,
            architecture: self.architecture,
        }
    }

    /// Returns the published names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.weights.keys().map(String::as_str)
    }

    /// Returns a tensor by its published name.
    pub fn weight(&self, name: &str) -> Option<&Weight> {
        self.weights.get(name)
    }

    /// Reads the elements of a tensor in row-major order, in their published arrangement.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or memory runs out.
    pub fn read(&self, weight: &Weight) -> Result<Vec<f32>, GgufError> {
        let Weight {
            tensor,
            arrangement,
            ..
        } = weight;
        let mut out = self.gguf.allocate(tensor, tensor.elements(), 0f32)?;
        let mut row = self.gguf.allocate(tensor, tensor.row(), 0f32)?;
        let mut placed = arrangement.place(tensor, &mut out);
        let block = tensor.format.block_elements();
        let row_bytes = (tensor.row() / block * tensor.format.block_bytes()) as usize;
        self.gguf.each_row(tensor, |blocks, _| {
            for blocks in blocks.chunks_exact(row_bytes) {
                match placed.next_row() {
                    Some(out) => blocks::dequantize(tensor.format, blocks, out),
                    None => {
                        blocks::dequantize(tensor.format, blocks, &mut row);
                        placed.next_column(&row);
                    }
                }
            }
        })?;
        if let Arrangement::MinusOne = arrangement {
            out.iter_mut().for_each(|x| *x -= 1.0);
        }
        Ok(out)
    }

    /// Reads the bytes of a tensor of plain elements in row-major order; see [`Weight::element`].
    ///
    /// # Errors
    /// Returns an error if [`Weight::element`] returns `None`, if the file cannot be read, or if memory runs out.
    pub fn read_raw(&self, weight: &Weight) -> Result<Vec<u8>, GgufError> {
        let tensor = &weight.tensor;
        let Some(element) = weight.element() else {
            let problem = format!(
                "its elements of format {} are computed; read them as f32",
                weight.format
            );
            return Err(self.gguf.error(wrong_tensor(&tensor.name, problem)));
        };
        if weight.arrangement == Arrangement::None {
            return self.gguf.read_raw(tensor);
        }
        let mut out = self.gguf.allocate(tensor, tensor.bytes, 0u8)?;
        match element {
            Element::F32 => self.rearrange::<4>(weight, &mut out)?,
            _ => self.rearrange::<2>(weight, &mut out)?,
        }
        Ok(out)
    }

    /// Reads the codes and the scales of a matrix of this folder, row by row; see [`Weight::integers`].
    ///
    /// # Errors
    /// Returns an error if [`Weight::integers`] returns `None`, if the file cannot be read, or if memory runs out.
    pub fn read_integers(&self, weight: &Weight) -> Result<(Vec<u8>, Vec<f32>), GgufError> {
        let tensor = &weight.tensor;
        let Some(integers) = weight.integers() else {
            let problem = format!("its format {} has no rows of integers", weight.format);
            return Err(self.gguf.error(wrong_tensor(&tensor.name, problem)));
        };
        let (width, per_row) = (tensor.row(), tensor.row() / Weight::RUN);
        let mut codes = self.gguf.allocate(tensor, tensor.elements(), 0u8)?;
        let n_scales = tensor.elements() / Weight::RUN;
        let mut scales = self.gguf.allocate(tensor, n_scales, 0f32)?;
        let mut row_codes = self.gguf.allocate(tensor, width, 0u8)?;
        let mut row_scales = self.gguf.allocate(tensor, per_row, 0f32)?;
        let arrangement = weight.arrangement;
        let mut placed_codes = arrangement.place_rows(tensor, width, &mut codes);
        let mut placed_scales = arrangement.place_rows(tensor, per_row, &mut scales);
        let row_bytes = (per_row * tensor.format.block_bytes()) as usize;
        self.gguf.each_row(tensor, |blocks, _| {
            for blocks in blocks.chunks_exact(row_bytes) {
                blocks::integers(integers, blocks, &mut row_codes, &mut row_scales);
                placed_codes.put_row(&row_codes);
                placed_scales.put_row(&row_scales);
            }
        })?;
        Ok((codes, scales))
    }

    /// Reads a tensor whose elements have `N` bytes, and arranges them as published.
    fn rearrange<const N: usize>(&self, weight: &Weight, out: &mut [u8]) -> Result<(), GgufError> {
        let (tensor, out) = (&weight.tensor, out.as_chunks_mut::<N>().0);
        let mut placed = weight.arrangement.place(tensor, out);
        let row = tensor.row() as usize;
        self.gguf.each_row(tensor, |elements, _| {
            for elements in elements.as_chunks::<N>().0.chunks_exact(row) {
                placed.put_row(elements);
            }
        })
    }
}
