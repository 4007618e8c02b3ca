//! Upload of a batch's data to the device, by a kernel that reads page-locked host memory. It costs less than a copy by
//! the copy engines, for which neighbouring kernels wait longer than for another kernel.

use serde::{Deserialize, Serialize};

use super::{
    Constants, Fill, HostTensor, Kernel, Launch, Param, Tolerance,
    rows::{COPIED, STREAM_THREADS, count, read, rows_by, stream_launch, write},
};
use crate::machine::Machine;
use crate::tensor::{DType, Extents, Symbol};

/// `from` → `to`, both `[rows, 4]` 32-bit integers: pieces of 16 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Upload;

impl Upload {
    /// Bytes of one row.
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
            read("from", DType::I32, pieces(), Fill::Below(1 << 20)),
            write("to", DType::I32, pieces()),
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
