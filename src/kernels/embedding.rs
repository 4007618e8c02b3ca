//! Embedding lookups: a kernel for a single lookup, and a kernel that fuses a sum of several lookups with LayerNorm.

use serde::{Deserialize, Serialize};

use super::{
    Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance,
    layernorm::{self, Variance, layernorm_row},
    rows::{
        COPIED, STREAM_THREADS, Teams, count, one_per, read, rows_by, stream_constants,
        stream_launch, vector_width, word, write,
    },
};
use crate::{
    kernels::limits,
    machine::Machine,
    ops::{BatchInput, MAX_ROWS},
    tensor::{DType, Extents, Shape, Symbol},
};

/// An embedding table `[rows, width]`, and the batch data that indexes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Table {
    /// [`BatchInput::TokenIds`], [`BatchInput::PreviousIds`], [`BatchInput::TypeIds`] or [`BatchInput::Positions`].
    pub ids: BatchInput,
    /// Offset added to every id. Some models count positions from `padding index + 1`.
    pub offset: u32,
    pub rows: u32,
}

/// `ids [rows]`, `table [table.rows, width]` → `out [rows, width]`. An id plus the table's offset must be less than the table's number of
/// rows; the code that creates the ids checks this.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Embedding {
    pub table: Table,
    pub width: u32,
    pub dtype: DType,
}

/// `ids [rows]` for each table, the tables `[table.rows, width]`, `gamma`, `beta [width]` → `out [rows, width]`: LayerNorm of the sum of
/// the selected rows of all tables.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EmbeddingLayerNorm {
    /// The 1 to [`EmbeddingLayerNorm::MAX_TABLES`] tables to sum.
    pub tables: Vec<Table>,
    pub width: u32,
    pub eps: f32,
    pub dtype: DType,
}

impl Table {
    /// Name in symbols, e.g. `token1003`, `position514o2` (offset 2) or `previous2_1003` (ids of previous tokens, and id 2 before the first
    /// token).
    fn word(&self) -> String {
        let ids = match self.ids {
            BatchInput::TokenIds => "token",
            BatchInput::TypeIds => "type",
            BatchInput::Positions => "position",
            BatchInput::CuLens => "cu_lens",
            BatchInput::PairOffsets => "pair_offsets",
            BatchInput::Mask => "mask",
            BatchInput::ValidLens => "valid_lens",
            BatchInput::TokenSlots => "token_slots",
            BatchInput::Slots => "slots",
            BatchInput::SlotStarts => "slot_starts",
            BatchInput::KeyLens => "key_lens",
            BatchInput::SourceSlots => "source_slots",
            BatchInput::SourceStarts => "source_starts",
            BatchInput::SourceLens => "source_lens",
            BatchInput::Seeds => "seeds",
            BatchInput::PreviousIds { first } => &format!("previous{first}_"),
            BatchInput::PooledTokens => "pooled_tokens",
            BatchInput::PooledCuLens => "pooled_cu_lens",
        };
        match self.offset {
            0 => format!("{ids}{}", self.rows),
            offset => format!("{ids}{}o{offset}", self.rows),
        }
    }

    /// Returns the parameter for the ids. In checks, each id plus the offset is a valid row.
    fn ids_param(&self, name: &'static str) -> Param {
        let ids = self.rows.saturating_sub(self.offset).max(1);
        read(
            name,
            self.ids.element(),
            one_per(Symbol::Rows),
            Fill::Below(ids),
        )
    }

    fn param(&self, name: &'static str, width: u32, dtype: DType, fill: Fill) -> Param {
        let shape = Shape::fixed(&[self.rows.into(), width.into()]);
        read(name, dtype, shape, fill)
    }

    /// Returns the row of `values` for `id`.
    fn row<'a>(&self, values: &'a HostTensor, id: i64, width: usize) -> &'a [f32] {
        let start = (id + i64::from(self.offset)) as usize * width;
        &values.real()[start..start + width]
    }
}

impl Kernel for Embedding {
    facts! { template: "embedding", dtype: self.dtype }

    fn symbol(&self) -> String {
        format!(
            "embedding_{}_w{}_{}",
            self.dtype,
            self.width,
            self.table.word()
        )
    }

    fn constants(&self) -> Constants {
        let mut constants = stream_constants(self.dtype, vector_width(self.dtype, &[self.width]));
        constants.insert("width", self.width.into());
        constants.insert("offset", self.table.offset.into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        vec![
            self.table.ids_param("ids"),
            self.table
                .param("table", self.width, self.dtype, Fill::ACTIVATION),
            write("out", self.dtype, rows_by(Symbol::Rows, self.width)),
            count(Symbol::Rows),
        ]
    }

    fn tables(&self) -> Vec<(usize, Table)> {
        vec![(0, self.table)]
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])?;
        check_tables(std::slice::from_ref(&self.table))
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        let packs = self.width / vector_width(self.dtype, &[self.width]);
        stream_launch(extents.rows * u64::from(packs))
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [ids, table] = reads else {
            unreachable!("the parameter list has two operands")
        };
        let row = |&id: &i64| self.table.row(table, id, self.width as usize);
        let out = ids.index().iter().flat_map(row).copied().collect();
        vec![HostTensor::Real(out)]
    }

    fn tolerance(&self) -> Tolerance {
        COPIED
    }
}

