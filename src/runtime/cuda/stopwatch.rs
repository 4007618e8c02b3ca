//! Times launches on a device: between CUDA events, around a CUDA graph, over operands that rotate.

use std::{sync::Arc, time::Instant};

use cudarc::driver::{CudaStream, result, sys};
use rayon::prelude::*;

use super::{
    device::Device,
    error::{CudaError, During},
    graphs::capture,
    memory::Buffer,
    model::{Loaded, Start},
    session::Timing,
    watch::Watch,
};
use crate::{
    jit::Cubin,
    kernels::{
        Fill, HostTensor, Tolerance,
        chain::Chain,
        trial::{Difference, normal, uniform},
    },
    plan::ALIGNMENT,
    runtime::weights::{decode, encode},
    tensor::{DType, Extents},
};

/// Operands rotate over sets of at least so many bytes together, so that they leave the L2 cache
/// (50 MB on an H200) before they are read again.
const ROTATED_BYTES: u64 = 300_000_000;
/// Where a set is so small that it would take more sets than this, its weights stay in L2 in part.
const MOST_SETS: u64 = 64;
/// A graph has so many launches or more, that what lies between two graphs does not show;
const LAUNCHES: u64 = 64;
/// unless they take longer than so many milliseconds.
const ENOUGH_MS: f32 = 2.0;
/// Milliseconds of launches before the first that counts: clocks rise from idle.
const WARM_UP_MS: f32 = 10.0;
/// Timed replays, of which the median counts.
pub(super) const REPLAYS: usize = 20;
/// Random values of a large tensor come again after so many.
const PERIOD: usize = 1 << 24;

/// Times launches on a stream of its own.
pub struct Stopwatch {
    device: Device,
    stream: Arc<CudaStream>,
    replays: usize,
    /// Times the best one's time from which on a chain is not timed further.
    hopeless: f64,
    /// How the launches of a race begin.
    start: Start,
}

/// How long a chain is timed.
struct Patience {
    replays: usize,
    warm_up_ms: f32,
    /// Chains that take longer in their first two replays have no more of them.
    most_us: f64,
}

/// How a chain of launches did.
#[derive(Clone, Copy, Debug)]
pub struct Lap {
    /// Microseconds of the whole chain: the median of the graph's replays over its passes.
    pub us: f64,
    /// From the first chain's result; `None` for the first. Of large results the first
    /// 16,777,216 elements are compared.
    pub difference: Option<Difference>,
}

