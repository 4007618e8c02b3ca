//! Times launches with CUDA events around replays of a CUDA graph. The launches rotate over sets of operands.

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
        Case, Fill, HostTensor, Tolerance,
        chain::Chain,
        trial::{Difference, normal, uniform},
    },
    plan::ALIGNMENT,
    runtime::{decode_values, encode_tensor},
    tensor::{Element, Extents, Shape},
};

/// Minimum total size of all sets of operands in bytes: more than twice the largest L2 cache in `machines/`, so that a set is evicted
/// before a launch reads it again.
const ROTATED_BYTES: u64 = 300_000_000;
/// Maximum number of sets of operands. In the smallest problems, the sets therefore stay partly in L2.
const MOST_SETS: u64 = 64;
/// Minimum number of launches in a graph. With this number of launches, the gap between two graphs is negligible. A graph that takes longer
/// than [`ENOUGH_MS`] may have fewer launches.
const LAUNCHES: u64 = 64;
/// Duration of a graph in milliseconds. After a graph of this duration, the gap to the next graph is negligible, whatever the number of
/// launches.
const ENOUGH_MS: f32 = 2.0;
/// Duration in milliseconds of the warm-up replays before the first timed replay. During the warm-up, the clocks ramp up from idle.
const WARM_UP_MS: f32 = 10.0;
/// Number of timed replays, of which the median is reported.
pub(super) const REPLAYS: usize = 20;
/// Period of the random values of a large tensor, in elements.
const PERIOD: usize = 1 << 24;

/// Times launches on its own stream.
pub struct Stopwatch {
    device: Device,
    stream: Arc<CudaStream>,
}

/// Time and accuracy of a chain of launches.
#[derive(Clone, Copy, Debug)]
pub struct Lap {
    /// Time of the whole chain in microseconds: the median time of a replay divided by the number of chains in the graph.
    pub us: f64,
    /// Difference from the result of the first chain; `None` for the first chain. Only the first 16,777,216 elements of each result are
    /// compared.
    pub difference: Option<Difference>,
}