/// Names of the parameters for the ids and the values of each table.
const TABLES: [(&str, &str); EmbeddingLayerNorm::MAX_TABLES] = [
    ("ids_0", "table_0"),
    ("ids_1", "table_1"),
    ("ids_2", "table_2"),
    ("ids_3", "table_3"),
];

impl EmbeddingLayerNorm {
    /// Max number of tables that one kernel sums.
    pub const MAX_TABLES: usize = 4;

    /// Returns each table with the names of its parameters.
    ///
    /// # Panics
    ///
    /// Panics if there are no tables, or more than [`Self::MAX_TABLES`]. Callers must not create such kernels.
    fn named(&self) -> impl Iterator<Item = (&Table, &'static str, &'static str)> {
        assert!(
            (1..=Self::MAX_TABLES).contains(&self.tables.len()),
            "embedding_layernorm sums from 1 to {} tables, this one has {}",
            Self::MAX_TABLES,
            self.tables.len()
        );
        let with_names = |(table, (ids, name))| (table, ids, name);
        self.tables.iter().zip(TABLES).map(with_names)
    }
}

impl Kernel for EmbeddingLayerNorm {
    facts! { template: "embedding_layernorm", dtype: self.dtype, class: LayerNorm }

    fn symbol(&self) -> String {
        let tables: Vec<String> = self.named().map(|(table, ..)| table.word()).collect();
        format!(
            "embedding_layernorm_{}_w{}_{}_eps{}",
            self.dtype,
            self.width,
            tables.join("_"),
            word(self.eps)
        )
    }

    fn constants(&self) -> Constants {
        let (mut tables, mut ids, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
        for (table, ids_name, table_name) in self.named() {
            tables.push(table_name);
            ids.push(ids_name);
            offsets.push(table.offset.to_string());
        }
        let mut constants = layernorm::constants(
            self.width,
            self.eps,
            self.dtype,
            Teams::usual(self.width, self.dtype),
            Variance::OnePassShifted,
        );
        constants.insert("n_tables", (tables.len() as u64).into());
        constants.insert("tables", tables.join(", ").into());
        constants.insert("ids", ids.join(", ").into());
        constants.insert("offsets", offsets.join(", ").into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        let mut params: Vec<Param> = self
            .named()
            .map(|(table, ids, _)| table.ids_param(ids))
            .collect();
        params.extend(self.named().enumerate().map(|(i, (table, _, name))| {
            let fill = match i {
                0 => layernorm::input_fill(self.dtype),
                _ => Fill::ACTIVATION,
            };
            table.param(name, self.width, self.dtype, fill)
        }));
        params.extend(layernorm::affine_params(self.width, self.dtype));
        params.push(write("out", self.dtype, rows_by(Symbol::Rows, self.width)));
        params.push(count(Symbol::Rows));
        params
    }

    fn tables(&self) -> Vec<(usize, Table)> {
        self.tables.iter().copied().enumerate().collect()
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.width])?;
        limits::eps(self.eps)?;
        check_tables(&self.tables)
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        Teams::usual(self.width, self.dtype).launch(extents.rows)
    }

    fn threads(&self) -> u32 {
        Teams::usual(self.width, self.dtype).threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let width = self.width as usize;
        let (ids, rest) = reads.split_at(self.tables.len());
        let (tables, affine) = rest.split_at(self.tables.len());
        let [gamma, beta] = affine else {
            unreachable!("gamma and beta follow the tables in the parameter list")
        };
        let mut out = Vec::with_capacity(extents.rows as usize * width);
        for row in 0..extents.rows as usize {
            let mut sum = vec![0f64; width];
            for (table, (ids, values)) in self.tables.iter().zip(ids.iter().zip(tables)) {
                let picked = table.row(values, ids.index()[row], width);
                for (sum, &v) in sum.iter_mut().zip(picked) {
                    *sum += f64::from(v);
                }
            }
            out.extend(layernorm_row(&sum, gamma.real(), beta.real(), self.eps));
        }
        vec![HostTensor::Real(out)]
    }

    fn tolerance(&self) -> Tolerance {
        layernorm::tolerance(self.dtype)
    }
}

