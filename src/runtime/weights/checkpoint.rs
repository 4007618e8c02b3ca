//! A published checkpoint folder, which contains one file of weights, or an index and its shards. The possible file names are tried in the
//! same order as in Hugging Face transformers.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use gemmule_weights::quantized::{Config, Matrix, is_cache_scale};

use super::{
    CheckpointError, Found, ModelFiles, WeightSource,
    adapted::{self, Adapted},
    cache_scales::CacheScales,
    elements, encode_into, encode_weight,
    found::WEIGHTS,
    index::{file_of, files_of, named_by, without_indices},
    ordered,
    published::{self, Codes},
    quantized::{self, Rows},
    room,
    shard::{Place, Shard, Stored, warn_of_bad},
    static_table::{self, StaticTable},
};
use crate::{
    graph::{CacheRows, WeightNames},
    tensor::{DType, Scaled},
};

/// An open checkpoint. Files stay open, and tensors are read on request.
pub struct Checkpoint {
    /// Path of the single file or of the index, for error messages.
    main: PathBuf,
    shards: Vec<Shard>,
    /// Location of each tensor that can be read by name.
    entries: BTreeMap<String, Entry>,
    /// Stored tensors from which the matrices of a quantized checkpoint are computed.
    parts: BTreeMap<String, Place>,
    /// The quantization, with the path of its config.json and lines for the log.
    quantization: Option<(Config, PathBuf, quantized::Notes)>,
    /// Tensors that a shard contains, but that the index does not assign to this shard.
    unnamed: BTreeSet<String>,
    /// Unreadable additional files next to the checkpoint, by the prefix of their tensors. Such a file causes an error only if one of its
    /// tensors is needed.
    unreadable: BTreeMap<String, PathBuf>,
    names: WeightNames,
}

enum Entry {
    Stored(Place),
    /// A matrix of a quantized checkpoint, with its dimensions.
    Quantized(Matrix, [u64; 2]),
    /// A table of model2vec, with its dimensions.
    Static(Box<StaticTable>, [u64; 2]),
    /// A weight with adapters.
    Adapted(Box<Adapted>),
}

impl Entry {
    fn dims(&self) -> &[u64] {
        match self {
            Self::Stored(place) => &place.stored.dims,
            Self::Quantized(_, dims) | Self::Static(_, dims) => dims,
            Self::Adapted(weight) => weight.dims(),
        }
    }
}

impl Checkpoint {
    /// Opens the checkpoint in `folder`. `names` contains the alternative spellings of tensor names, and the subfolders of `root` that have
    /// their own weights.
    ///
    /// # Errors
    /// Returns an error if a file is missing or damaged, or if the index does not match its shards.
    pub fn open(folder: &Path, root: &Path, names: WeightNames) -> Result<Self, CheckpointError> {
        let files = |folder: &Path| ModelFiles::Folder(folder.to_owned());
        Self::of(&files(folder), &files(root), names)
    }

    /// Opens the weights in `trunk`, and those in the subfolders of `root` that `names` lists. If `trunk` or `root` is a GGUF file, opens
    /// only this file, because it contains the tensors of all folders.
    ///
    /// # Errors
    /// Returns the errors of [`open`](Self::open).
    pub fn of(
        trunk: &ModelFiles,
        root: &ModelFiles,
        names: WeightNames,
    ) -> Result<Self, CheckpointError> {
        let mut checkpoint = Self {
            main: PathBuf::new(),
            shards: Vec::new(),
            entries: BTreeMap::new(),
            parts: BTreeMap::new(),
            quantization: None,
            unnamed: BTreeSet::new(),
            unreadable: BTreeMap::new(),
            names: WeightNames::default(),
        };
        let (folder, root) = match (trunk, root) {
            (ModelFiles::Folder(folder), ModelFiles::Folder(root)) => (folder, root),
            (ModelFiles::Gguf(file), _) | (_, ModelFiles::Gguf(file)) => {
                let (shard, tensors) = Shard::of_gguf(file);
                checkpoint.main = shard.file().to_owned();
                checkpoint.add_shard(shard, tensors, "");
                checkpoint.names = names;
                return Ok(checkpoint);
            }
        };
        // Check the quantization first, so that an unsupported quantization is reported even if the folder has no weights.
        let config = quantized::configured(folder)?;
        checkpoint.main = checkpoint.add_folder(folder, "")?;
        checkpoint.join_quantized(config, folder)?;
        checkpoint.join_static()?;
        checkpoint.join_adapted(&names)?;
        for module in &names.folders {
            checkpoint.add_folder(&root.join(module), &format!("{module}/"))?;
        }
        for stem in files_of(&names) {
            let prefix = format!("{stem}/");
            let file = folder.join(format!("{stem}.safetensors"));
            let torch = folder.join(format!("{stem}.pt"));
            if file.is_file() {
                checkpoint.add_file(file, &prefix)?;
            } else if torch.is_file() && checkpoint.add_file(torch.clone(), &prefix).is_err() {
                checkpoint.unreadable.insert(stem, torch);
            }
        }
        checkpoint.names = names;
        Ok(checkpoint)
    }