impl Stopwatch {
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let stream = device
            .context()
            .new_stream()
            .during(|| "make a stream".into())?;
        Ok(Self {
            device: device.clone(),
            stream,
        })
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Times chains that compute the same function on the sequences of a case, and compares the results of each chain with the results of
    /// the first chain. `chains` contains the cubins of each chain's launches.
    pub fn compare(
        &self,
        case: &Case,
        chains: &[(&Chain, Vec<&Cubin>)],
    ) -> Result<Vec<Lap>, CudaError> {
        let extents = case.extents()?;
        let mut laps = Vec::new();
        let mut want: Option<Vec<Vec<f32>>> = None;
        let mut kept: Option<(&Chain, Operands)> = None;
        for (chain, cubins) in chains {
            // Reuse the operands if possible: creating them takes longer than timing a chain, and most chains have the same operands.
            let operands = match kept.take() {
                Some((before, operands)) if before.tensors == chain.tensors => {
                    operands.poison_results(&self.stream, chain)?;
                    operands
                }
                _ => Operands::new(self, chain, case, &extents)?,
            };
            let loaded = chain
                .launches
                .iter()
                .zip(cubins)
                .map(|(launch, cubin)| Loaded::new(&self.device, &launch.kernel, cubin))
                .collect::<Result<Vec<_>, _>>()?;
            let us = self.time(operands.n_sets, REPLAYS, |set| {
                for (launch, loaded) in chain.launches.iter().zip(&loaded) {
                    let at = |&tensor: &usize| operands.at(set, tensor);
                    let pointers: Vec<_> = launch.operands.iter().map(at).collect();
                    // SAFETY: every set has room for the chain's tensors at these extents, and nothing else uses them.
                    unsafe {
                        let stream = self.stream.cu_stream();
                        loaded.launch(stream, &extents, &pointers, "benchmark", Start::Plain)?;
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
                    // Two kernels with the same definition may round at different points, so the wider tolerance applies.
                    let first = chains[0].0.last().unwrap_or(kernel);
                    let both = [kernel.tolerance(), first.tolerance()];
                    let [own, firsts] = both.map(of_two_results);
                    let tolerance = match own.absolute < firsts.absolute {
                        true => firsts,
                        false => own,
                    };
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

    /// Returns the time of one call of `launch` in microseconds. `launch` receives the index of one of `n_sets` sets of operands.
    pub(super) fn time(
        &self,
        n_sets: u64,
        replays: usize,
        launch: impl Fn(u64) -> Result<(), CudaError>,
    ) -> Result<f64, CudaError> {
        // The first launch loads code, which a stream capture may reject, so it runs outside the graph.
        launch(0)?;
        self.synchronize()?;
        let began = Instant::now();
        launch(1 % n_sets)?;
        self.synchronize()?;
        let most = (ENOUGH_MS / (began.elapsed().as_secs_f32() * 1e3)).ceil() as u64;
        let n_launches = n_sets * most.clamp(1, LAUNCHES).div_ceil(n_sets);
        // Besides launches, cuBLASLt may make calls that a stricter mode would reject.
        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let graph = capture(&self.stream, relaxed, || {
            (0..n_launches).try_for_each(|i| launch(i % n_sets))
        })?;
        let watch = Watch::new(&self.device, &self.stream)?;
        let replay = || graph.launch().during(|| "launch a graph".into());
        let mut timing = Timing::default();
        let mut warmed_ms = 0.0;
        while timing.ms.len() < replays {
            // An untimed replay keeps the device busy while the host enqueues the start event and the timed graph. Enqueuing takes as long
            // as several small GEMMs.
            replay()?;
            let ms = watch.lap(replay)?;
            if warmed_ms < WARM_UP_MS {
                // Count at least a microsecond, so that the loop ends.
                warmed_ms += 2.0 * ms.max(1e-3);
            } else {
                timing.ms.push(ms);
            }
        }
        Ok(f64::from(timing.median()) * 1e3 / n_launches as f64)
    }

    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        self.stream
            .synchronize()
            .during(|| "wait for the stream".into())
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        // Memory must not be freed while a kernel may use it.
        let _ = self.stream.synchronize();
    }
}

/// Sets of a chain's tensors on the device. All sets hold the same values. Successive launches use different sets, so that operands are not
/// in L2.
struct Operands {
    arena: Buffer,
    n_sets: u64,
    set_bytes: u64,
    /// For each tensor: offset in a set, size in bytes and element type.
    tensors: Vec<(u64, u64, Element)>,
}

impl Operands {
    fn new(
        stopwatch: &Stopwatch,
        chain: &Chain,
        case: &Case,
        extents: &Extents,
    ) -> Result<Self, CudaError> {
        let mut tensors = Vec::new();
        let mut set_bytes = 0u64;
        for tensor in &chain.tensors {
            let bytes =
                dims_of(&tensor.shape, extents).and_then(|dims| tensor.element.tensor_bytes(&dims));
            let end = bytes.and_then(|b| set_bytes.checked_add(b.next_multiple_of(ALIGNMENT)));
            let (Some(bytes), Some(end)) = (bytes, end) else {
                return Err(CudaError::TooLarge {
                    step: tensor.name.to_owned(),
                    what: tensor.shape.to_string(),
                    value: u64::MAX,
                    limit: u64::MAX,
                });
            };
            tensors.push((set_bytes, bytes, tensor.element));
            set_bytes = end;
        }
        let n_sets = rotated_sets(set_bytes);
        let device = &stopwatch.device;
        let bytes = n_sets.saturating_mul(set_bytes);
        let arena = Buffer::new(device, bytes, "the operands of a benchmark")?;
        let stream = stopwatch.stream.cu_stream();
        let during = || "fill the operands".to_owned();
        // All bits set is NaN in every floating-point type, so elements that a kernel does not write are detected.
        // SAFETY: the arena has this size.
        unsafe { result::memset_d8_async(arena.start(), 0xff, bytes as usize, stream) }
            .during(during)?;
        for (tensor, &(offset, bytes, element)) in chain.tensors.iter().zip(&tensors) {
            let Some(fill) = tensor.fill else { continue };
            let encoded = values(
                fill,
                element,
                &dims_of(&tensor.shape, extents).unwrap_or_default(),
                case,
                tensor.name,
            );
            let mut done = 0;
            while done < bytes {
                let piece = (bytes - done).min(encoded.len() as u64);
                let at = arena.start() + offset + done;
                // SAFETY: the first set has room for the tensor, and the copy is complete when the call returns.
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

    /// Fills the result tensors of the last set with NaN. The results of this set are compared with those of other chains, so the
    /// comparison fails if the chain does not write an element.
    fn poison_results(&self, stream: &CudaStream, chain: &Chain) -> Result<(), CudaError> {
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

    /// Downloads a tensor of the last set. If it has more than [`PERIOD`] elements, downloads only the first [`PERIOD`].
    fn download(&self, tensor: usize) -> Result<Vec<f32>, CudaError> {
        let (_, bytes, element) = self.tensors[tensor];
        let max_bytes = PERIOD as u64 * element.bytes();
        download(
            self.at(self.n_sets - 1, tensor),
            bytes.min(max_bytes),
            element,
        )
    }
}

/// Returns the number of sets of operands over which launches rotate. Each set has `bytes` bytes.
pub(super) fn rotated_sets(bytes: u64) -> u64 {
    ROTATED_BYTES.div_ceil(bytes.max(1)).clamp(2, MOST_SETS)
}

/// Returns the dimensions of a tensor; `None` if a dimension does not fit in 64 bits.
fn dims_of(shape: &Shape, extents: &Extents) -> Option<Vec<u64>> {
    shape.0.iter().map(|size| size.eval(extents)).collect()
}

/// Returns the encoded elements of a tensor. For a large tensor, returns only one [`PERIOD`] of the elements, which the caller repeats.
/// Tensors with the same name and size get the same values.
fn values(fill: Fill, element: Element, dims: &[u64], case: &Case, name: &str) -> Vec<u8> {
    let n = dims.iter().product::<u64>() as usize;
    let columns = dims.last().map_or(1, |&n| n as usize);
    let seed = name.bytes().fold(n as u64, |seed, byte| {
        let mut state = seed ^ u64::from(byte);
        uniform(&mut state)
    });
    let tensor = match fill {
        Fill::Normal { mean, deviation } => {
            let period = match element {
                // The scales of a packed matrix follow its values, so its bytes cannot be repeated periodically.
                Element::Scaled(_) => n,
                Element::Value(_) | Element::E4m3 | Element::I8 | Element::I32 | Element::I64 => {
                    n.min(PERIOD)
                }
            };
            let mut values = random(period, deviation, seed);
            values.par_iter_mut().for_each(|v| *v += mean);
            HostTensor::Real(values)
        }
        fill => fill.make(element, n, case, &mut { seed }),
    };
    encode_tensor(&tensor, element, columns)
}

pub(super) fn download(
    at: sys::CUdeviceptr,
    bytes: u64,
    element: Element,
) -> Result<Vec<f32>, CudaError> {
    let mut raw = vec![0u8; bytes as usize];
    // SAFETY: the caller passes memory of this size.
    unsafe { result::memcpy_dtoh_sync(&mut raw, at) }.during(|| "download a result".into())?;
    Ok(decode_values(&raw, element))
}

/// Returns normally distributed values with mean 0. Equal seeds give equal values.
pub(super) fn random(n: usize, deviation: f32, seed: u64) -> Vec<f32> {
    const PIECE: usize = 1 << 16;
    let mut values = vec![0.0; n];
    values
        .par_chunks_mut(PIECE)
        .enumerate()
        .for_each(|(piece, values)| {
            let mut state = (seed << 32) | piece as u64;
            // Adjacent initial states would generate overlapping series. One draw spreads the states.
            state = uniform(&mut state);
            values.fill_with(|| deviation * normal(&mut state));
        });
    values
}

/// Doubles a tolerance, which is the maximum difference between a result and the exact reference. Here, two results are compared with each
/// other, and each may have this difference.
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
    use crate::tensor::DType;

    #[test]
    fn random_operands_are_reproducible_and_pieces_differ() {
        let values = random(1 << 17, 1.0, 3);
        assert_eq!(values, random(1 << 17, 1.0, 3));
        assert_ne!(values[..1 << 16], values[1 << 16..]);
        assert_ne!(values, random(1 << 17, 1.0, 4));
        assert!(values.iter().filter(|v| **v == 0.0).count() < 16);
    }

    #[test]
    fn equal_tensors_have_equal_values_in_every_chain() {
        let of = |name| {
            values(
                Fill::ACTIVATION,
                DType::F16.into(),
                &[1000],
                &Case::new("timed", &[10]),
                name,
            )
        };
        assert_eq!(of("x"), of("x"));
        assert_ne!(of("x"), of("residual"));
        assert_eq!(of("x").len(), 2000);
    }
}
