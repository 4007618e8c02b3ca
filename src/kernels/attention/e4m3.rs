//! Attention whose result is in E4M3.

use serde::{Deserialize, Serialize};

use super::{MhaOnline, MhaShort, MhaWgmma};
use crate::{
    kernels::{
        Case, Class, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param,
        TensorMap, Tolerance,
        e4m3::{params_in_e4m3, reference_in_e4m3, tolerance_in_e4m3},
    },
    machine::Machine,
    tensor::{DType, Extents, Size},
};

/// The inputs of an attention kernel, and `out_scale [1]` → `out [tokens, heads·head]`: the result of attention, divided by `out_scale`, in
/// E4M3.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaToE4m3 {
    pub attention: FusedMha,
}

/// A kernel of fused attention without a cache, in f16 or bf16.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FusedMha {
    Short(MhaShort),
    Online(MhaOnline),
    Wgmma(MhaWgmma),
}

impl FusedMha {
    fn as_kernel(&self) -> &dyn Kernel {
        match self {
            Self::Short(attention) => attention,
            Self::Online(attention) => attention,
            Self::Wgmma(attention) => attention,
        }
    }

    /// Returns the attention kernel without the conversion of the result to E4M3.
    pub fn spec(&self) -> KernelSpec {
        match self.clone() {
            Self::Short(attention) => attention.into(),
            Self::Online(attention) => attention.into(),
            Self::Wgmma(attention) => attention.into(),
        }
    }

    /// Number of columns per head.
    pub fn head(&self) -> u32 {
        match self {
            Self::Short(MhaShort { of, .. })
            | Self::Online(MhaOnline { of, .. })
            | Self::Wgmma(MhaWgmma { of, .. }) => of.head,
        }
    }
}

impl MhaToE4m3 {
    /// Max queries per tile, 64 for each consumer warpgroup. With a third consumer warpgroup, too few registers would be left for the
    /// conversion.
    pub const MAX_ROWS: u32 = 128;
    /// Max head size. The accumulators of larger heads leave too few registers for the conversion.
    pub const MAX_HEAD: u32 = 128;

    /// Whether consumer threads have enough registers for the conversion.
    fn has_registers(attention: &MhaWgmma) -> bool {
        attention.tile.rows <= Self::MAX_ROWS && attention.of.head <= Self::MAX_HEAD
    }
}

impl Kernel for MhaToE4m3 {
    fn symbol(&self) -> String {
        match &self.attention {
            FusedMha::Wgmma(attention) => {
                format!("{}_{}", self.definition(), attention.tile.name())
            }
            FusedMha::Short(_) | FusedMha::Online(_) => self.definition(),
        }
    }

    fn definition(&self) -> String {
        format!("{}_to_e4m3", self.attention.as_kernel().definition())
    }

    fn template(&self) -> &'static str {
        self.attention.as_kernel().template()
    }

    fn instructions(&self) -> Instructions {
        self.attention
            .as_kernel()
            .instructions()
            .max(Instructions::Ada)
    }

    fn constants(&self) -> Constants {
        let mut constants = self.attention.as_kernel().constants();
        constants.insert("to_e4m3", true.into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        params_in_e4m3(self.attention.as_kernel())
    }

    fn tensor_maps(&self) -> Vec<TensorMap> {
        self.attention.as_kernel().tensor_maps()
    }

    fn dtype(&self) -> Option<DType> {
        self.attention.as_kernel().dtype()
    }

    fn class(&self) -> Class {
        self.attention.as_kernel().class()
    }

    fn flop(&self) -> Size {
        self.attention.as_kernel().flop()
    }

    fn validate(&self) -> Result<(), String> {
        self.attention.as_kernel().validate()?;
        match &self.attention {
            FusedMha::Short(MhaShort { dtype, .. }) | FusedMha::Online(MhaOnline { dtype, .. }) => {
                match dtype.has_mma() {
                    true => Ok(()),
                    false => Err(format!(
                        "attention in E4M3 over {dtype} elements; expected f16 or bf16"
                    )),
                }
            }
            FusedMha::Wgmma(attention) if Self::has_registers(attention) => Ok(()),
            FusedMha::Wgmma(attention) => Err(format!(
                "attention in E4M3 with {:?} and heads of {}; expected at most {} queries per tile, and heads of at most {}",
                attention.tile,
                attention.of.head,
                Self::MAX_ROWS,
                Self::MAX_HEAD
            )),
        }
    }

    fn max_len(&self) -> Option<u32> {
        self.attention.as_kernel().max_len()
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        self.attention.as_kernel().launch(extents, machine)
    }

    fn threads(&self) -> u32 {
        self.attention.as_kernel().threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let [_, converted] = reference_in_e4m3(self.attention.as_kernel(), extents, reads);
        vec![converted]
    }

    fn cases(&self) -> Vec<Case> {
        self.attention.as_kernel().cases()
    }

    fn tolerance(&self) -> Tolerance {
        tolerance_in_e4m3(self.attention.as_kernel())
    }
}

/// Instances with every tile of WGMMA attention that supports the conversion. The kernels that run on any GPU have instances with each head
/// size, full and causal, with and without a position bias. WGMMA kernels and kernels with heads of 64 are in both storage types.
pub(super) fn representative(plain: &[KernelSpec]) -> Vec<KernelSpec> {
    let mut kernels: Vec<FusedMha> = Vec::new();
    let all = plain.iter().cloned().chain(super::wgmma::representative());
    for kernel in all {
        let attention = match kernel {
            KernelSpec::MhaShort(attention) if attention.dtype.has_mma() => {
                // Take only the largest `max_len`, because short kernels with a smaller `max_len` differ only in the size of their tile.
                let longest = MhaShort::max_len_for(attention.of.head, attention.dtype);
                match attention.max_len == longest {
                    true => FusedMha::Short(attention),
                    false => continue,
                }
            }
            KernelSpec::MhaOnline(attention) if attention.dtype.has_mma() => {
                FusedMha::Online(attention)
            }
            KernelSpec::MhaWgmma(attention) if MhaToE4m3::has_registers(&attention) => {
                FusedMha::Wgmma(attention)
            }
            _ => continue,
        };
        let is_same_type = |a: DType, b: DType, head: u32| a == b || head != 64;
        let is_same = |known: &&FusedMha| match (*known, &attention) {
            (FusedMha::Short(a), FusedMha::Short(b)) => {
                a.of.head == b.of.head && is_same_type(a.dtype, b.dtype, a.of.head)
            }
            (FusedMha::Online(a), FusedMha::Online(b)) => {
                is_same_type(a.dtype, b.dtype, a.of.head)
                    && (a.of.head, a.of.causal, a.of.by.is_none())
                        == (b.of.head, b.of.causal, b.of.by.is_none())
            }
            (FusedMha::Wgmma(a), FusedMha::Wgmma(b)) => {
                (a.of.head, a.tile, a.dtype, a.of.causal, a.of.by.is_none())
                    == (b.of.head, b.tile, b.dtype, b.of.causal, b.of.by.is_none())
            }
            _ => false,
        };
        if kernels.iter().find(is_same).is_none() {
            kernels.push(attention);
        }
    }
    let converting = kernels.into_iter().map(|attention| MhaToE4m3 { attention });
    converting.map(KernelSpec::from).collect()
}
