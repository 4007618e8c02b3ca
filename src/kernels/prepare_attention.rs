//! A kernel that prepares the inputs of attention from merged projections in one launch. It applies RMSNorm and rotation to the heads of
//! queries and keys, and stores keys and values in the KV cache if there is one.

use serde::{Deserialize, Serialize};

use super::{
    Case, Constants, Fill, HostTensor, Kernel, KernelSpec, Launch, Param, Tolerance,
    cache::{BLOCK, Pool, index},
    e4m3::ROUNDED,
    f32_literal,
    layernorm::NO_RESIDUAL,
    rotary::frequencies,
    rows::{STREAM_THREADS, count, read, read_meta, rows_by, storage, vector_width, word, write},
};
use crate::{
    kernels::{limits, rotary::RotationCode},
    machine::Machine,
    ops::{BatchInput, Rotation},
    tensor::{DType, Extents, Format, Shape, Symbol},
};

/// `x [tokens, row]`, (`q_gamma, k_gamma [head]`), (`positions [tokens]`), (`k_scale, v_scale [1]`), (`token_slots [tokens]`) → `queries
/// [tokens, heads·head]`, and either `cache [blocks, stride]` or `keys [tokens, kv_heads·head]`: normalizes each head of queries and keys
/// (RMSNorm with gamma, if there is a norm), and then rotates it (if there is a rotation). With a cache, keys and values are stored in the
/// token's slot of two adjacent caches, keys first. The rest of the caches is not written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrepareAttention {
    pub heads: u32,
    pub kv_heads: u32,
    pub head: u32,
    /// First columns of the queries, keys and values in `x`.
    pub columns: [u32; 3],
    /// Columns of `x`.
    pub row: u32,
    /// Epsilon of the norms; `None` without norms.
    pub norm: Option<f32>,
    /// Rotation of queries and keys; `None` without rotation.
    pub rotation: Option<Rotation>,
    /// The blocks of the KV cache, if there is one. Without a cache, values are not copied.
    pub pool: Option<Pool>,
    pub dtype: DType,
}

/// Distribution of heads over the lanes of a warp.
struct Lanes {
    /// Neighboring columns per access of a lane.
    pack: u32,
    /// Number of lanes per head, a power of two.
    lanes: u32,
    /// Max number of packs per lane. The second columns of rotated pairs are not counted, because a lane that holds the first column of a
    /// pair also holds the second.
    items: u32,
}

