use std::{collections::HashMap, path::PathBuf, process::ExitCode, str::FromStr};

use gemmule::{
    DType, DeviceChoice,
    cli::{Bars, Outcome, align_right, print, say, table, write_json},
    engine::emit,
    jit::{Cubin, Jit},
    kernels::{
        KernelSpec,
        gemm::{Gemm, GemmProblem},
    },
    ops::{Activation, Epilogue},
    runtime::cuda::{Device, GemmBenchmark, Measurement, Provider},
    select::{Site, candidates},
    tensor::Extents,
};
use miette::{IntoDiagnostic, Report, miette};
use serde::Serialize;

use crate::launched::Launched;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// CUDA device
    #[arg(long, default_value = "cuda:0")]
    device: DeviceChoice,
    /// Numbers of rows of the input x and of the result: the tokens of a batch
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "10,40,128,500,1229,4915",
        value_parser = clap::value_parser!(u64).range(1..=Extents::MAX_TOKENS)
    )]
    rows: Vec<u64>,
    /// Sizes of the weight, as outputs x inputs
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "NxK",
        default_value = "2304x768,768x768,3072x768,768x3072"
    )]
    sizes: Vec<WeightSize>,
    #[arg(long, default_value = "f16")]
    dtype: DType,
    /// Epilogue of our kernels; cuBLASLt computes only the product
    #[arg(long, value_enum, default_value_t = EpilogueChoice::None)]
    epilogue: EpilogueChoice,
    /// Time every candidate kernel that supports the number of rows, not only the kernel that the cost model selects
    #[arg(long)]
    all_tiles: bool,
    /// Write a JSON file with one row per GEMM and kernel
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum EpilogueChoice {
    None,
    Bias,
    #[value(name = "bias_gelu")]
    BiasGelu,
}

impl From<EpilogueChoice> for Epilogue {
    fn from(choice: EpilogueChoice) -> Self {
        Self::new(
            !matches!(choice, EpilogueChoice::None),
            matches!(choice, EpilogueChoice::BiasGelu).then_some(Activation::GeluExact),
        )
    }
}

/// A weight with `n` outputs and `k` inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WeightSize {
    n: u32,
    k: u32,
}

#[derive(Debug, thiserror::Error)]
#[error(
    "`{0}` is not the size of a weight; expected outputs x inputs, each from 1 to 65536, such as 3072x768"
)]
struct NoWeightSize(String);

impl FromStr for WeightSize {
    type Err = NoWeightSize;

    fn from_str(text: &str) -> Result<Self, NoWeightSize> {
        let side = |text: &str| text.parse().ok().filter(|n| (1..=65536).contains(n));
        text.split_once('x')
            .and_then(|(n, k)| Some((side(n)?, side(k)?)))
            .map(|(n, k)| Self { n, k })
            .ok_or_else(|| NoWeightSize(text.to_owned()))
    }
}

#[derive(Serialize)]
struct Row {
    rows: u64,
    n: u32,
    k: u32,
    dtype: &'static str,
    /// Symbol of a kernel, or `cublasLt`.
    who: String,
    /// Whether a model launches this kernel for the problem, according to the cost model alone.
    picked: bool,
    us: f64,
    tflops: f64,
    /// Time of cuBLASLt divided by the time of this kernel. Above 1, this kernel is faster.
    ratio_to_cublas_lt: Option<f64>,
    max_difference: Option<f32>,
    agrees: Option<bool>,
}