impl Stopwatch {
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let stream = device
            .context()
            .new_stream()
            .during(|| "make a stream".into())?;
        Ok(Self {
            start: Start::Plain,
            device: device.clone(),
            stream,
            replays: REPLAYS,
            hopeless: f64::INFINITY,
        })
    }

    /// The median of so many replays, for races that are many.
    pub fn with_replays(mut self, replays: usize) -> Self {
        self.replays = replays;
        self
    }

    /// Chains that take so many times the time of the best one before them get no more than two replays
    /// and a short warm-up: what they took is then known less well, and that they are slower is.
    pub fn giving_up(mut self, hopeless: f64) -> Self {
        self.hopeless = hopeless;
        self
    }

    /// Launches begin as those of a run do: on cards that can, while the one before still runs. That
    /// decides between small kernels. What a kernel reads before it waits (weights, batch data) no
    /// launch of a race writes.
    pub fn starting_as_in_a_run(mut self) -> Result<Self, CudaError> {
        if self.device.target()?.has_dependent_launch() {
            self.start = Start::Early;
        }
        Ok(self)
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Times chains that compute the same thing on sequences of these lengths, each with the code
    /// of its launches, and compares their results with the first chain's. `rows` is what row
    /// kernels and GEMMs run over: the tokens, if it is `None`.
    pub fn race(
        &self,
        lens: &[u32],
        rows: Option<u64>,
        chains: &[(&Chain, Vec<&Cubin>)],
    ) -> Result<Vec<Lap>, CudaError> {
        let batch = Extents::of(lens)?;
        let extents = batch.with_rows(rows.unwrap_or(batch.tokens));
        let mut laps = Vec::new();
        let mut want: Option<Vec<Vec<f32>>> = None;
        let mut kept: Option<(&Chain, Operands)> = None;
        for (chain, cubins) in chains {
            // Making operands takes longer than timing, and most chains have the same.
            let operands = match kept.take() {
                Some((before, operands)) if before.tensors == chain.tensors => {
                    operands.forget(&self.stream, chain)?;
                    operands
                }
                _ => Operands::new(self, chain, lens, &extents)?,
            };
            let loaded = chain
                .launches
                .iter()
                .zip(cubins)
                .map(|(launch, cubin)| Loaded::new(&self.device, &launch.kernel, cubin))
                .collect::<Result<Vec<_>, _>>()?;
            let best = laps.iter().map(|lap: &Lap| lap.us);
            let effort = Patience {
                replays: self.replays,
                // Of the first, as its operands were just made, and the device was idle.
                warm_up_ms: match laps.is_empty() || self.hopeless.is_infinite() {
                    true => WARM_UP_MS,
                    false => WARM_UP_MS / 5.0,
                },
                most_us: self.hopeless * best.fold(f64::INFINITY, f64::min),
            };
            let us = self.time_with(effort, operands.n_sets, |set| {
                for (launch, loaded) in chain.launches.iter().zip(&loaded) {
                    let at = |&tensor: &usize| operands.at(set, tensor);
                    let pointers: Vec<_> = launch.operands.iter().map(at).collect();
                    // SAFETY: every set has room for the chain's tensors at these extents, and
                    // nothing else uses them.
                    unsafe {
                        let stream = self.stream.cu_stream();
                        loaded.launch(stream, &extents, &pointers, "race", self.start)?;
                    }
                }
                Ok(())
            })?;
            let got = chain
                .results
                .iter()
                .map(|&tensor| operands.download(tensor))
                .collect::<Result<Vec<_>, _>>()?;
            let difference = match (&want, chain.last()) {
                (Some(want), Some(kernel)) => {
                    let tolerance = of_two_results(kernel.tolerance());
                    got.iter()
                        .zip(want)
                        .map(|(got, want)| tolerance.compare(got, want))
                        .max_by(|a, b| a.worst.total_cmp(&b.worst))
                }
                _ => None,
            };
            laps.push(Lap { us, difference });
            want.get_or_insert(got);
            kept = Some((chain, operands));
        }
        Ok(laps)
    }

    /// Microseconds of one call of `launch`, which launches on one of `n_sets` sets of operands.
    pub(super) fn time(
        &self,
        n_sets: u64,
        replays: usize,
        launch: impl Fn(u64) -> Result<(), CudaError>,
    ) -> Result<f64, CudaError> {
        let patience = Patience {
            replays,
            warm_up_ms: WARM_UP_MS,
            most_us: f64::INFINITY,
        };
        self.time_with(patience, n_sets, launch)
    }

    fn time_with(
        &self,
        patience: Patience,
        n_sets: u64,
        launch: impl Fn(u64) -> Result<(), CudaError>,
    ) -> Result<f64, CudaError> {
        // Once outside the graph: code is loaded at the first launch, which a capture may refuse.
        launch(0)?;
        self.synchronize()?;
        let began = Instant::now();
        launch(1 % n_sets)?;
        self.synchronize()?;
        let most = (ENOUGH_MS / (began.elapsed().as_secs_f32() * 1e3)).ceil() as u64;
        let n_launches = n_sets * most.clamp(1, LAUNCHES).div_ceil(n_sets);
        // Whatever cuBLASLt does beside launching is no part of the graph.
        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let graph = capture(&self.stream, relaxed, || {
            (0..n_launches).try_for_each(|i| launch(i % n_sets))
        })?;
        let watch = Watch::new(&self.device, &self.stream)?;
        let replay = || graph.launch().during(|| "launch a graph".into());
        let mut timing = Timing::default();
        let mut warmed_ms = 0.0;
        let us = |ms: f32| f64::from(ms) * 1e3 / n_launches as f64;
        while timing.ms.len() < patience.replays {
            // One replay before the timed one, so that the device is busy while the host hands
            // it the start event and the graph: that takes as long as several small GEMMs.
            replay()?;
            let ms = watch.lap(replay)?;
            if warmed_ms < patience.warm_up_ms {
                // At least a microsecond, so that this ends.
                warmed_ms += 2.0 * ms.max(1e-3);
            } else {
                timing.ms.push(ms);
                if timing.ms.len() == 2 && timing.ms.iter().all(|&ms| us(ms) > patience.most_us) {
                    break;
                }
            }
        }
        Ok(us(timing.median()))
    }

    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        self.stream
            .synchronize()
            .during(|| "wait for the stream".into())
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        // Memory must not be freed under a running kernel.
        let _ = self.stream.synchronize();
    }
}