impl PrepareAttention {
    /// Name of the parameter to which keys are written.
    pub fn keys_param(&self) -> &'static str {
        match self.pool {
            Some(_) => "cache",
            None => "keys",
        }
    }

    /// Max columns per head. A warp keeps a head in registers.
    pub const MAX_HEAD: u32 = 256;
    /// Max number of tokens for which several CTAs share the heads of a token. With one CTA per token, a small number of tokens would
    /// not fill the GPU.
    const FEW_TOKENS: u64 = 1024;
    /// Max tokens per CTA. The angles of all tokens of a CTA are computed in parallel.
    const MAX_TOKENS: u64 = 8;
    /// Min resident CTAs per SM.
    const CTAS_PER_SM: u64 = 4;

    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=Self::MAX_HEAD).contains(&self.head) {
            return Err(format!(
                "the head has {} columns; expected 1 to {}",
                self.head,
                Self::MAX_HEAD
            ));
        }
        for (from, heads) in self.columns.into_iter().zip(self.parts()) {
            let width = u64::from(heads) * u64::from(self.head);
            if u64::from(from) + width > u64::from(self.row) {
                return Err(format!(
                    "{width} columns from column {from} do not fit rows of {}",
                    self.row
                ));
            }
        }
        let cached = 2 * u64::from(self.kv_heads) * u64::from(self.head) * u64::from(BLOCK);
        if let Some(pool) = self.pool
            && cached > pool.stride
        {
            return Err(format!(
                "keys and values of {cached} elements do not fit cache blocks of {}",
                pool.stride
            ));
        }
        if self.norm.is_none() && self.rotation.is_none() {
            return Err("neither a norm nor a rotation; expected at least one".to_owned());
        }
        match &self.rotation {
            Some(rotation) if rotation.heads != self.heads => Err(format!(
                "the rotation is for {} heads; expected {}",
                rotation.heads, self.heads
            )),
            Some(rotation) => rotation.check(self.head),
            None => Ok(()),
        }
    }

    /// Numbers of heads of queries, keys and values.
    pub(super) fn parts(&self) -> [u32; 3] {
        [self.heads, self.kv_heads, self.kv_heads]
    }

    /// Number of heads that the kernel writes for each token: the queries, the keys and, with a cache, the values.
    fn units(&self) -> u32 {
        let values = self.pool.map_or(0, |_| self.kv_heads);
        self.heads + self.kv_heads + values
    }

    pub(super) fn pairs(&self) -> u32 {
        let rotation = self.rotation.as_ref();
        rotation.map_or(0, |r| r.frequencies.len() as u32)
    }

    fn lanes(&self) -> Lanes {
        let [q, k, v] = self.columns;
        let pairs = self.pairs();
        let pack = vector_width(self.dtype, &[q, k, v, self.row, self.head, pairs]);
        let packs = (self.head - pairs).div_ceil(pack);
        let lanes = packs.next_power_of_two().min(32);
        Lanes {
            pack,
            lanes,
            items: packs.div_ceil(lanes),
        }
    }

    /// Number of heads that a CTA processes at once.
    fn at_once(&self) -> u32 {
        STREAM_THREADS / self.lanes().lanes
    }

    fn width(&self) -> u32 {
        self.heads * self.head
    }
}

impl Kernel for PrepareAttention {
    facts! { template: "prepare_attention", dtype: self.dtype }

    fn symbol(&self) -> String {
        let [q, k, v] = self.columns;
        let norm = self.norm.map(|eps| format!("_norm{}", word(eps)));
        let turned = self.rotation.as_ref();
        let turned = turned.map(|r| format!("_turned{:08x}", r.digest()));
        format!(
            "prepare_attention_{}_h{}kv{}x{}_q{q}k{k}v{v}of{}{}{}{}",
            self.dtype,
            self.heads,
            self.kv_heads,
            self.head,
            self.row,
            norm.unwrap_or_default(),
            turned.unwrap_or_default(),
            self.pool.map(Pool::word).unwrap_or_default()
        )
    }

    fn constants(&self) -> Constants {
        let [q, k, v] = self.columns;
        let rotation = self.rotation.as_ref();
        let Lanes { pack, lanes, items } = self.lanes();
        let factor = rotation.map_or(1.0, |r| r.factor);
        Constants::from([
            ("storage", storage(self.dtype)),
            ("heads", self.heads.into()),
            ("kv_heads", self.kv_heads.into()),
            ("head", self.head.into()),
            ("q", q.into()),
            ("k", k.into()),
            ("v", v.into()),
            ("row", self.row.into()),
            ("norm", self.norm.is_some().into()),
            ("eps", f32_literal(self.norm.unwrap_or(0.0)).into()),
            ("turned", rotation.is_some().into()),
            ("pairs", self.pairs().into()),
            ("pack", pack.into()),
            ("lanes", lanes.into()),
            ("items", items.into()),
            ("units", self.units().into()),
            ("most_tokens", Self::MAX_TOKENS.into()),
            ("rounds", (if pack * items <= 8 { 2u32 } else { 1 }).into()),
            ("cached", self.pool.is_some().into()),
            ("e4m3", self.pool.is_some_and(Pool::is_e4m3).into()),
            ("scaled", self.pool.is_some_and(|pool| pool.scaled).into()),
            (
                "frequencies",
                rotation.map_or_else(String::new, Rotation::literals).into(),
            ),
            ("factor", f32_literal(factor).into()),
            ("stride", self.pool.map_or(0, |pool| pool.stride).into()),
            ("block", BLOCK.into()),
        ])
    }

