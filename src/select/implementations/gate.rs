//! The gate of a feed-forward network, either in a separate launch or in the epilogue of the preceding GEMM.

use super::{Bindings, Candidate, Implementation, Launch, Operand};
use crate::{
    kernels::gemm::{GemmStream, GemmWgmma, StreamNorm, StreamTile},
    machine::Machine,
    ops::Epilogue,
    select::site::{Link, Site},
    tensor::{DType, Format},
};

pub(super) fn alone(chain: &[Link], _: &Machine) -> Option<Implementation> {
    let Site::Gate(gate) = &chain.first()?.site else {
        return None;
    };
    let launch = Launch {
        site: 0,
        bindings: Bindings::to_operands_of(&[0]).with("out", Operand::Value(0)),
        candidates: vec![Candidate::new(gate.clone())],
    };
    Some(Implementation {
        name: "gate",
        sites: 1,
        launches: vec![launch],
        saved: 0.0,
    })
}

pub(super) fn after_gemm(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let kernel = gated(chain)?;
    let launch = Launch {
        site: 1,
        bindings: Bindings::to_operands_of(&[0]).with("out", Operand::Value(1)),
        candidates: streaming(&kernel, machine, |_| true)
            .into_iter()
            .chain(persistent(&kernel, machine))
            .collect(),
    };
    (!launch.candidates.is_empty()).then(|| Implementation {
        name: "gemm+gate",
        sites: 2,
        launches: vec![launch],
        saved: 0.0,
    })
}

/// Returns the GEMM of a linear layer whose only reader is a gate, fused with the gate; its tile is arbitrary.
pub(super) fn gated(chain: &[Link]) -> Option<GemmStream> {
    let [linear, gate, ..] = chain else {
        return None;
    };
    let (
        &Site::Linear {
            n,
            k,
            dtype,
            weight,
            epilogue,
        },
        Site::Gate(gate),
    ) = (&linear.site, &gate.site)
    else {
        return None;
    };
    let serves = linear.is_private
        && is_read_by_streams(weight, dtype)
        && epilogue.activation.is_none()
        && n == 2 * gate.width;
    serves.then(|| {
        let mut kernel = GemmStream {
            n: gate.width,
            ..streamed(n, k, dtype, weight, epilogue)
        };
        kernel.gated = true;
        kernel.epilogue.activation = Some(gate.activation);
        kernel
    })
}

/// Returns candidates for large M that compute the same function.
fn persistent(of: &GemmStream, machine: &Machine) -> impl Iterator<Item = Candidate> {
    let &GemmStream {
        n,
        k,
        dtype,
        weight,
        epilogue,
        ..
    } = of;
    let tiles = match weight == Format::Plain(dtype) {
        true => GemmWgmma::gating(n, k, epilogue.bias, dtype, machine.instructions),
        false => Vec::new(),
    };
    tiles.into_iter().map(move |tile| {
        Candidate::new(GemmWgmma {
            n,
            k,
            dtype,
            epilogue,
            gated: true,
            tile,
        })
    })
}

/// Whether the streaming GEMM reads a weight in this format.
pub(super) fn is_read_by_streams(weight: Format, dtype: DType) -> bool {
    match weight {
        Format::Plain(stored) => stored == dtype,
        Format::Scaled(_) => dtype.has_mma(),
        Format::E4m3 => false,
    }
}

/// Returns the GEMM of a linear layer; its tile is arbitrary.
pub(super) fn streamed(
    n: u32,
    k: u32,
    dtype: DType,
    weight: Format,
    epilogue: Epilogue,
) -> GemmStream {
    GemmStream {
        n,
        k,
        dtype,
        weight,
        epilogue,
        gated: false,
        norm: StreamNorm::None,
        tile: StreamTile::new(8, 1, 1, 1),
    }
}

/// Returns the kernel with every valid tile that `is_wanted` accepts.
pub(super) fn streaming(
    kernel: &GemmStream,
    machine: &Machine,
    is_wanted: impl Fn(&StreamTile) -> bool,
) -> Vec<Candidate> {
    let tiles = kernel.tiles(machine.instructions).into_iter();
    tiles
        .filter(is_wanted)
        .map(|tile| {
            Candidate::new(GemmStream {
                tile,
                ..kernel.clone()
            })
        })
        .collect()
}