/// The tensors of a chain on the device, several times over, with equal values.
struct Operands {
    arena: Buffer,
    n_sets: u64,
    set_bytes: u64,
    /// By tensor: offset in a set, bytes, element type.
    tensors: Vec<(u64, u64, DType)>,
}

impl Operands {
    fn new(
        stopwatch: &Stopwatch,
        chain: &Chain,
        lens: &[u32],
        extents: &Extents,
    ) -> Result<Self, CudaError> {
        let mut tensors = Vec::new();
        let mut set_bytes = 0u64;
        for tensor in &chain.tensors {
            let elements = tensor.shape.elements().eval(extents);
            let bytes = elements.and_then(|n| n.checked_mul(tensor.dtype.bytes()));
            let end = bytes.and_then(|b| set_bytes.checked_add(b.next_multiple_of(ALIGNMENT)));
            let (Some(bytes), Some(end)) = (bytes, end) else {
                return Err(CudaError::TooLarge {
                    step: tensor.name.to_owned(),
                    what: tensor.shape.to_string(),
                    value: u64::MAX,
                    limit: u64::MAX,
                });
            };
            tensors.push((set_bytes, bytes, tensor.dtype));
            set_bytes = end;
        }
        let n_sets = rotated_sets(set_bytes);
        let device = &stopwatch.device;
        let bytes = n_sets.saturating_mul(set_bytes);
        let arena = Buffer::new(device, bytes, "the operands of a race")?;
        let stream = stopwatch.stream.cu_stream();
        let during = || "fill the operands".to_owned();
        // NaN in every real type, so that what a kernel leaves out is found.
        // SAFETY: the arena has this size.
        unsafe { result::memset_d8_async(arena.start(), 0xff, bytes as usize, stream) }
            .during(during)?;
        for (tensor, &(offset, bytes, dtype)) in chain.tensors.iter().zip(&tensors) {
            let Some(fill) = tensor.fill else { continue };
            let n = (bytes / dtype.bytes()) as usize;
            let encoded = values(fill, dtype, n, lens, tensor.name);
            let mut done = 0;
            while done < bytes {
                let piece = (bytes - done).min(encoded.len() as u64);
                let at = arena.start() + offset + done;
                // SAFETY: the first set has room for the tensor, and the copy has been made when
                // the call returns.
                unsafe { result::memcpy_htod_sync(at, &encoded[..piece as usize]) }
                    .during(during)?;
                done += piece;
            }
        }
        stopwatch.synchronize()?;
        for set in 1..n_sets {
            let to = arena.start() + set * set_bytes;
            // SAFETY: both sets are inside the arena and do not overlap.
            unsafe { result::memcpy_dtod_async(to, arena.start(), set_bytes as usize, stream) }
                .during(during)?;
        }
        stopwatch.synchronize()?;
        Ok(Self {
            arena,
            n_sets,
            set_bytes,
            tensors,
        })
    }

    /// Overwrites what the launches of a chain wrote with NaN, in the set that is looked at.
    fn forget(&self, stream: &CudaStream, chain: &Chain) -> Result<(), CudaError> {
        for (tensor, of_chain) in chain.tensors.iter().enumerate() {
            if of_chain.fill.is_none() {
                let at = self.at(self.n_sets - 1, tensor);
                let bytes = self.tensors[tensor].1 as usize;
                // SAFETY: the set has room for the tensor.
                unsafe { result::memset_d8_async(at, 0xff, bytes, stream.cu_stream()) }
                    .during(|| "overwrite a result".into())?;
            }
        }
        Ok(())
    }

