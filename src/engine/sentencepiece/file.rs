//! The fields of `sentencepiece_model.proto`, without those used only in training.

use super::proto::{Damaged, Fields, Value};

#[derive(Default)]
pub(super) struct File {
    pub pieces: Vec<Piece>,
    pub trainer: Option<Trainer>,
    pub normalizer: Option<Normalizer>,
    pub denormalizer: Option<Normalizer>,
}

#[derive(Default)]
pub(super) struct Piece {
    pub text: String,
    pub score: f32,
    /// Normal if missing.
    pub kind: Option<i32>,
}

#[derive(Default)]
pub(super) struct Trainer {
    /// Unigram if missing.
    pub model: Option<i32>,
    pub whitespace_as_suffix: bool,
    pub byte_fallback: bool,
    pub unknown_surface: Option<String>,
}

/// All flags are true if missing.
#[derive(Default)]
pub(super) struct Normalizer {
    pub rules: Vec<u8>,
    pub adds_prefix: Option<bool>,
    pub removes_spaces: Option<bool>,
    pub escapes_spaces: Option<bool>,
}

impl File {
    /// Reads the fields of `ModelProto`.
    pub fn read(bytes: &[u8]) -> Result<Self, Damaged> {
        let mut file = Self::default();
        Fields::of(bytes, "a model").each(|number, value| {
            match number {
                1 => file.pieces.push(Piece::read(value.bytes()?)?),
                2 => (file.trainer.get_or_insert_default()).merge(value.bytes()?)?,
                3 => (file.normalizer.get_or_insert_default()).merge(value.bytes()?)?,
                5 => (file.denormalizer.get_or_insert_default()).merge(value.bytes()?)?,
                _ => {}
            }
            Ok(())
        })?;
        Ok(file)
    }
}

impl Piece {
    fn read(bytes: &[u8]) -> Result<Self, Damaged> {
        let mut piece = Self::default();
        Fields::of(bytes, "a piece").each(|number, value: Value<'_>| {
            match number {
                1 => piece.text = value.text()?,
                2 => piece.score = value.float()?,
                3 => piece.kind = Some(value.int()?),
                _ => {}
            }
            Ok(())
        })?;
        Ok(piece)
    }
}

impl Trainer {
    fn merge(&mut self, bytes: &[u8]) -> Result<(), Damaged> {
        Fields::of(bytes, "the settings of the training").each(|number, value| {
            match number {
                3 => self.model = Some(value.int()?),
                24 => self.whitespace_as_suffix = value.flag()?,
                35 => self.byte_fallback = value.flag()?,
                44 => self.unknown_surface = Some(value.text()?),
                _ => {}
            }
            Ok(())
        })
    }
}

impl Normalizer {
    fn merge(&mut self, bytes: &[u8]) -> Result<(), Damaged> {
        Fields::of(bytes, "a normalizer").each(|number, value| {
            match number {
                2 => self.rules = value.bytes()?.to_vec(),
                3 => self.adds_prefix = Some(value.flag()?),
                4 => self.removes_spaces = Some(value.flag()?),
                5 => self.escapes_spaces = Some(value.flag()?),
                _ => {}
            }
            Ok(())
        })
    }
}