    /// Opens the files of a folder and prepends `prefix` to their tensor names. Returns the path of the single file or of the index.
    fn add_folder(&mut self, folder: &Path, prefix: &str) -> Result<PathBuf, CheckpointError> {
        let paths = WEIGHTS.map(|name| folder.join(name));
        let Some(main) = paths.into_iter().find(|path| path.is_file()) else {
            return Err(CheckpointError::NoCheckpoint {
                folder: folder.to_owned(),
                found: Found::in_folder(folder),
            });
        };
        if main.extension().is_none_or(|ending| ending != "json") {
            self.add_file(main.clone(), prefix)?;
            return Ok(main);
        }
        for (shard, names) in named_by(&main)? {
            self.add(&main, &shard, names, prefix)?;
        }
        self.unnamed.retain(|n| !self.entries.contains_key(n));
        Ok(main)
    }

    /// Opens a file and makes all of its tensors available.
    fn add_file(&mut self, file: PathBuf, prefix: &str) -> Result<(), CheckpointError> {
        let (shard, tensors) = Shard::open(file)?;
        self.add_shard(shard, tensors, prefix);
        Ok(())
    }

    fn add_shard(&mut self, shard: Shard, tensors: BTreeMap<String, Stored>, prefix: &str) {
        let at = self.shards.len();
        self.shards.push(shard);
        for (name, stored) in tensors {
            let place = Place { shard: at, stored };
            let entry = Entry::Stored(place);
            self.entries.insert(format!("{prefix}{name}"), entry);
        }
    }

    /// Opens a shard and makes available the tensors that the index assigns to it. Other tensors in the shard are not read.
    fn add(
        &mut self,
        index: &Path,
        shard: &str,
        names: Vec<String>,
        prefix: &str,
    ) -> Result<(), CheckpointError> {
        let file = index.with_file_name(shard);
        if !file.is_file() {
            return Err(CheckpointError::MissingShard {
                index: index.to_owned(),
                shard: shard.to_owned(),
            });
        }
        let (opened, mut tensors) = Shard::open(file)?;
        for tensor in names {
            let Some(stored) = tensors.remove(&tensor) else {
                return Err(CheckpointError::NotInShard {
                    index: index.to_owned(),
                    shard: shard.to_owned(),
                    tensor,
                });
            };
            let shard = self.shards.len();
            let entry = Entry::Stored(Place { shard, stored });
            self.entries.insert(format!("{prefix}{tensor}"), entry);
        }
        let unnamed = tensors.into_keys().map(|name| format!("{prefix}{name}"));
        self.unnamed.extend(unnamed);
        self.shards.push(opened);
        Ok(())
    }