    fn params(&self) -> Vec<Param> {
        let tokens = || Shape::new([Symbol::Tokens.into()]);
        let real = |name, shape| read(name, self.dtype, shape, Fill::ACTIVATION);
        let mut params = vec![real("x", rows_by(Symbol::Tokens, self.row))];
        if self.norm.is_some() {
            let head = Shape::fixed(&[self.head.into()]);
            params.extend(["q_gamma", "k_gamma"].map(|name| real(name, head.clone())));
        }
        if self.rotation.is_some() {
            params.push(read_meta("positions", BatchInput::Positions, tokens()));
        }
        params.extend(self.pool.map(Pool::scales).into_iter().flatten());
        let rows = |width| rows_by(Symbol::Tokens, width);
        let queries = write("queries", self.dtype, rows(self.width()));
        params.extend(match self.pool {
            Some(pool) => vec![
                read_meta("token_slots", BatchInput::TokenSlots, tokens()),
                queries,
                write(self.keys_param(), pool.element(), pool.shape()),
            ],
            None => {
                let keys = rows(self.kv_heads * self.head);
                vec![queries, write(self.keys_param(), self.dtype, keys)]
            }
        });
        params.push(count(Symbol::Tokens));
        params
    }

    /// Estimates the cycles with the cost constants of a norm, which also reads and writes each row once. Writing keys and values to an
    /// E4M3 cache costs less, because they take fewer bytes.
    fn cycles(&self, rows: u64, machine: &Machine) -> Option<f64> {
        let cost = &machine.costs.norm;
        let stored = self
            .pool
            .map_or(self.dtype.bytes(), |pool| pool.element().bytes());
        let written = stored as f64 / self.dtype.bytes() as f64;
        let cached = f64::from(self.units() - self.heads);
        let columns = f64::from(self.heads) + cached * (1.0 + written) / 2.0;
        let elements = rows as f64 * columns * f64::from(self.head);
        Some(cost.launch_of(rows) + elements * cost.element * NO_RESIDUAL)
    }

    fn validate(&self) -> Result<(), String> {
        limits::widths(&[self.row])?;
        limits::heads(self.heads, self.head, &[])?;
        limits::heads(self.kv_heads.saturating_mul(2), self.head, &[])?;
        self.norm.map_or(Ok(()), limits::eps)?;
        self.check()?;
        match self.pool {
            Some(pool) => pool.check(2 * self.kv_heads, self.head, self.dtype),
            None => Ok(()),
        }
    }

