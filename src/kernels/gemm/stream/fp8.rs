//! The GEMM that streams its weight, with factors in E4M3.

use serde::{Deserialize, Serialize};

use super::{
    super::{
        small_m::BLOCK_K,
        wgmma::{self, GemmFp8, GemmWgmma, WgmmaTile},
    },
    GemmStream, StreamNorm, StreamTile,
};
use crate::{
    kernels::{
        Case, Class, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param,
        TensorMap, Tolerance,
    },
    machine::Machine,
    ops::Epilogue,
    tensor::{DType, Extents},
};

/// Computes the function of [`GemmFp8`] for small M. A stage of the ring has the same size in bytes as with 16-bit factors, so it holds
/// twice as many columns of k.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GemmStreamFp8 {
    /// Operands, epilogue, gate and result. Its tile is not used.
    pub of: GemmFp8,
    pub tile: StreamTile,
}

/// Max rows of a tile. Beyond that, the persistent kernels of [`GemmFp8`] are at least as fast, because they do not read the weight
/// more often.
const MAX_TILE_ROWS: u32 = 32;

impl GemmStreamFp8 {
    /// Returns the kernels that compute the function of `of`, fewest rows first.
    pub fn tiles(of: &GemmFp8, instructions: Instructions) -> Vec<Self> {
        let with = |tile| Self {
            of: of.clone(),
            tile,
        };
        let halved = with(StreamTile::new(8, 1, 1, 1)).halved();
        let kernels = halved.tiles(instructions).into_iter().map(with);
        kernels.filter(|kernel| kernel.check().is_ok()).collect()
    }

    /// Returns the kernel with 16-bit factors and half of k, which reads the same number of bytes.
    pub(super) fn halved(&self) -> GemmStream {
        let GemmWgmma {
            n,
            k,
            dtype,
            epilogue,
            gated,
            ..
        } = self.of.of;
        GemmStream {
            n,
            k: k.div_ceil(2),
            dtype,
            weight: dtype.into(),
            epilogue,
            gated,
            norm: StreamNorm::None,
            tile: self.tile,
        }
    }

    fn check(&self) -> Result<(), String> {
        let GemmWgmma { n, k, .. } = self.of.of;
        GemmFp8::check_k(k)?;
        self.halved().check()?;
        if self.tile.rows > MAX_TILE_ROWS {
            return Err(format!(
                "{:?} is not a tile of the streaming GEMM of E4M3; expected at most {MAX_TILE_ROWS} rows",
                self.tile
            ));
        }
        match self.of.to_e4m3 && (self.of.of.epilogue.residual || !n.is_multiple_of(8)) {
            true => Err(format!(
                "a result of {n} columns in E4M3 with {:?}; expected no residual, and columns in multiples of 8",
                self.of.of.epilogue
            )),
            false => Ok(()),
        }
    }
}

impl Kernel for GemmStreamFp8 {
    fn symbol(&self) -> String {
        format!("{}_{}", self.definition(), self.tile.name())
    }

    fn definition(&self) -> String {
        self.of.definition()
    }

    fn template(&self) -> &'static str {
        "gemm_stream"
    }

    fn instructions(&self) -> Instructions {
        Instructions::Hopper
    }

    fn constants(&self) -> Constants {
        let mut constants = self.halved().constants();
        constants.extend([
            ("k", self.of.of.k.into()),
            ("block_k", (2 * BLOCK_K).into()),
            ("mma_k", 32u32.into()),
            ("scaled", true.into()),
            ("to_e4m3", self.of.to_e4m3.into()),
        ]);
        constants
    }

    fn params(&self) -> Vec<Param> {
        self.of.params()
    }

    fn tensor_maps(&self) -> Vec<TensorMap> {
        let mut maps = self.halved().tensor_maps();
        maps.iter_mut().for_each(|map| map.box_columns *= 2);
        maps
    }

    fn dtype(&self) -> Option<DType> {
        self.of.dtype()
    }

    fn class(&self) -> Class {
        Class::Gemm
    }

    fn weight(&self) -> Option<[u32; 2]> {
        self.of.weight()
    }

    fn validate(&self) -> Result<(), String> {
        self.halved().validate()?;
        self.check()
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        self.halved().launch(extents, machine)
    }

    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        self.halved().cycles(rows, machine)
    }

    fn max_rows(&self) -> Option<u64> {
        self.halved().max_rows()
    }

    fn threads(&self) -> u32 {
        self.halved().threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        self.of.reference(extents, reads)
    }

    fn cases(&self) -> Vec<Case> {
        self.of.cases()
    }

    fn tolerance(&self) -> Tolerance {
        self.of.tolerance()
    }
}

/// Instances of the functions that [`GemmFp8`] is tested with, and of one with an odd number of columns.
pub(in crate::kernels::gemm) fn representative() -> Vec<KernelSpec> {
    let odd = GemmFp8 {
        of: GemmWgmma {
            n: 5003,
            k: 144,
            dtype: DType::F16,
            epilogue: Epilogue::new(true, None),
            gated: false,
            tile: WgmmaTile::CANDIDATES[0],
        },
        to_e4m3: false,
    };
    let functions = wgmma::fp8::functions().chain([odd]).enumerate();
    let kernels = functions.flat_map(|(at, of)| {
        let tiles = GemmStreamFp8::tiles(&of, Instructions::Hopper).into_iter();
        // All tiles of the first function, and some of the others.
        let chosen = tiles.enumerate();
        chosen.filter(move |(tile, _)| at == 0 || tile % 5 == at % 5)
    });
    kernels
        .map(|(_, kernel)| KernelSpec::from(kernel))
        .collect()
}
