//! Kernels that upload batch data and table updates by reading page-locked host memory. An upload kernel is used instead of a copy engine
//! because the next kernel starts sooner after a kernel than after a copy.

use serde::{Deserialize, Serialize};

use super::{
    Case, Constants, Fill, HostTensor, Kernel, Launch, Param, Tolerance,
    cache::BLOCK,
    rows::{
        COPIED, STREAM_THREADS, count, one_per, read, read_meta, rows_by, stream_launch, write,
    },
};
use crate::{
    machine::Machine,
    ops::BatchInput,
    tensor::{Element, Extents, Symbol},
};

/// Copies `from` to `to`, both `[rows, 4]` in 32-bit integers. A row has 16 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Upload;

impl Upload {
    /// Bytes of a row, which a thread copies at a time.
    pub const PIECE: u64 = 16;
}

impl Kernel for Upload {
    fn symbol(&self) -> String {
        "upload".into()
    }

    fn template(&self) -> &'static str {
        "upload"
    }

    fn constants(&self) -> Constants {
        Constants::new()
    }

    fn params(&self) -> Vec<Param> {
        let pieces = || rows_by(Symbol::Rows, 4);
        vec![
            read("from", Element::I32, pieces(), Fill::Below(1 << 20)),
            write("to", Element::I32, pieces()),
            count(Symbol::Rows),
        ]
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        stream_launch(extents.rows)
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [from] = reads else {
            unreachable!("the parameter list has one operand")
        };
        vec![HostTensor::clone(from)]
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            reason: "whole numbers",
            ..COPIED
        }
    }
}

/// `places [tokens]`, `values [tokens]` → `to`: stores `values[i]` at index `places[i]`. The indices are distinct, and the rest of `to` is
/// not written. All elements are 32-bit integers. The symbol `tokens` is the number of values. In checks, the indices are the cache slots
/// of tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Scatter;

impl Kernel for Scatter {
    fn symbol(&self) -> String {
        "scatter".into()
    }

    fn template(&self) -> &'static str {
        "scatter"
    }

    fn constants(&self) -> Constants {
        Constants::new()
    }

    fn params(&self) -> Vec<Param> {
        let each = || one_per(Symbol::Tokens);
        vec![
            read_meta("places", BatchInput::TokenSlots, each()),
            read("values", Element::I32, each(), Fill::Below(1 << 20)),
            write("to", Element::I32, rows_by(Symbol::Blocks, BLOCK)),
            count(Symbol::Tokens),
        ]
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        stream_launch(extents.tokens)
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [places, values] = [0, 1].map(|i| reads[i].index());
        // Elements that are not written stay −1.
        let mut to = vec![-1; extents.blocks as usize * BLOCK as usize];
        for (&place, &value) in places.iter().zip(values) {
            to[place as usize] = value;
        }
        vec![HostTensor::Index(to)]
    }

    fn cases(&self) -> Vec<Case> {
        Case::cached()
    }

    fn tolerance(&self) -> Tolerance {
        Tolerance {
            reason: "whole numbers",
            ..COPIED
        }
    }
}