    /// Replaces the tensors of quantized weights with the matrices that they represent.
    fn join_quantized(
        &mut self,
        config: Option<Config>,
        folder: &Path,
    ) -> Result<(), CheckpointError> {
        let stored = self.entries.iter().filter_map(|(name, entry)| match entry {
            Entry::Stored(place) => Some((name.as_str(), place)),
            Entry::Quantized(..) | Entry::Static(..) | Entry::Adapted(_) => None,
        });
        let stored = stored.collect();
        let found = quantized::find(config.as_ref(), folder, &self.main, &self.shards, &stored)?;
        let (Some((found, notes)), Some(config)) = (found, config) else {
            return Ok(());
        };
        for name in found.parts {
            if let Some(Entry::Stored(place)) = self.entries.remove(&name) {
                self.parts.insert(name, place);
            }
        }
        for matrix in found.matrices {
            let (name, dims) = (matrix.name().to_owned(), matrix.dims());
            self.entries.insert(name, Entry::Quantized(matrix, dims));
        }
        self.quantization = Some((config, folder.join(quantized::CONFIG), notes));
        Ok(())
    }

    /// Replaces the tensors of a model2vec table with the table that they represent.
    fn join_static(&mut self) -> Result<(), CheckpointError> {
        let has = |name: &str| matches!(self.entries.get(name), Some(Entry::Stored(_)));
        if !has(static_table::ROWS) || !static_table::PARTS.iter().any(|name| has(name)) {
            return Ok(());
        }
        let mut take = |name: &str| match self.entries.remove(name) {
            Some(Entry::Stored(place)) => Some(place),
            Some(Entry::Quantized(..) | Entry::Static(..) | Entry::Adapted(_)) | None => None,
        };
        let parts = static_table::PARTS.map(&mut take);
        let ([mapping, factors], Some(rows)) = (parts, take(static_table::ROWS)) else {
            return Ok(());
        };
        let (table, dims) = StaticTable::new(rows, mapping, factors, &self.shards)?;
        let entry = Entry::Static(Box::new(table), dims);
        self.entries.insert(static_table::ROWS.to_owned(), entry);
        Ok(())
    }

    /// Joins the tensors of each weight that has adapters into one entry.
    fn join_adapted(&mut self, names: &WeightNames) -> Result<(), CheckpointError> {
        for tensors in adapted::Names::among(&self.entries) {
            let mut take = |name: &String| match self.entries.remove(name) {
                Some(Entry::Stored(place)) => Some(place),
                Some(Entry::Quantized(..) | Entry::Static(..) | Entry::Adapted(_)) | None => None,
            };
            let [a, b] = tensors.parts.each_ref().map(&mut take);
            let (Some(original), Some(a), Some(b)) = (take(&tensors.original), a, b) else {
                continue;
            };
            let name = tensors.weight.clone();
            let adapter = names.adapter.clone();
            let weight = Adapted::new(tensors, original, [a, b], adapter, &self.shards)?;
            self.entries.insert(name, Entry::Adapted(Box::new(weight)));
        }
        Ok(())
    }

    /// Returns the dimensions of the table of a static embedding, `[tokens, width]`; `None` if the checkpoint has no such table.
    pub(super) fn static_dims(&self) -> Option<[u64; 2]> {
        let entries = static_table::NAMES.iter();
        let entry = entries.filter_map(|&name| self.entries.get(name)).next();
        match *entry?.dims() {
            [tokens, width] => Some([tokens, width]),
            [tokens] => Some([tokens, 1]),
            _ => None,
        }
    }

    fn file_of(&self, entry: &Entry) -> &Path {
        match entry {
            Entry::Stored(place) => self.shards[place.shard].file(),
            Entry::Static(table, _) => self.shards[table.shard()].file(),
            Entry::Adapted(weight) => self.shards[weight.shard()].file(),
            Entry::Quantized(..) => &self.main,
        }
    }

    /// Reads the stored tensors of a quantized matrix, whose rows can then be dequantized one by one.
    fn rows(&self, matrix: &Matrix) -> Result<Rows, CheckpointError> {
        Rows::read(matrix, &self.main, |name| self.part(name))
    }

    /// Reads the codes and scales of a quantized matrix. Also returns the number of its values that are not finite.
    fn codes(&self, matrix: &Matrix, format: Scaled) -> Result<(Codes, usize), CheckpointError> {
        quantized::read_codes(matrix, format, &self.main, |name| self.part(name))
    }