pub(crate) fn run(args: Args) -> Outcome {
    let DeviceChoice::Cuda(ordinal) = args.device else {
        return Err(miette!(
            "GEMMs can only be timed on a CUDA device; use --device cuda:N"
        ));
    };
    let device = Device::open(ordinal).into_diagnostic()?;
    let target = device.target().into_diagnostic()?;
    let (machine, _) = device.info().machine().into_diagnostic()?;
    let launched = Launched::new(machine, None);
    let problems: Vec<(u64, Gemm, Vec<KernelSpec>)> = args
        .sizes
        .iter()
        .flat_map(|&size| args.rows.iter().map(move |&rows| (size, rows)))
        .map(|(size, rows)| {
            let (gemm, kernels) = kernels(size, rows, &launched, &args)?;
            Ok((rows, gemm, kernels))
        })
        .collect::<Result<_, Report>>()?;
    let mut specs: Vec<KernelSpec> = problems
        .iter()
        .flat_map(|(_, _, kernels)| kernels.iter().cloned())
        .collect();
    specs.sort_by_cached_key(|spec| spec.as_kernel().symbol());
    specs.dedup();
    let bars = Bars::new();
    let cubins = Jit::open()
        .into_diagnostic()?
        .compile_all(&emit(&specs)?, target, &|done, total| {
            bars.show("kernels", done, total)
        })
        .into_diagnostic()?;
    let by_symbol: HashMap<&str, &Cubin> = cubins.iter().map(|c| (c.symbol.as_str(), c)).collect();
    let benchmark = GemmBenchmark::new(&device).into_diagnostic()?;

    let mut rows = Vec::new();
    for (i, (n_rows, gemm, kernels)) in problems.iter().enumerate() {
        let with_code: Vec<_> = kernels
            .iter()
            .map(|kernel| {
                (
                    kernel.clone(),
                    by_symbol[kernel.as_kernel().symbol().as_str()],
                )
            })
            .collect();
        let timed = benchmark.run(*n_rows, gemm, &with_code).into_diagnostic()?;
        rows.extend(rows_of(*n_rows, gemm, &kernels[0], &timed));
        bars.show("GEMMs", i + 1, problems.len());
    }
    show(&rows, &args, &device, benchmark.has_cublas_lt())?;
    if let Some(file) = &args.json {
        write_json(file, &rows)?;
    }
    Ok(if rows.iter().any(|r| r.agrees == Some(false)) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Returns the GEMM, and the kernels that are timed for it. The first is the kernel that a model launches according to the cost model.
fn kernels(
    size: WeightSize,
    rows: u64,
    launched: &Launched,
    args: &Args,
) -> Result<(Gemm, Vec<KernelSpec>), Report> {
    let WeightSize { n, k } = size;
    let (dtype, epilogue) = (args.dtype, args.epilogue.into());
    let site = Site::Linear(GemmProblem::new(n, k, dtype, epilogue));
    let picked = launched.kernel(&site, rows)?;
    let mut kernels = vec![picked.clone()];
    if args.all_tiles {
        let serves = |kernel: &KernelSpec| {
            let most = kernel.as_kernel().max_rows();
            most.is_none_or(|most| rows <= most)
        };
        let others = candidates(&site, &launched.machine).into_iter();
        kernels.extend(others.filter(|kernel| serves(kernel) && *kernel != picked));
    }
    Ok((Gemm::of(n, k, dtype, epilogue), kernels))
}

/// Returns the measurements of one problem.
fn rows_of(n_rows: u64, shape: &Gemm, picked: &KernelSpec, timed: &[Measurement]) -> Vec<Row> {
    let library = timed
        .iter()
        .find(|t| matches!(t.provider, Provider::CublasLt { .. }))
        .map(|t| t.us);
    let operations = 2.0 * n_rows as f64 * f64::from(shape.problem.n) * f64::from(shape.problem.k);
    timed
        .iter()
        .map(|t| Row {
            rows: n_rows,
            n: shape.problem.n,
            k: shape.problem.k,
            dtype: shape.problem.dtype.name(),
            who: match &t.provider {
                Provider::Kernel(kernel) => kernel.as_kernel().symbol(),
                Provider::CublasLt { .. } => "cublasLt".to_owned(),
            },
            picked: matches!(&t.provider, Provider::Kernel(kernel) if kernel == picked),
            us: t.us,
            tflops: operations / t.us / 1e6,
            ratio_to_cublas_lt: library.map(|us| us / t.us),
            max_difference: t.difference.map(|d| d.max),
            agrees: t.difference.map(|d| d.worst <= 1.0),
        })
        .collect()
}

fn show(rows: &[Row], args: &Args, device: &Device, has_library: bool) -> Result<(), Report> {
    let mut shown = table(&[
        "rows", "n", "k", "who", "us", "TFLOP/s", "ratio", "max diff", "",
    ]);
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "—".to_owned());
    for row in rows {
        let mark = match (row.agrees, row.picked) {
            (Some(false), _) => "differs",
            (_, true) => "picked",
            _ => "",
        };
        shown.add_row([
            row.rows.to_string(),
            row.n.to_string(),
            row.k.to_string(),
            row.who.clone(),
            format!("{:.2}", row.us),
            format!("{:.1}", row.tflops),
            or_dash(row.ratio_to_cublas_lt.map(|s| format!("{s:.2}"))),
            or_dash(row.max_difference.map(|d| format!("{d:.1e}"))),
            mark.to_owned(),
        ]);
    }
    align_right(&mut shown, [0, 1, 2, 4, 5, 6, 7]);
    print(&format!(
        "{shown}\n{}, {}; median of 20 replays of a CUDA graph whose launches rotate over operands; the ratio is the speed relative to cuBLASLt's fastest algorithm, which has no epilogue; — means that there is no result of cuBLASLt\n",
        device.info().name,
        args.dtype
    ))?;
    if !has_library {
        say(
            "cuBLASLt is not in the loader's path: no times were compared and no results were checked; add its folder to LD_LIBRARY_PATH",
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_outputs_by_inputs() {
        let size = "3072x768".parse::<WeightSize>().unwrap();
        assert_eq!(size, WeightSize { n: 3072, k: 768 });
        for wrong in [
            "",
            "x",
            "3072",
            "0x768",
            "768x0",
            "65537x1",
            "3072x768x2",
            "-1x4",
        ] {
            assert!(wrong.parse::<WeightSize>().is_err(), "{wrong}");
        }
    }

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn all_tiles_are_the_picked_one_and_every_other_that_serves_the_rows() {
        use clap::Parser;
        use gemmule::machine::Machine;
        let launched = [Machine::usual(), Machine::named("h200")]
            .map(|machine| Launched::new(machine.unwrap(), None));
        let args = |words: &[&str]| Cli::parse_from([&["gemm"], words].concat()).args;
        let size = WeightSize { n: 768, k: 768 };
        for launched in &launched {
            let of = |rows, words: &[&str]| kernels(size, rows, launched, &args(words)).unwrap().1;
            let few = of(10, &["--all-tiles"]);
            let many = of(4915, &["--all-tiles"]);
            assert_eq!(of(4915, &[]), many[..1]);
            assert!(many.len() > 5 && !many[1..].contains(&many[0]));
            assert!(few.len() >= many.len());
            let most = |kernel: &KernelSpec| kernel.as_kernel().max_rows();
            assert!(many.iter().all(|k| most(k).is_none_or(|most| most >= 4915)));
        }
    }

    #[test]
    fn the_ratio_is_the_time_of_cublas_lt_over_ours() {
        let gemm = Gemm::of(2048, 1024, DType::F16, Epilogue::default());
        let kernel = KernelSpec::from(gemm.clone());
        let timed = |provider, us| Measurement {
            provider,
            us,
            difference: None,
        };
        let rows = rows_of(
            512,
            &gemm,
            &kernel,
            &[
                timed(Provider::CublasLt { n_algorithms: 4 }, 8.0),
                timed(Provider::Kernel(kernel.clone()), 16.0),
            ],
        );
        assert_eq!(rows[0].ratio_to_cublas_lt, Some(1.0));
        assert_eq!(rows[1].ratio_to_cublas_lt, Some(0.5));
        assert!(rows[1].picked && !rows[0].picked);
        // 2·512·2048·1024 operations in 16 µs.
        assert!((rows[1].tflops - 134.217_728).abs() < 1e-9);
    }
}
