//! Rotary position embedding (RoPE; Su et al. 2021), which rotates pairs of columns. A pair is one column from each half of the rotated
//! columns of a head.

use serde::{Deserialize, Serialize};

use super::{
    Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance, f32_literal,
    rows::{STREAM_THREADS, count, read, read_meta, rows_by, storage, stream_launch, write},
};
use crate::{
    kernels::limits,
    machine::Machine,
    ops::{BatchInput, Rotation},
    tensor::{DType, Extents, Shape, Symbol},
};

/// `x [tokens, stride]`, `positions [tokens]` → `out [tokens, heads·head]`: rotates each head according to its token's position. The heads
/// are adjacent groups of `head` columns of `x`, starting at column `from`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rotary {
    pub rotation: Rotation,
    /// Columns per head.
    pub head: u32,
    pub from: u32,
    /// Columns of `x`.
    pub stride: u32,
    pub dtype: DType,
}

/// Conversion of a [`Rotation`] to text for symbols and CUDA sources.
pub(super) trait RotationCode {
    /// Returns the FNV-1a hash of the frequencies and the factor, for symbols. The values themselves would be too long.
    fn digest(&self) -> u32;

    /// Returns the frequencies as the elements of a CUDA initializer list.
    fn literals(&self) -> String;
}

impl RotationCode for Rotation {
    fn digest(&self) -> u32 {
        let all = self.frequencies.iter().chain([&self.factor]);
        let bytes = all.flat_map(|f| f.to_bits().to_le_bytes());
        bytes.fold(0x811c_9dc5, |hash: u32, byte| {
            (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
        })
    }

    fn literals(&self) -> String {
        let literals = self.frequencies.iter().map(|&f| f32_literal(f));
        literals.collect::<Vec<_>>().join(", ")
    }
}

impl Rotary {
    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), String> {
        self.rotation.check(self.head)
    }

    fn width(&self) -> u32 {
        self.rotation.heads * self.head
    }

    /// Number of work items (threads) per row. Each rotates a pair or copies an unchanged column.
    fn items(&self) -> u32 {
        self.rotation.heads * (self.head - self.rotation.frequencies.len() as u32)
    }
}

impl Kernel for Rotary {
    facts! { template: "rotary", dtype: self.dtype }

    fn symbol(&self) -> String {
        let view = match (self.from, self.stride) {
            (0, stride) if stride == self.width() => String::new(),
            (from, stride) => format!("_from{from}of{stride}"),
        };
        format!(
            "rotary_{}_h{}x{}{view}_{:08x}",
            self.dtype,
            self.rotation.heads,
            self.head,
            self.rotation.digest()
        )
    }

    fn constants(&self) -> Constants {
        Constants::from([
            ("storage", storage(self.dtype)),
            ("width", self.width().into()),
            ("from", self.from.into()),
            ("stride", self.stride.into()),
            ("head", self.head.into()),
            ("pairs", (self.rotation.frequencies.len() as u64).into()),
            ("items", self.items().into()),
            ("frequencies", self.rotation.literals().into()),
            ("factor", f32_literal(self.rotation.factor).into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        let tokens = Shape::new([Symbol::Tokens.into()]);
        let x = rows_by(Symbol::Tokens, self.stride);
        vec![
            read("x", self.dtype, x, Fill::ACTIVATION),
            read_meta("positions", BatchInput::Positions, tokens),
            write("out", self.dtype, rows_by(Symbol::Tokens, self.width())),
            count(Symbol::Tokens),
        ]
    }

    fn validate(&self) -> Result<(), String> {
        limits::heads(
            self.rotation.heads,
            self.head,
            &[limits::columns_of(self.from, self.stride)],
        )?;
        self.check()
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        stream_launch(extents.tokens * u64::from(self.items()))
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (x, positions) = (reads[0].real(), reads[1].index());
        let mut out = Vec::new();
        for (row, &position) in x.chunks_exact(self.stride as usize).zip(positions) {
            let columns = &row[self.from as usize..][..self.width() as usize];
            for head in columns.chunks_exact(self.head as usize) {
                let mut head: Vec<f64> = head.iter().map(|&v| v.into()).collect();
                self.rotation.rotate(&mut head, position as f32);
                out.extend(head.into_iter().map(|v| v as f32));
            }
        }
        vec![HostTensor::Real(out)]
    }

    fn tolerance(&self) -> Tolerance {
        let relative = match self.dtype {
            DType::F16 => 1e-3,
            DType::BF16 => 8e-3,
            DType::F32 => 1e-6,
        };
        Tolerance {
            absolute: 2e-6,
            relative,
            reason: "a sine and a cosine within 2 ulp of f32, two products and a sum, rounded to storage",
        }
    }
}

/// Returns the frequencies of the RoPE paper for `n` pairs of columns: `theta^(−i / n)` for pair `i`.
pub(super) fn frequencies(n: u32, theta: f64) -> Vec<f32> {
    let exponent = |i: u32| -f64::from(2 * i) / f64::from(2 * n);
    (0..n).map(|i| theta.powf(exponent(i)) as f32).collect()
}

/// Instances that rotate all or some columns of a head. Some have an odd number of unchanged columns, a factor, or heads of a merged
/// projection.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (heads, head, pairs, theta, factor, from, stride) in [
            (16, 128, 64, 1e6, 1.0, 0, 2048),
            (8, 128, 64, 1e6, 1.0, 2048, 4096),
            (4, 64, 32, 1e4, 1.0, 0, 256),
            (3, 40, 10, 1e4, 1.25, 1, 122),
            (1, 7, 2, 5e5, 1.0, 0, 7),
        ] {
            let rotation = Rotation {
                heads,
                frequencies: frequencies(pairs, theta),
                factor,
            };
            let kernel = Rotary {
                rotation,
                head,
                from,
                stride,
                dtype,
            };
            all.push(kernel.into());
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_turn_exchanges_the_halves_and_keeps_later_columns() {
        let kernel = Rotary {
            rotation: Rotation {
                heads: 1,
                frequencies: vec![std::f32::consts::FRAC_PI_2],
                factor: 2.0,
            },
            head: 3,
            from: 0,
            stride: 3,
            dtype: DType::F32,
        };
        assert_eq!(kernel.check(), Ok(()));
        let x = HostTensor::Real(vec![1.0, 3.0, 5.0, 1.0, 3.0, 5.0]);
        let positions = HostTensor::Index(vec![0, 1]);
        let extents = Extents::of(&[2]).expect("a batch");
        let out = kernel.reference(&extents, &[&x, &positions]);
        let want = [2.0, 6.0, 5.0, -6.0, 2.0, 5.0];
        for (got, want) in out[0].real().iter().zip(want) {
            assert!((got - want).abs() < 1e-5, "{got} {want}");
        }
        let too_wide = Rotary { head: 1, ..kernel };
        assert!(too_wide.check().is_err());
    }
}