    /// Reads the bytes of a stored tensor of a quantized matrix.
    fn part(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        match self.parts.get(name) {
            Some(place) => self.shards[place.shard].bytes(name, &place.stored),
            None => Err(self.missing(&[name], 1)),
        }
    }

    /// Reads a tensor. Also returns the number of its values that are not finite.
    fn values(&self, name: &str, entry: &Entry) -> Result<(Vec<f32>, usize), CheckpointError> {
        match entry {
            Entry::Stored(place) => {
                let dtype = self.dtype_of(name, place)?;
                self.shards[place.shard].read(name, &place.stored, dtype)
            }
            Entry::Quantized(matrix, dims) => {
                let mut values = room(name, elements(dims))?;
                let n_bad = self.rows(matrix)?.each(|row| values.extend_from_slice(row));
                Ok((values, n_bad))
            }
            Entry::Static(table, dims) => table.read(*dims, &self.shards),
            Entry::Adapted(weight) => weight.read(&self.shards),
        }
    }

    /// Returns the first existing spelling of a tensor's name, with its entry.
    fn find(&self, name: &str) -> Option<(String, &Entry)> {
        let mut spellings = self.names.spellings(name).into_iter();
        spellings.find_map(|n| self.entries.get(&n).map(|e| (n, e)))
    }

    /// Returns an error if a tensor is stored under several spellings with different values. Only the first spelling would be read.
    fn check_spellings(&self, name: &str) -> Result<(), CheckpointError> {
        let spellings = self.names.spellings(name).into_iter();
        let unread = self.names.unread(name);
        let mut there = spellings.filter_map(|n| self.entries.get(&n).map(|entry| (n, entry)));
        let Some((read, first)) = there.next() else {
            return Ok(());
        };
        for (other, entry) in there.filter(|(n, _)| !unread.contains(n)) {
            if !self.are_equal((&read, first), (&other, entry))? {
                let file = self.main.clone();
                return Err(CheckpointError::TwoTensors { file, read, other });
            }
        }
        Ok(())
    }

    /// Returns whether two tensors have bitwise identical values.
    fn are_equal(
        &self,
        (a, one): (&str, &Entry),
        (b, other): (&str, &Entry),
    ) -> Result<bool, CheckpointError> {
        if elements(one.dims()) != elements(other.dims()) {
            return Ok(false);
        }
        let ((one, _), (other, _)) = (self.values(a, one)?, self.values(b, other)?);
        // Compare bits, because NaN does not equal itself.
        let mut pairs = one.iter().zip(&other);
        Ok(pairs.all(|(a, b)| a.to_bits() == b.to_bits()))
    }

    fn dtype_of(&self, name: &str, place: &Place) -> Result<DType, CheckpointError> {
        place
            .stored
            .dtype()
            .map_err(|found| CheckpointError::DType {
                file: self.shards[place.shard].file().to_owned(),
                tensor: name.to_owned(),
                found,
            })
    }

    /// Returns a tensor with the spelling of its name in the checkpoint, after checking its dimensions and its type.
    fn checked(&self, name: &str, dims: &[u64]) -> Result<(String, &Entry), CheckpointError> {
        let Some((full, entry)) = self.find(name) else {
            return Err(self.missing(&[name], 1));
        };
        // Some checkpoints store a vector as a matrix with one row, and some store a table with one column as a vector.
        let is_row = matches!(entry.dims(), &[1, n] if dims == [n]);
        let is_column = matches!(entry.dims(), &[n] if dims == [n, 1]);
        if entry.dims() != dims && !is_row && !is_column {
            return Err(CheckpointError::Shape {
                file: self.file_of(entry).to_owned(),
                tensor: full,
                expected: dims.to_vec(),
                found: entry.dims().to_vec(),
            });
        }
        if let Entry::Stored(place) = entry {
            self.dtype_of(&full, place)?;
        }
        Ok((full, entry))
    }

