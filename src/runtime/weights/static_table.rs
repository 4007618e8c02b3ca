//! Tables of static embeddings, with a row for each token. model2vec may store fewer rows than tokens. It then stores a row index and a
//! factor for each token.

use gemmule_weights::Element;

use super::{
    CheckpointError, room,
    shard::{Place, Shard},
};

/// Name of a table with a row for each token, as sentence-transformers stores it.
const TABLE: &str = "embedding.weight";
/// Names of model2vec's tensors: the rows (`ROWS`), the row index of each token (`MAPPING`), and the factor of each token (`FACTORS`).
pub(super) const ROWS: &str = "embeddings";
pub(super) const PARTS: [&str; 2] = [MAPPING, FACTORS];
const MAPPING: &str = "mapping";
const FACTORS: &str = "weights";

/// Name of a table that is a vector, with one number for each token.
const WEIGHTS: &str = "weight";

/// Possible names of a table, in the order in which they are looked up.
pub(super) const NAMES: [&str; 3] = [TABLE, ROWS, WEIGHTS];

/// The tensors of model2vec's table. They are read as a table with a row for each token.
pub(super) struct StaticTable {
    rows: Place,
    mapping: Option<Place>,
    factors: Option<Place>,
}

impl StaticTable {
    /// Creates the table from its tensors. Also returns its dimensions.
    ///
    /// # Errors
    /// Returns an error if the tensors do not have one entry for each token.
    pub fn new(
        rows: Place,
        mapping: Option<Place>,
        factors: Option<Place>,
        shards: &[Shard],
    ) -> Result<(Self, [u64; 2]), CheckpointError> {
        let found = |name: &str, place: &Place, expected: &str| CheckpointError::StaticTable {
            file: shards[place.shard].file().to_owned(),
            problem: format!("`{name}` is {:?}; expected {expected}", place.stored.dims),
        };
        let &[n_rows, width] = rows.stored.dims.as_slice() else {
            return Err(found(ROWS, &rows, "rows of one width"));
        };
        let n_tokens = match &mapping {
            None => n_rows,
            Some(place) => match place.stored.dims.as_slice() {
                &[n] => n,
                _ => return Err(found(MAPPING, place, "one row number for each token")),
            },
        };
        if let Some(place) = &factors
            && place.stored.dims != [n_tokens]
        {
            let expected = format!("one factor for each of the {n_tokens} tokens");
            return Err(found(FACTORS, place, &expected));
        }
        let table = Self {
            rows,
            mapping,
            factors,
        };
        Ok((table, [n_tokens, width]))
    }

    pub fn shard(&self) -> usize {
        self.rows.shard
    }

    /// Reads the row of each token. Also returns the number of values that are not finite.
    ///
    /// # Errors
    /// Returns an error for elements of an unsupported type, and for a row index that is out of range.
    pub fn read(
        &self,
        [n_tokens, width]: [u64; 2],
        shards: &[Shard],
    ) -> Result<(Vec<f32>, usize), CheckpointError> {
        let dtype = self.rows.stored.dtype();
        let dtype = dtype.map_err(|found| CheckpointError::DType {
            file: shards[self.rows.shard].file().to_owned(),
            tensor: ROWS.to_owned(),
            found,
        })?;
        let (rows, _) = shards[self.rows.shard].read(ROWS, &self.rows.stored, dtype)?;
        let n_rows = self.rows.stored.dims[0];
        let mapping = self.mapping.as_ref().map(|place| whole(place, shards));
        let mapping = mapping.transpose()?;
        let factors = self.factors.as_ref().map(|place| reals(place, shards));
        let factors = factors.transpose()?;
        let n_values = n_tokens.saturating_mul(width);
        let (mut values, mut n_bad) = (room(ROWS, n_values)?, 0);
        for token in 0..n_tokens as usize {
            let row = match &mapping {
                None => token as u64,
                Some(rows) => match u64::try_from(rows[token]) {
                    Ok(row) if row < n_rows => row,
                    _ => {
                        return Err(CheckpointError::StaticTable {
                            file: shards[self.rows.shard].file().to_owned(),
                            problem: format!(
                                "`{MAPPING}` gives the token {token} the row {}, but `{ROWS}` has {n_rows} rows",
                                rows[token]
                            ),
                        });
                    }
                },
            };
            let row = &rows[row as usize * width as usize..][..width as usize];
            let factor = factors.as_ref().map_or(1.0, |factors| factors[token]);
            for &value in row {
                let value = (f64::from(value) * factor) as f32;
                n_bad += usize::from(!value.is_finite());
                values.push(value);
            }
        }
        Ok((values, n_bad))
    }
}

/// Reads the row indices of the tensor `mapping`.
fn whole(place: &Place, shards: &[Shard]) -> Result<Vec<i64>, CheckpointError> {
    let shard = &shards[place.shard];
    let of = |bytes: &[u8]| match place.stored.element {
        Ok(Element::I64) => Some(i64::from_le_bytes(bytes.try_into().ok()?)),
        Ok(Element::I32) => Some(i32::from_le_bytes(bytes.try_into().ok()?).into()),
        Ok(_) | Err(_) => None,
    };
    numbers(MAPPING, place, shard, "I64 or I32", of)
}

/// Reads the factors of the tensor `weights`, converted to f64.
fn reals(place: &Place, shards: &[Shard]) -> Result<Vec<f64>, CheckpointError> {
    let shard = &shards[place.shard];
    if let Ok(dtype) = place.stored.dtype() {
        let (values, _) = shard.read(FACTORS, &place.stored, dtype)?;
        return Ok(values.into_iter().map(f64::from).collect());
    }
    let of = |bytes: &[u8]| match place.stored.element {
        Ok(Element::F64) => Some(f64::from_le_bytes(bytes.try_into().ok()?)),
        Ok(_) | Err(_) => None,
    };
    numbers(FACTORS, place, shard, "F64, F32, F16 or BF16", of)
}

/// Reads a vector of numbers. `of` converts the bytes of an element to a number, and returns `None` if the element type is not one of
/// `expected`.
fn numbers<T>(
    name: &str,
    place: &Place,
    shard: &Shard,
    expected: &str,
    of: impl Fn(&[u8]) -> Option<T>,
) -> Result<Vec<T>, CheckpointError> {
    let bytes = shard.bytes(name, &place.stored)?;
    let size = match &place.stored.element {
        Ok(element) => element.bytes().max(1),
        Err(_) => 1,
    };
    let all: Option<Vec<T>> = bytes.chunks_exact(size as usize).map(of).collect();
    all.ok_or_else(|| {
        let found = match &place.stored.element {
            Ok(element) => element.to_string(),
            Err(name) => name.clone(),
        };
        CheckpointError::StaticTable {
            file: shard.file().to_owned(),
            problem: format!("`{name}` is stored as {found}; expected {expected}"),
        }
    })
}