    /// With many tokens, each CTA processes one or more whole tokens. The number of tokens per CTA is small enough that every SM gets its
    /// min number of CTAs. With few tokens, the heads of each token are divided among CTAs, and each CTA processes all of its heads at
    /// once.
    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        let tokens = extents.tokens.max(1);
        let at_once = u64::from(machine.sms) * Self::CTAS_PER_SM;
        let share = (tokens / at_once.max(1)).clamp(1, Self::MAX_TOKENS);
        let grid = match tokens > Self::FEW_TOKENS {
            // There are at most 2^24 tokens, so the number of CTAs fits in 32 bits.
            true => [tokens.div_ceil(share) as u32, 1, 1],
            false => [tokens as u32, self.units().div_ceil(self.at_once()), 1],
        };
        Launch {
            grid,
            threads: STREAM_THREADS,
            shared_bytes: 0,
        }
    }

    fn threads(&self) -> u32 {
        STREAM_THREADS
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let mut all = reads.iter();
        let mut next = || all.next().expect("the parameter list has them");
        let x = next().real();
        let gammas = self.norm.map(|_| [next().real(), next().real()]);
        let positions = self.rotation.as_ref().map(|_| next().index());
        let mut rest = all.as_slice();
        let scales = self
            .pool
            .map_or([1.0; 2], |pool| pool.take_scales(&mut rest));
        let cached = self.pool.map(|pool| (rest[0].index(), pool));
        let head = self.head as usize;
        let (mut queries, mut keys) = (Vec::new(), Vec::new());
        if let Some((_, pool)) = cached {
            keys = vec![f32::NAN; extents.blocks as usize * pool.stride as usize];
        }
        for (token, row) in x.chunks_exact(self.row as usize).enumerate() {
            for (part, (from, heads)) in self.columns.into_iter().zip(self.parts()).enumerate() {
                for h in 0..heads as usize {
                    let columns = &row[from as usize + h * head..][..head];
                    let mut of: Vec<f64> = columns.iter().map(|&v| v.into()).collect();
                    if let (Some(eps), Some(gammas), 0 | 1) = (self.norm, gammas, part) {
                        let squares: f64 = of.iter().map(|v| v * v).sum();
                        let norm = (squares / f64::from(self.head) + f64::from(eps)).sqrt();
                        let scaled = of.iter_mut().zip(gammas[part]);
                        scaled.for_each(|(v, &g)| *v = *v / norm * f64::from(g));
                    }
                    if let (Some(rotation), Some(positions), 0 | 1) =
                        (&self.rotation, positions, part)
                    {
                        rotation.rotate(&mut of, positions[token] as f32);
                    }
                    let of = of.into_iter().map(|v| v as f32);
                    match (part, cached) {
                        (0, _) => queries.extend(of),
                        (_, Some((slots, pool))) => {
                            let nth = (part - 1) * self.kv_heads as usize + h;
                            let to = index(slots[token] as usize, nth, head, pool.stride as usize);
                            let scale = scales[part - 1];
                            keys.splice(to..to + head, of.map(|v| pool.round(v, scale)));
                        }
                        (1, None) => keys.extend(of),
                        _ => (),
                    }
                }
            }
        }
        vec![HostTensor::Real(queries), HostTensor::Real(keys)]
    }

    /// Returns cases that include a batch in which each CTA processes one whole token, and a batch in which each CTA processes several
    /// tokens.
    fn cases(&self) -> Vec<Case> {
        let mut cases = match self.pool {
            Some(_) => Case::cached(),
            None => Case::standard(),
        };
        cases.push(Case::new("many", &[700, 1, 399]));
        cases.push(Case::new("most", &[3000, 2, 1501]));
        cases
    }

    fn tolerance(&self) -> Tolerance {
        if self.pool.is_some_and(Pool::is_e4m3) {
            return ROUNDED;
        }
        let relative = match self.dtype {
            DType::F16 => 1e-3,
            DType::BF16 => 8e-3,
            DType::F32 => 4e-6,
        };
        Tolerance {
            absolute: 1e-5,
            relative,
            reason: "an f32 sum of squares and a square root, a sine and a cosine within 2 ulp of f32, two products and a sum, rounded to storage",
        }
    }
}