    fn at(&self, set: u64, tensor: usize) -> sys::CUdeviceptr {
        self.arena.start() + set * self.set_bytes + self.tensors[tensor].0
    }

    /// The last set's tensor, or its first [`PERIOD`] elements.
    fn download(&self, tensor: usize) -> Result<Vec<f32>, CudaError> {
        let (_, bytes, dtype) = self.tensors[tensor];
        let most = PERIOD as u64 * dtype.bytes();
        download(self.at(self.n_sets - 1, tensor), bytes.min(most), dtype)
    }
}

/// How many sets of so many bytes are rotated over.
pub(super) fn rotated_sets(bytes: u64) -> u64 {
    ROTATED_BYTES.div_ceil(bytes.max(1)).clamp(2, MOST_SETS)
}

/// What a tensor of `n` elements holds, or as much of it as is repeated. The same for the same
/// name and size.
fn values(fill: Fill, dtype: DType, n: usize, lens: &[u32], name: &str) -> Vec<u8> {
    let seed = name.bytes().fold(n as u64, |seed, byte| {
        let mut state = seed ^ u64::from(byte);
        uniform(&mut state)
    });
    match fill {
        Fill::Normal { mean, deviation } => {
            let mut values = random(n.min(PERIOD), deviation, seed);
            values.par_iter_mut().for_each(|v| *v += mean);
            encode(&values, dtype)
        }
        _ => {
            let mut state = seed;
            match fill.make(dtype, n, lens, &mut state) {
                HostTensor::Index(values) if dtype == DType::I64 => {
                    values.iter().flat_map(|v| v.to_le_bytes()).collect()
                }
                HostTensor::Index(values) => values
                    .iter()
                    .flat_map(|&v| (v as i32).to_le_bytes())
                    .collect(),
                HostTensor::Real(values) => encode(&values, dtype),
            }
        }
    }
}

pub(super) fn download(
    at: sys::CUdeviceptr,
    bytes: u64,
    dtype: DType,
) -> Result<Vec<f32>, CudaError> {
    let mut raw = vec![0u8; bytes as usize];
    // SAFETY: the caller passes memory of this size.
    unsafe { result::memcpy_dtoh_sync(&mut raw, at) }.during(|| "download a result".into())?;
    Ok(decode(&raw, dtype))
}

/// Normal values, the same for the same seed.
pub(super) fn random(n: usize, deviation: f32, seed: u64) -> Vec<f32> {
    const PIECE: usize = 1 << 16;
    let mut values = vec![0.0; n];
    values
        .par_chunks_mut(PIECE)
        .enumerate()
        .for_each(|(piece, values)| {
            let mut state = (seed << 32) | piece as u64;
            // Neighbouring states give overlapping series; a draw spreads them.
            state = uniform(&mut state);
            values.fill_with(|| deviation * normal(&mut state));
        });
    values
}

/// A kernel's tolerance is from an exact reference; here both results have sums in f32.
pub(super) fn of_two_results(tolerance: Tolerance) -> Tolerance {
    Tolerance {
        absolute: 2.0 * tolerance.absolute,
        relative: 2.0 * tolerance.relative,
        ..tolerance
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_operands_are_reproducible_and_pieces_differ() {
        let values = random(1 << 17, 1.0, 3);
        assert_eq!(values, random(1 << 17, 1.0, 3));
        assert_ne!(values[..1 << 16], values[1 << 16..]);
        assert_ne!(values, random(1 << 17, 1.0, 4));
        assert!(values.iter().filter(|v| **v == 0.0).count() < 16);
    }

    #[test]
    fn a_tensor_holds_the_same_in_every_chain_and_another_holds_something_else() {
        let of = |name| values(Fill::ACTIVATION, DType::F16, 1000, &[10], name);
        assert_eq!(of("x"), of("x"));
        assert_ne!(of("x"), of("residual"));
        assert_eq!(of("x").len(), 2000);
    }
}