    /// Returns an error for an unreadable file that may contain one of the missing tensors, if there is such a file.
    fn unreadable(&self, missing: &[&str]) -> Option<CheckpointError> {
        let spellings = missing.iter().flat_map(|name| self.names.spellings(name));
        let mut stems = spellings.filter_map(|name| file_of(&name));
        let file = stems.find_map(|stem| self.unreadable.get(&stem))?;
        Shard::open(file.clone()).err()
    }

    fn missing(&self, names: &[&str], n_needed: usize) -> CheckpointError {
        let known = self.entries.keys().map(String::as_str);
        CheckpointError::missing(self.main.clone(), names, n_needed, known)
    }
}

impl WeightSource for Checkpoint {
    fn read(&self, name: &str, dims: &[u64]) -> Result<Vec<f32>, CheckpointError> {
        let (full, entry) = self.checked(name, dims)?;
        let (values, n_bad) = self.values(&full, entry)?;
        warn_of_bad(&full, n_bad);
        Ok(values)
    }

    fn read_to_transpose(&self, name: &str, dims: &[u64]) -> Result<Vec<f32>, CheckpointError> {
        // A quantized matrix is always stored as `[outputs, inputs]`, so a description with the transposed layout is wrong. The shape of a
        // square matrix would not reveal the mistake.
        match self.checked(name, dims)? {
            (tensor, Entry::Quantized(..)) => {
                let file = self.main.clone();
                Err(CheckpointError::QuantizedTranspose { file, tensor })
            }
            (_, Entry::Stored(_) | Entry::Static(..) | Entry::Adapted(_)) => self.read(name, dims),
        }
    }

    fn published(&self, name: &str, dims: &[u64]) -> Option<Scaled> {
        match self.checked(name, dims).ok()?.1 {
            Entry::Quantized(matrix, [_, columns]) => {
                published::format_of(matrix.runs_of_rows()?, *columns)
            }
            Entry::Stored(place) => published::of_gguf(place.stored.gguf()?.1),
            Entry::Static(..) | Entry::Adapted(_) => None,
        }
    }

    fn dtype(&self, name: &str, dims: &[u64]) -> DType {
        match self.checked(name, dims) {
            Ok((_, Entry::Stored(place))) => place.stored.dtype().unwrap_or(DType::F32),
            Ok(_) | Err(_) => DType::F32,
        }
    }

    fn read_codes(
        &self,
        name: &str,
        dims: &[u64],
        format: Scaled,
    ) -> Result<Option<Codes>, CheckpointError> {
        let (full, entry) = self.checked(name, dims)?;
        if self.published(name, dims) != Some(format) {
            return Ok(None);
        }
        let read = match entry {
            Entry::Quantized(matrix, _) => self.codes(matrix, format)?,
            Entry::Stored(place) => match place.stored.gguf() {
                Some((folder, weight)) => published::codes_of_gguf(folder, weight, format)?,
                None => return Ok(None),
            },
            Entry::Static(..) | Entry::Adapted(_) => return Ok(None),
        };
        warn_of_bad(&full, read.1);
        Ok(Some(read.0))
    }

    fn ordered(
        &self,
        name: &str,
        dims: &[u64],
    ) -> Result<Option<(Scaled, Vec<u32>)>, CheckpointError> {
        let (_, Entry::Quantized(matrix, [_, columns])) = self.checked(name, dims)? else {
            return Ok(None);
        };
        let runs = matrix.ordered_runs_of_rows();
        let Some(format) = runs.and_then(|runs| published::format_of(runs, *columns)) else {
            return Ok(None);
        };
        let order = quantized::column_order(matrix, &self.main, |name| self.part(name))?;
        Ok(order.map(|order| (format, order)))
    }

    fn read_ordered_codes(
        &self,
        name: &str,
        dims: &[u64],
        format: Scaled,
    ) -> Result<Option<Codes>, CheckpointError> {
        match (self.checked(name, dims)?.1, self.ordered(name, dims)?) {
            (Entry::Quantized(matrix, _), Some((own, order))) if own == format => {
                let (mut codes, _) = self.codes(matrix, format)?;
                codes.elements = ordered::columns(&codes.elements, &order).collect();
                Ok(Some(codes))
            }
            _ => Ok(None),
        }
    }

