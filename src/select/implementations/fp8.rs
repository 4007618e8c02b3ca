//! Products in E4M3, and the conversion of their operands, either in a separate launch or in the preceding kernel.

use super::{Bindings, Candidate, Implementation, Launch, Operand, norm};
use crate::{
    kernels::{
        e4m3::NormToE4m3,
        gemm::{GemmFp8, GemmStreamFp8, GemmWgmma, WgmmaTile},
    },
    machine::Machine,
    select::site::{Link, Site},
};

/// Converts a value in a separate launch.
pub(super) fn conversion(chain: &[Link], _: &Machine) -> Option<Implementation> {
    let Site::ToE4m3(conversion) = &chain.first()?.site else {
        return None;
    };
    let candidates = vec![Candidate::new(conversion.clone())];
    let bindings = Bindings::to_operands_of(&[0]).with("out", Operand::Value(0));
    implementation("conversion to E4M3", 1, bindings, candidates)
}

/// Converts the result of a norm in the norm's kernel.
pub(super) fn after_norm(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let [before, conversion, ..] = chain else {
        return None;
    };
    let Site::ToE4m3(_) = &conversion.site else {
        return None;
    };
    let norms = norm::kernels(&before.site, machine)?.into_iter();
    let keeps = !before.is_private;
    let candidates = norms.map(|norm| Candidate::new(NormToE4m3 { norm, keeps }));
    let candidates = candidates.collect();
    let mut bindings = Bindings::to_operands_of(&[0, 1]);
    if keeps {
        bindings = bindings.with("out", Operand::Value(0));
    }
    let bindings = bindings.with("converted", Operand::Value(1));
    implementation("norm+conversion to E4M3", 2, bindings, candidates)
}

pub(super) fn gemm(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let of = product(&chain.first()?.site)?;
    let bindings = Bindings::to_operands_of(&[0]).with("out", Operand::Value(0));
    implementation("fp8 gemm", 1, bindings, tiles(&of, false, machine))
}

/// Converts the result of a linear layer in the GEMM's epilogue.
pub(super) fn gemm_to_e4m3(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let [linear, conversion, ..] = chain else {
        return None;
    };
    let of = product(&linear.site)?;
    if !(linear.is_private && matches!(conversion.site, Site::ToE4m3(_))) {
        return None;
    }
    let bindings = Bindings::to_operands_of(&[0, 1]).with("out", Operand::Value(1));
    implementation("fp8 gemm to E4M3", 2, bindings, tiles(&of, true, machine))
}

/// Computes a gate in the GEMM's epilogue.
pub(super) fn gate(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let of = gated(chain)?;
    let bindings = Bindings::to_operands_of(&[0]).with("out", Operand::Value(1));
    implementation("fp8 gemm+gate", 2, bindings, tiles(&of, false, machine))
}

/// Computes a gate in the GEMM's epilogue, and converts the result.
pub(super) fn gate_to_e4m3(chain: &[Link], machine: &Machine) -> Option<Implementation> {
    let of = gated(chain)?;
    let (gate, conversion) = (&chain[1], chain.get(2)?);
    if !(gate.is_private && matches!(conversion.site, Site::ToE4m3(_))) {
        return None;
    }
    let bindings = Bindings::to_operands_of(&[0, 2]).with("out", Operand::Value(2));
    implementation(
        "fp8 gemm+gate to E4M3",
        3,
        bindings,
        tiles(&of, true, machine),
    )
}

/// Returns the GEMM of a linear layer; its tile is arbitrary.
fn product(site: &Site) -> Option<GemmWgmma> {
    let &Site::ScaledLinear {
        n,
        k,
        dtype,
        epilogue,
    } = site
    else {
        return None;
    };
    Some(GemmWgmma {
        n,
        k,
        dtype,
        epilogue,
        gated: false,
        tile: WgmmaTile::CANDIDATES[0],
    })
}

/// Returns the GEMM of a linear layer whose only reader is a gate, fused with the gate; its tile is arbitrary.
fn gated(chain: &[Link]) -> Option<GemmWgmma> {
    let [linear, gate, ..] = chain else {
        return None;
    };
    let (mut of, Site::Gate(gate)) = (product(&linear.site)?, &gate.site) else {
        return None;
    };
    let serves = linear.is_private && of.epilogue.activation.is_none() && of.n == 2 * gate.width;
    serves.then(|| {
        of.n = gate.width;
        of.gated = true;
        of.epilogue.activation = Some(gate.activation);
        of
    })
}

fn tiles(of: &GemmWgmma, to_e4m3: bool, machine: &Machine) -> Vec<Candidate> {
    let function = GemmFp8 {
        of: of.clone(),
        to_e4m3,
    };
    let few_rows = GemmStreamFp8::tiles(&function, machine.instructions).into_iter();
    let kernels = GemmFp8::tiles(of, to_e4m3, machine.instructions).into_iter();
    let kernels = kernels.map(Candidate::new);
    kernels.chain(few_rows.map(Candidate::new)).collect()
}

/// Returns an implementation that covers the first `sites` sites with a single launch at the last of them.
fn implementation(
    name: &'static str,
    sites: usize,
    bindings: Bindings,
    candidates: Vec<Candidate>,
) -> Option<Implementation> {
    (!candidates.is_empty()).then(|| Implementation {
        name,
        sites,
        launches: vec![Launch {
            site: sites - 1,
            bindings,
            candidates,
        }],
        saved: 0.0,
    })
}