/// Instances with norms and rotations, alone and combined, with grouped heads, partly rotated heads, and odd head sizes.
pub(super) fn representative() -> Vec<KernelSpec> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (heads, kv_heads, head, pairs, norm, gap) in [
            (16, 8, 128, 64, Some(1e-6), 0),
            (32, 8, 64, 32, None, 0),
            (4, 2, 256, 0, Some(1e-5), 0),
            (3, 1, 40, 10, None, 8),
            (5, 5, 20, 9, Some(1e-6), 1),
        ] {
            let rotation = (pairs > 0).then(|| Rotation {
                heads,
                frequencies: frequencies(pairs, 1e4),
                factor: if gap > 0 { 1.25 } else { 1.0 },
            });
            let (k, v) = (heads * head + gap, (heads + kv_heads) * head + gap);
            let kernel = PrepareAttention {
                heads,
                kv_heads,
                head,
                columns: [0, k, v],
                row: v + kv_heads * head + gap,
                norm,
                rotation,
                // A cache of two layers.
                pool: Some(Pool::of_layer(2 * kv_heads, head, dtype)),
                dtype,
            };
            let rows = PrepareAttention {
                pool: None,
                ..kernel.clone()
            };
            let [e4m3, scaled] = [false, true].map(|scaled| PrepareAttention {
                pool: Some(Pool {
                    scaled,
                    ..Pool::of_layer(2 * kv_heads, head, Format::E4m3)
                }),
                ..kernel.clone()
            });
            all.extend([kernel.into(), rows.into(), e4m3.into(), scaled.into()]);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_and_keys_are_normalized_and_rotated_and_values_copied() {
        let kernel = PrepareAttention {
            heads: 1,
            kv_heads: 1,
            head: 2,
            columns: [0, 2, 4],
            row: 6,
            norm: Some(1.0),
            rotation: Some(Rotation {
                heads: 1,
                frequencies: vec![std::f32::consts::FRAC_PI_2],
                factor: 1.0,
            }),
            pool: Some(Pool::of_layer(1, 2, DType::F32)),
            dtype: DType::F32,
        };
        assert_eq!(kernel.check(), Ok(()));
        let real = |values: &[f32]| HostTensor::Real(values.to_vec());
        // The query head and the key head have a mean square of 15, and eps is 1, so both are divided by 4.
        let x = real(&[5.0, 5f32.sqrt(), 5f32.sqrt(), 5.0, 7.0, 8.0]);
        let (q_gamma, k_gamma) = (real(&[4.0, 4.0]), real(&[4.0, 8.0]));
        let at = |v: i64| HostTensor::Index(vec![v]);
        let extents = Extents::continuing(&[1], &[1], 1).expect("a batch");
        let out = kernel.reference(&extents, &[&x, &q_gamma, &k_gamma, &at(1), &at(3)]);
        // A quarter turn maps (a, b) to (−b, a).
        let close = |got: &[f32], want: [f32; 2]| {
            let near = got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-5);
            assert!(near, "{got:?} {want:?}");
        };
        close(out[0].real(), [-5f32.sqrt(), 5.0]);
        let cache = out[1].real();
        close(&cache[6..8], [-10.0, 5f32.sqrt()]);
        close(&cache[2 * BLOCK as usize + 6..][..2], [7.0, 8.0]);
        assert_eq!(cache.iter().filter(|v| !v.is_nan()).count(), 4);
    }

    #[test]
    fn unsupported_kernels_are_rejected_with_a_reason() {
        let KernelSpec::PrepareAttention(kernel) = representative().remove(0) else {
            unreachable!("all are of this kind")
        };
        let refused = |kernel: PrepareAttention| kernel.check().expect_err("refused");
        let wide = PrepareAttention {
            head: 264,
            ..kernel.clone()
        };
        assert_eq!(refused(wide), "the head has 264 columns; expected 1 to 256");
        let narrow = PrepareAttention {
            row: 4095,
            ..kernel.clone()
        };
        assert_eq!(
            refused(narrow),
            "1024 columns from column 3072 do not fit rows of 4095"
        );
        let small = PrepareAttention {
            pool: Some(Pool {
                scaled: false,
                stride: 65_535,
                format: kernel.dtype.into(),
            }),
            ..kernel.clone()
        };
        assert_eq!(
            refused(small),
            "keys and values of 65536 elements do not fit cache blocks of 65535"
        );
        let neither = PrepareAttention {
            norm: None,
            rotation: None,
            ..kernel.clone()
        };
        assert_eq!(
            refused(neither),
            "neither a norm nor a rotation; expected at least one"
        );
        let heads = PrepareAttention { heads: 8, ..kernel };
        assert_eq!(refused(heads), "the rotation is for 16 heads; expected 8");
    }
}