/// Instances for the device check and the compile tests: one to four tables, with and without offsets.
pub fn representative() -> Vec<KernelSpec> {
    let table = |ids, offset, rows| Table { ids, offset, rows };
    let token = table(BatchInput::TokenIds, 0, 211);
    let kind = table(BatchInput::TypeIds, 0, 2);
    let position = table(BatchInput::Positions, 0, 128);
    let late_position = table(BatchInput::Positions, 2, 130);
    let sums = [
        vec![token],
        vec![token, position],
        vec![token, late_position, kind],
        vec![token, kind, position, token],
    ];
    let mut kernels: Vec<KernelSpec> = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for width in [768, 384, 320, 1024, 1003, 128, 4096] {
            for table in [&token, &late_position] {
                kernels.push(KernelSpec::from(Embedding {
                    table: *table,
                    width,
                    dtype,
                }));
            }
            for tables in &sums {
                kernels.push(KernelSpec::from(EmbeddingLayerNorm {
                    tables: tables.clone(),
                    width,
                    eps: 1e-12,
                    dtype,
                }));
            }
        }
    }
    kernels
}

fn check_tables(tables: &[Table]) -> Result<(), String> {
    if !(1..=EmbeddingLayerNorm::MAX_TABLES).contains(&tables.len()) {
        return Err(format!(
            "{} tables, expected 1 to {}",
            tables.len(),
            EmbeddingLayerNorm::MAX_TABLES
        ));
    }
    for table in tables {
        if table.offset >= table.rows || table.rows > MAX_ROWS {
            return Err(format!(
                "a table of {} rows with an offset of {}, expected an offset below the number of rows, and at most {MAX_ROWS} rows",
                table.rows, table.offset
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(ids: BatchInput, offset: u32, rows: u32) -> Table {
        Table { ids, offset, rows }
    }

    #[test]
    fn the_offset_is_added_to_every_id() {
        let kernel = Embedding {
            table: table(BatchInput::Positions, 1, 4),
            width: 2,
            dtype: DType::F32,
        };
        let ids = HostTensor::Index(vec![2, 0]);
        let values = HostTensor::Real(vec![0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]);
        let out = kernel.reference(&Extents::of(&[2]).unwrap(), &[&ids, &values]);
        assert_eq!(out[0].real(), [3.0, 3.5, 1.0, 1.5]);
    }

    #[test]
    fn the_rows_of_all_tables_are_summed_before_the_layernorm() {
        let kernel = EmbeddingLayerNorm {
            tables: vec![
                table(BatchInput::TokenIds, 0, 2),
                table(BatchInput::Positions, 1, 3),
            ],
            width: 2,
            eps: 0.0,
            dtype: DType::F32,
        };
        let real = |v: &[f32]| HostTensor::Real(v.to_vec());
        let (tokens, positions) = (HostTensor::Index(vec![1, 0]), HostTensor::Index(vec![0, 1]));
        let table_0 = real(&[1.0, 2.0, 3.0, 4.0]);
        let table_1 = real(&[100.0, 200.0, 0.0, 5.0, 9.0, 0.0]);
        let (gamma, beta) = (real(&[1.0, 2.0]), real(&[0.5, 0.0]));
        // Row 0 is [3, 4] + [0, 5], row 1 is [1, 2] + [9, 0]: the two values normalize to −1 and 1.
        let reads = [&tokens, &positions, &table_0, &table_1, &gamma, &beta];
        let out = kernel.reference(&Extents::of(&[2]).unwrap(), &reads);
        assert_eq!(out[0].real(), [-0.5, 2.0, 1.5, -2.0]);
    }

    #[test]
    fn ids_come_before_tables_and_pick_rows_that_exist() {
        let kernel = EmbeddingLayerNorm {
            tables: vec![
                table(BatchInput::TokenIds, 0, 1003),
                table(BatchInput::Positions, 2, 514),
            ],
            width: 768,
            eps: 1e-5,
            dtype: DType::F16,
        };
        assert_eq!(
            kernel.symbol(),
            "embedding_layernorm_f16_w768_token1003_position514o2_eps1em5"
        );
        let params = kernel.params();
        let names: Vec<&str> = params.iter().map(|p| p.name).collect();
        let want = [
            "ids_0", "ids_1", "table_0", "table_1", "gamma", "beta", "out", "rows",
        ];
        assert_eq!(names, want);
        let fills: Vec<Fill> = params
            .iter()
            .filter_map(|p| match p.role {
                super::super::Role::Read { fill, .. } => Some(fill),
                _ => None,
            })
            .take(2)
            .collect();
        assert_eq!(fills, [Fill::Below(1003), Fill::Below(512)]);
    }

    #[test]
    #[should_panic(expected = "sums from 1 to 4 tables, this one has 5")]
    fn too_many_tables_are_rejected() {
        let kernel = EmbeddingLayerNorm {
            tables: vec![table(BatchInput::TokenIds, 0, 2); 5],
            width: 8,
            eps: 1e-5,
            dtype: DType::F32,
        };
        kernel.params();
    }
}
