use std::borrow::Cow;

use super::*;
use crate::{
    graph::Op,
    kernels::{Fill, Role},
    ops::BatchInput,
    program::check_kernel,
    select::{
        Chain, Site,
        testing::{attended, encoder, in_fp8, pre_norm, sandwich, with_weights_in, writer},
    },
    tensor::{DType, Element, Format},
};

/// Returns the names of the operands of a site's node.
fn slots(site: &Site) -> Vec<Cow<'static, str>> {
    match site {
        Site::Linear(problem) => {
            let epilogue = problem.epilogue;
            match problem.is_fp8() {
                true => Op::ScaledLinear { epilogue }.slots(),
                false => Op::Linear { epilogue }.slots(),
            }
        }
        Site::ToE4m3(_) => Op::ToE4m3.slots(),
        Site::RmsNorm(norm) => {
            let op = Op::RmsNorm {
                eps: norm.eps,
                heads: norm.heads,
                from: norm.from,
                centered: norm.centered,
            };
            op.slots()
        }
        Site::NormSum { .. } => Op::Add.slots(),
        Site::Gate(gate) => Op::Gate(gate.activation).slots(),
        Site::LayerNorm(norm) => Op::LayerNorm { eps: norm.eps }.slots(),
        Site::SumLayerNorm(norm) => {
            let (eps, bias) = (norm.eps, norm.bias);
            Op::BiasResidualLayerNorm { eps, bias }.slots()
        }
        Site::Prepare { kernel, .. } => {
            let params = signature(&kernel.clone().into()).into_iter();
            let reads = params.filter(|param| !param.writes && param.meta.is_none());
            reads.map(|param| param.name.into()).collect()
        }
    }
}

/// A parameter other than a count.
#[derive(Debug, PartialEq)]
struct Signature {
    name: &'static str,
    element: Element,
    shape: String,
    writes: bool,
    /// The batch input that the parameter reads, if any.
    meta: Option<BatchInput>,
}

/// Returns the parameters except counts.
fn signature(kernel: &KernelSpec) -> Vec<Signature> {
    let params = kernel.as_kernel().params().into_iter();
    let known = params.filter_map(|param| {
        let (element, shape, writes, meta) = match param.role {
            Role::Read {
                element,
                shape,
                fill,
            } => match fill {
                Fill::BatchInput(meta) => (element, shape, false, Some(meta)),
                _ => (element, shape, false, None),
            },
            Role::Write { element, shape } => (element, shape, true, None),
            Role::Count(_) => return None,
        };
        Some(Signature {
            name: param.name,
            element,
            shape: shape.to_string(),
            writes,
            meta,
        })
    });
    known.collect()
}

fn check(
    chain: &[Link],
    (name, implementation): (&str, &Implementation),
    dtype: DType,
    machine: &Machine,
) {
    assert!((1..=chain.len()).contains(&implementation.sites), "{name}");
    assert!(!implementation.launches.is_empty(), "{name}");
    let mut written: Vec<Operand> = Vec::new();
    let mut before = 0;
    for launch in &implementation.launches {
        assert!(!launch.candidates.is_empty(), "{name} on {}", machine.name);
        assert!(
            launch.site >= before && launch.site < implementation.sites,
            "{name}"
        );
        before = launch.site;
        let first = signature(&launch.candidates[0].kernel);
        let bindings = &launch.bindings;
        assert!(
            bindings
                .operands_of
                .iter()
                .all(|&site| site < implementation.sites)
        );
        let (writes, reads): (Vec<_>, Vec<_>) = first.iter().partition(|param| param.writes);
        assert!(!writes.is_empty() && first.iter().map(|param| param.writes).is_sorted());
        for param in reads.iter().filter(|param| param.meta.is_none()) {
            let is_operand = bindings.operands_of.iter().any(|&site| {
                slots(&chain[site].site)
                    .iter()
                    .any(|slot| slot == param.name)
            });
            match bindings.value(param.name) {
                Some(Operand::Input { site, name: input }) => assert!(
                    slots(&chain[site].site).iter().any(|slot| slot == input),
                    "{name}: site {site} has no operand `{input}`"
                ),
                Some(own) => assert!(written.contains(&own), "{name}: {own:?} is read first"),
                None => assert!(is_operand, "{name}: no operand is called `{}`", param.name),
            }
        }
        for param in &writes {
            let value = bindings.value(param.name).expect("what it writes is bound");
            assert!(!written.contains(&value), "{name}: {value:?} twice");
            written.push(value);
        }
        for (bound, _) in &bindings.values {
            assert!(
                first.iter().any(|param| param.name == *bound),
                "{name}: `{bound}`"
            );
        }
        for (at, candidate) in launch.candidates.iter().enumerate() {
            let kernel = &candidate.kernel;
            let symbol = kernel.as_kernel().symbol();
            check_kernel(kernel.as_kernel(), dtype)
                .unwrap_or_else(|problem| panic!("{symbol}: {problem}"));
            // All candidates of a launch have the same parameters.
            assert_eq!(signature(kernel), first, "{symbol}");
            let needed = kernel.as_kernel().instructions();
            assert!(machine.instructions.includes(needed), "{symbol}");
            assert!(candidate.max_rows.is_none_or(|most| most > 0), "{symbol}");
            let own = kernel.as_kernel().max_rows();
            let within = own.is_none_or(|own| candidate.max_rows.is_some_and(|most| most <= own));
            assert!(within, "{symbol}: {own:?}, {:?}", candidate.max_rows);
            assert!(
                !launch.candidates[..at].contains(candidate),
                "{symbol} twice"
            );
            // Estimates are positive, possibly infinite.
            let cycles = kernel.as_kernel().cycles(1, machine);
            assert!(
                cycles.is_some_and(|cycles| cycles > 0.0),
                "{symbol}: {cycles:?}"
            );
        }
    }
    // The last value must be stored, and so must every value that another node reads.
    assert!(
        written.contains(&Operand::Value(implementation.sites - 1)),
        "{name}"
    );
    for (site, link) in chain[..implementation.sites].iter().enumerate() {
        assert!(
            link.is_private || written.contains(&Operand::Value(site)),
            "{name}"
        );
    }
}

