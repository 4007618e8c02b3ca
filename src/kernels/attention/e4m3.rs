//! Attention whose result is in E4M3.

use serde::{Deserialize, Serialize};

use super::MhaWgmma;
use crate::{
    kernels::{
        Case, Class, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, Role,
        TensorMap, Tolerance,
        e4m3::{ROUNDED, divided, out_scale},
    },
    machine::Machine,
    tensor::{DType, Element, Extents, Size},
};

/// The operands of [`MhaWgmma`], `out_scale [1]` → `out [tokens, heads·head]`: the attention's result, divided by `out_scale`, in E4M3.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaToE4m3 {
    pub attention: MhaWgmma,
}

impl MhaToE4m3 {
    /// Max queries per tile. With a third consumer warpgroup, no registers would be left for the conversion.
    pub const MAX_ROWS: u32 = 128;
    /// Max head size. Accumulators of larger heads leave no registers for the conversion.
    pub const MAX_HEAD: u32 = 128;

    /// Whether consumers have registers for the conversion.
    fn has_registers(attention: &MhaWgmma) -> bool {
        attention.tile.rows <= Self::MAX_ROWS && attention.of.head <= Self::MAX_HEAD
    }
}

impl Kernel for MhaToE4m3 {
    fn symbol(&self) -> String {
        format!("{}_{}", self.definition(), self.attention.tile.name())
    }

    fn definition(&self) -> String {
        format!("{}_to_e4m3", self.attention.definition())
    }

    fn template(&self) -> &'static str {
        self.attention.template()
    }

    fn instructions(&self) -> Instructions {
        self.attention.instructions()
    }

    fn constants(&self) -> Constants {
        let mut constants = self.attention.constants();
        constants.insert("to_e4m3", true.into());
        constants
    }

    fn params(&self) -> Vec<Param> {
        let mut params = Vec::new();
        for mut param in self.attention.params() {
            if let Role::Write { element, .. } = &mut param.role {
                *element = Element::E4m3;
                params.push(out_scale());
            }
            params.push(param);
        }
        params
    }

    fn tensor_maps(&self) -> Vec<TensorMap> {
        self.attention.tensor_maps()
    }

    fn dtype(&self) -> Option<DType> {
        self.attention.dtype()
    }

    fn class(&self) -> Class {
        self.attention.class()
    }

    fn flop(&self) -> Size {
        self.attention.flop()
    }

    fn validate(&self) -> Result<(), String> {
        self.attention.validate()?;
        match Self::has_registers(&self.attention) {
            true => Ok(()),
            false => Err(format!(
                "attention in E4M3 with {:?} and heads of {}; expected at most {} queries per tile, and heads of at most {}",
                self.attention.tile,
                self.attention.of.head,
                Self::MAX_ROWS,
                Self::MAX_HEAD
            )),
        }
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        self.attention.launch(extents, machine)
    }

    fn threads(&self) -> u32 {
        self.attention.threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let Some((scale, reads)) = reads.split_last() else {
            unreachable!("the parameter list ends with the scale")
        };
        let out = self.attention.reference(extents, reads).remove(0);
        vec![divided(out.real(), scale.real()[0])]
    }

    fn cases(&self) -> Vec<Case> {
        self.attention.cases()
    }

    fn tolerance(&self) -> Tolerance {
        // Error of the attention's result, before it is divided by the scale 1 / 64.
        let before = self.attention.tolerance().absolute;
        Tolerance {
            absolute: ROUNDED.absolute + 64.0 * before,
            ..ROUNDED
        }
    }
}

/// Every tile that supports the conversion, in both storage types, full and causal, with and without a position bias.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut kernels: Vec<MhaToE4m3> = Vec::new();
    for kernel in super::wgmma::representative() {
        let KernelSpec::MhaWgmma(attention) = kernel else {
            continue;
        };
        let is_same = |known: &&MhaToE4m3| {
            let (a, b) = (&known.attention, &attention);
            (a.of.head, a.tile, a.dtype, a.of.causal, a.of.by.is_none())
                == (b.of.head, b.tile, b.dtype, b.of.causal, b.of.by.is_none())
        };
        if MhaToE4m3::has_registers(&attention) && kernels.iter().find(is_same).is_none() {
            kernels.push(MhaToE4m3 { attention });
        }
    }
    kernels.into_iter().map(KernelSpec::from).collect()
}
