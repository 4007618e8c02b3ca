//! Rotary position embedding (Su et al. 2021), with the two halves of a head as the coordinates that are turned.

use serde::{Deserialize, Serialize};

use super::{
    Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Meta, Param, Tolerance, f32_literal,
    rows::{STREAM_THREADS, count, read, read_meta, rows_by, storage, stream_launch, write},
};
use crate::machine::Machine;
use crate::tensor::{DType, Extents, Shape, Symbol};

/// By which angles the heads of a row are turned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rotation {
    /// Heads of a row.
    pub heads: u32,
    /// Radians from a position to the next, for each pair of columns: column `c` and column `c + frequencies.len()` of a
    /// head. The head's columns behind stay as they are.
    pub frequencies: Vec<f32>,
    /// Factor of the turned columns, which some scalings of frequencies ask for.
    pub factor: f32,
}

/// `x [tokens, heads·head]`, `positions [tokens]` → `out [tokens, heads·head]`: each head turned by its token's position.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rotary {
    pub rotation: Rotation,
    /// Columns of a head.
    pub head: u32,
    pub dtype: DType,
}

impl Rotary {
    /// Most pairs of columns of a head: their frequencies lie in constant memory.
    pub const MAX_PAIRS: usize = 1024;

    /// Whether the kernel can be generated as described.
    pub fn check(&self) -> Result<(), String> {
        let Rotation {
            frequencies,
            factor,
            ..
        } = &self.rotation;
        let n = frequencies.len();
        if n == 0 || n > Self::MAX_PAIRS || 2 * n > self.head as usize {
            return Err(format!("{n} pairs of columns of a head of {}", self.head));
        }
        match frequencies.iter().chain([factor]).all(|f| f.is_finite()) {
            true => Ok(()),
            false => Err("a frequency or the factor is not finite".to_owned()),
        }
    }

    fn width(&self) -> u32 {
        self.rotation.heads * self.head
    }

    /// FNV-1a of the angles, which a symbol has no room for.
    fn digest(&self) -> u32 {
        let all = self.rotation.frequencies.iter();
        let bytes = all
            .chain([&self.rotation.factor])
            .flat_map(|f| f.to_bits().to_le_bytes());
        bytes.fold(0x811c_9dc5, |hash: u32, byte| {
            (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
        })
    }

    /// Elements of a row that one thread computes: a pair, or a column that stays.
    fn items(&self) -> u32 {
        self.rotation.heads * (self.head - self.rotation.frequencies.len() as u32)
    }
}

impl Kernel for Rotary {
    fn symbol(&self) -> String {
        format!(
            "rotary_{}_h{}x{}_{:08x}",
            self.dtype,
            self.rotation.heads,
            self.head,
            self.digest()
        )
    }

    fn template(&self) -> &'static str {
        "rotary"
    }

    fn constants(&self) -> Constants {
        let frequencies = self.rotation.frequencies.iter();
        let literals: Vec<String> = frequencies.map(|&f| f32_literal(f)).collect();
        Constants::from([
            ("storage", storage(self.dtype)),
            ("width", self.width().into()),
            ("head", self.head.into()),
            ("pairs", (literals.len() as u64).into()),
            ("items", self.items().into()),
            ("frequencies", literals.join(", ").into()),
            ("factor", f32_literal(self.rotation.factor).into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        let rows = rows_by(Symbol::Tokens, self.width());
        let tokens = Shape::new([Symbol::Tokens.into()]);
        vec![
            read("x", self.dtype, rows.clone(), Fill::ACTIVATION),
            read_meta("positions", Meta::Positions, tokens),
            write("out", self.dtype, rows),
            count(Symbol::Tokens),
        ]
    }

    fn launch(&self, extents: &Extents, _: &Machine) -> Launch {
        stream_launch(extents.tokens * u64::from(self.items()))
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, _: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let (x, positions) = (reads[0].real(), reads[1].index());
        let Rotation {
            heads,
            frequencies,
            factor,
        } = &self.rotation;
        let n = frequencies.len();
        let mut out = x.to_vec();
        for (i, row) in out.chunks_exact_mut(self.head as usize).enumerate() {
            let position = positions[i / *heads as usize] as f32;
            for (c, &frequency) in frequencies.iter().enumerate() {
                // The product is rounded to f32, as published implementations have it: far from 0 that turns by other
                // angles than the exact one would.
                let (sin, cos) = f64::from(position * frequency).sin_cos();
                let (sin, cos) = (f64::from(*factor) * sin, f64::from(*factor) * cos);
                let (a, b) = (f64::from(row[c]), f64::from(row[n + c]));
                row[c] = (a * cos - b * sin) as f32;
                row[n + c] = (b * cos + a * sin) as f32;
            }
        }
        vec![HostTensor::Real(out)]
    }

    fn tolerance(&self) -> Tolerance {
        let relative = match self.dtype {
            DType::F16 => 1e-3,
            DType::BF16 => 8e-3,
            _ => 1e-6,
        };
        Tolerance {
            absolute: 2e-6,
            relative,
            reason: "a sine and a cosine within 2 ulp of f32, two products and a sum, rounded to storage",
        }
    }
}

/// Heads of which all columns are turned, or some; an odd number of columns that stay; with a factor.
pub(super) fn representative() -> Vec<KernelSpec> {
    let frequencies = |n: u32, theta: f64| -> Vec<f32> {
        let exponent = |i: u32| -f64::from(2 * i) / f64::from(2 * n);
        (0..n).map(|i| theta.powf(exponent(i)) as f32).collect()
    };
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (heads, head, pairs, theta, factor) in [
            (16, 128, 64, 1e6, 1.0),
            (4, 64, 32, 1e4, 1.0),
            (3, 40, 10, 1e4, 1.25),
            (1, 7, 2, 5e5, 1.0),
        ] {
            let rotation = Rotation {
                heads,
                frequencies: frequencies(pairs, theta),
                factor,
            };
            let kernel = Rotary {
                rotation,
                head,
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
    fn a_quarter_turn_exchanges_the_halves_and_later_columns_stay() {
        let kernel = Rotary {
            rotation: Rotation {
                heads: 1,
                frequencies: vec![std::f32::consts::FRAC_PI_2],
                factor: 2.0,
            },
            head: 3,
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