#[test]
fn candidates_can_be_generated_and_launches_bind_their_parameters() {
    const SHAPES: [(u32, u32); 12] = [
        (768, 3072),
        (384, 1536),
        (1024, 4096),
        (312, 1200),
        (128, 512),
        (256, 1024),
        (2048, 8192),
        (72, 200),
        (33, 7),
        (8, 8),
        (1, 1),
        (12_296, 65_544),
    ];
    let mut names = std::collections::BTreeMap::<&str, usize>::new();
    for machine in Machine::all().expect("the cards are described") {
        for (width, inner) in SHAPES {
            for dtype in [DType::F16, DType::BF16, DType::F32] {
                let mut chains = vec![
                    encoder(width, inner, dtype),
                    pre_norm(width, inner, dtype),
                    writer(width, inner, dtype),
                    sandwich(width, inner, dtype),
                    attended(width, dtype),
                ];
                let has_fp8 = machine.has_e4m3_products() && dtype.has_mma();
                if has_fp8 && width % 16 == 0 && inner % 16 == 0 {
                    chains.extend([
                        in_fp8(encoder(width, inner, dtype)),
                        in_fp8(writer(width, inner, dtype)),
                        in_fp8(attended(width, dtype)),
                    ]);
                }
                let formats = [Format::FP8, Format::FP8_128, Format::INT8, Format::INT4];
                for format in formats.into_iter().filter(|_| dtype.has_mma()) {
                    chains.extend([
                        with_weights_in(format, encoder(width, inner, dtype)),
                        with_weights_in(format, writer(width, inner, dtype)),
                        with_weights_in(format, attended(width, dtype)),
                    ]);
                }
                for (Chain { links, .. }, _) in chains.iter().flatten() {
                    for from in 0..links.len() {
                        let chain = &links[from..];
                        let all = implementations(chain, machine);
                        for (rule, found) in &all {
                            check(chain, (rule, found), dtype, machine);
                            *names.entry(rule).or_default() += 1;
                        }
                        // For every shape, each site can be computed separately by some implementation.
                        let alone = all.into_iter().map(|(_, i)| i).filter(|i| i.sites == 1);
                        let mut every = alone.flat_map(|i| i.launches).flat_map(|l| l.candidates);
                        let name = &machine.name;
                        assert!(
                            every.any(|c| c.max_rows.is_none()),
                            "{name}: {:?} for any rows",
                            chain[0].site
                        );
                    }
                }
            }
        }
    }
    assert!(names.remove("unpacked weight").is_some_and(|n| n > 0));
    assert_eq!(names.len(), ALL.len(), "{names:?}");
}

#[test]
fn fused_implementations_reject_a_value_with_other_readers_and_a_second_bias() {
    let machine = crate::machine::testing::hopper();
    let mut chain = encoder(768, 3072, DType::F16).remove(1).0.links;
    let fused = |chain: &[Link]| -> Vec<&'static str> {
        let fuses =
            |rule: &&Rule| (rule.implement)(chain, &machine).is_ok_and(|found| found.sites > 1);
        ALL.iter().filter(fuses).map(|rule| rule.name).collect()
    };
    assert_eq!(fused(&chain), ["gemm+norm", "deferred norm"]);
    // Another node also reads the linear layer's value, but no fused launch stores it.
    chain[0].is_private = false;
    assert!(fused(&chain).is_empty());
    chain[0].is_private = true;
    // The linear layer has a bias, which these launches cannot add.
    if let Site::Linear(problem) = &mut chain[0].site {
        problem.epilogue.bias = true;
    }
    assert!(fused(&chain).is_empty());
    // Another node also reads the norm that is added to the residual stream.
    let mut chain = sandwich(768, 3072, DType::F16)
        .remove(0)
        .0
        .links
        .split_off(1);
    assert_eq!(fused(&chain), ["norm+sum+norm"]);
    chain[0].is_private = false;
    assert!(fused(&chain).is_empty());
    // Another node also reads the rows from which attention's operands are computed.
    let mut chain = attended(768, DType::F16).remove(0).0.links;
    assert_eq!(fused(&chain), ["gemm+prepare attention"]);
    if let Site::Prepare { is_alone, .. } = &mut chain[1].site {
        *is_alone = false;
    }
    assert!(fused(&chain).is_empty());
}