    fn keeps_inputs(&self) -> bool {
        let config = self.quantization.as_ref();
        config.is_some_and(|(config, ..)| config.keeps_inputs())
    }

    fn has_cache_scales(&self) -> bool {
        self.parts.keys().any(|name| is_cache_scale(name))
    }

    fn cache_scale(&self, linear: &str, rows: CacheRows) -> Result<f32, CheckpointError> {
        let config = self.quantization.as_ref();
        CacheScales {
            config: config.map(|(config, file, _)| (config, file.as_path())),
            main: &self.main,
            shards: &self.shards,
            parts: &self.parts,
            names: &self.names,
        }
        .read(linear, rows)
    }

    fn read_as(&self, name: &str, dims: &[u64], dtype: DType) -> Result<Vec<u8>, CheckpointError> {
        let (full, entry) = self.checked(name, dims)?;
        let (bytes, n_bad) = match entry {
            Entry::Stored(place) => {
                let stored = self.dtype_of(&full, place)?;
                self.shards[place.shard].read_as(&full, &place.stored, stored, dtype)?
            }
            Entry::Quantized(matrix, dims) => {
                let mut bytes = room(&full, elements(dims).saturating_mul(dtype.bytes()))?;
                let rows = self.rows(matrix)?;
                let n_bad = rows.each(|row| encode_into(&mut bytes, row, dtype));
                (bytes, n_bad)
            }
            Entry::Static(..) | Entry::Adapted(_) => {
                let (values, n_bad) = self.values(&full, entry)?;
                (encode_weight(&full, &values, dtype)?, n_bad)
            }
        };
        warn_of_bad(&full, n_bad);
        Ok(bytes)
    }

    fn check(&self, stored: &[(&str, &[u64])]) -> Result<(), CheckpointError> {
        let names = stored.iter().map(|&(name, _)| name);
        let missing: Vec<&str> = names.filter(|name| self.find(name).is_none()).collect();
        if !missing.is_empty() {
            let unreadable = self.unreadable(&missing);
            return Err(unreadable.unwrap_or_else(|| self.missing(&missing, stored.len())));
        }
        for (name, dims) in stored {
            self.checked(name, dims)?;
            self.check_spellings(name)?;
        }
        if let Some((_, _, notes)) = &self.quantization {
            notes.log();
        }
        let gguf = self.entries.values().filter_map(|entry| match entry {
            Entry::Stored(place) => place.stored.gguf(),
            Entry::Quantized(..) | Entry::Static(..) | Entry::Adapted(_) => None,
        });
        published::log_gguf(gguf.map(|(_, weight)| weight));
        Ok(())
    }

    fn own(&self) -> Result<Vec<String>, CheckpointError> {
        let mut own = Vec::new();
        for (head, table) in &self.names.ties {
            if let (Some((a, one)), Some((b, other))) = (self.find(head), self.find(table))
                && a != b
                && !self.are_equal((&a, one), (&b, other))?
            {
                own.push(head.clone());
            }
        }
        Ok(own)
    }

    fn surplus(&self, used: &[(&str, &[u64])]) -> Vec<String> {
        let used: BTreeSet<String> = used
            .iter()
            .filter_map(|(name, _)| self.find(name).map(|(n, _)| n))
            .collect();
        let named = self.entries.keys().filter(|&n| !used.contains(n));
        named.chain(&self.unnamed).cloned().collect()
    }

    fn left_out(&self, used: &[(&str, &[u64])]) -> Vec<String> {
        let found = used.iter().filter_map(|(name, _)| self.find(name));
        let read: BTreeSet<String> = found.map(|(name, _)| without_indices(&name)).collect();
        let is_like_one = |name: &String| {
            let plain = without_indices(name);
            plain != *name && read.contains(&plain)
        };
        let mut left = self.surplus(used);
        left.retain(is_like_one);
        left
    }
}
