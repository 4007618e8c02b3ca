//! Decode attention that also appends the new keys and values to the KV cache.

use serde::{Deserialize, Serialize};

use super::{AttentionError, Keys, MhaDecode, params};
use crate::{
    kernels::{
        Case, Constants, HostTensor, Instructions, Kernel, KernelSpec, Launch, Param, Role,
        Tolerance,
        attention::position_bias::PositionBiasCode,
        cache::{AppendCache, index},
        rows::read_meta,
    },
    machine::Machine,
    ops::{BatchInput, HeadView},
    tensor::{Extents, Shape, Size, Symbol},
};

/// The inputs of [`MhaDecode`], `x [tokens, x.stride]`, `token_slots [tokens]` → `cache [blocks, stride]`, `out`. The kernel writes the
/// same elements of `cache` as [`AppendCache`], and the same `out` as [`MhaDecode`]. For sequences of one token, this kernel replaces a
/// launch of `AppendCache` and a launch of attention.
///
/// Attention reads the newest key and value from `x`, the output of the projection, instead of the cache, and rounds them to the format of
/// the cache. Thus no CTA waits for the stores of another CTA.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhaDecodeAppend {
    pub decode: MhaDecode,
    /// Location of the keys in the rows of `x`. The values follow the keys.
    pub x: HeadView,
}

impl MhaDecodeAppend {
    /// Checks that the kernel can be generated as described.
    ///
    /// # Errors
    /// Returns the reason if it cannot.
    pub fn check(&self) -> Result<(), AttentionError> {
        self.decode.check()?;
        if self.decode.plain.keys == Keys::Source {
            return Err(AttentionError::AppendToSource);
        }
        let (append, plain) = (self.append(), &self.decode.plain);
        let views = [("x", self.x, append.heads)];
        super::operands::check_views(plain.head, &views)?;
        append.check().map_err(AttentionError::Append)
    }

    /// Returns the two kernels that this kernel replaces: `AppendCache` and attention. Each kernel is returned with its operands, which are
    /// selected from `operands`, the operands of this kernel.
    pub fn in_turn<T: Copy>(&self, operands: &[T]) -> [(KernelSpec, Vec<T>); 2] {
        // The operands end with `x`, `token_slots`, `cache` and `out`. The append kernel takes the first three of these. Both kernels take
        // the scales of the cache.
        let n_reads = operands.len().saturating_sub(4);
        let (of_attention, rest) = operands.split_at(n_reads);
        let (of_append, out) = rest.split_at(rest.len().min(3));
        let (x, slots_and_cache) = of_append.split_at(of_append.len().min(1));
        let scales = self.scales(of_attention);
        [
            (self.append().into(), [x, scales, slots_and_cache].concat()),
            (self.decode.clone().into(), [of_attention, out].concat()),
        ]
    }

    /// Returns the operands of `of_attention` that are the scales of the cache. `of_attention` holds the inputs of attention. Returns an
    /// empty slice if the cache has no scales.
    fn scales<'a, T>(&self, of_attention: &'a [T]) -> &'a [T] {
        let plain = &self.decode.plain;
        let n = plain.pool.scales().len();
        let first = 3 + plain.by.params(plain.heads, plain.dtype).len();
        of_attention.get(first..first + n).unwrap_or_default()
    }

    /// Returns the kernel that only appends to the cache.
    pub fn append(&self) -> AppendCache {
        let plain = &self.decode.plain;
        AppendCache {
            heads: 2 * plain.kv_heads,
            head: plain.head,
            x: self.x,
            of_sequence: false,
            pool: plain.pool,
            dtype: plain.dtype,
        }
    }
}

impl Kernel for MhaDecodeAppend {
    facts! { dtype: self.decode.plain.dtype, class: Attention }

    fn symbol(&self) -> String {
        let (column, stride) = (self.x.column(), self.x.stride(self.decode.plain.head));
        format!("{}_append{column}of{stride}", self.decode.symbol())
    }

    fn definition(&self) -> String {
        let (column, stride) = (self.x.column(), self.x.stride(self.decode.plain.head));
        format!("{}_append{column}of{stride}", self.decode.definition())
    }

    fn template(&self) -> &'static str {
        self.decode.template()
    }

    fn constants(&self) -> Constants {
        let plain = &self.decode.plain;
        let keys = self.x.column();
        let mut constants = self.decode.constants();
        constants.extend(Constants::from([
            ("appends", true.into()),
            ("kv_heads", plain.kv_heads.into()),
            ("key_column", keys.into()),
            ("value_column", (keys + plain.kv_heads * plain.head).into()),
            ("x_stride", self.x.stride(plain.head).into()),
        ]));
        constants
    }

    fn params(&self) -> Vec<Param> {
        let plain = &self.decode.plain;
        let mut all = self.decode.params();
        let is_write = |param: &Param| matches!(param.role, Role::Write { .. });
        let at = all.iter().position(is_write).unwrap_or(all.len());
        let x = self.x.shape(2 * plain.kv_heads, plain.head);
        let slots = Shape::new([Symbol::Tokens.into()]);
        let added = [
            params::read("x", plain.dtype, x),
            read_meta("token_slots", BatchInput::TokenSlots, slots),
            params::write("cache", plain.pool.element(), plain.pool.shape()),
        ];
        all.splice(at..at, added);
        all
    }

    fn instructions(&self) -> Instructions {
        self.decode.instructions()
    }

    fn flop(&self) -> Size {
        self.decode.flop()
    }

    fn max_len(&self) -> Option<u32> {
        Some(1)
    }

    fn validate(&self) -> Result<(), String> {
        self.decode.plain.check_sizes()?;
        self.check().map_err(|e| e.to_string())
    }

    fn launch(&self, extents: &Extents, machine: &Machine) -> Launch {
        self.decode.launch(extents, machine)
    }

    fn threads(&self) -> u32 {
        self.decode.threads()
    }

    fn reference(&self, extents: &Extents, reads: &[&HostTensor]) -> Vec<HostTensor> {
        let plain = &self.decode.plain;
        let (of_attention, of_append) = reads.split_at(reads.len() - 2);
        let (heads, head, pool) = (plain.kv_heads, plain.head as usize, plain.pool);
        let (x, slots) = (of_append[0].real(), of_append[1].index());
        let mut scales = self.scales(of_attention);
        let of_append = [&of_append[..1], scales, &of_append[1..]].concat();
        let scales = pool.take_scales(&mut scales);
        // Contents of the cache after the new keys and values are appended.
        let [keys, values] = [0, 1].map(|nth: u32| {
            let scale = scales[nth as usize];
            let mut rows = of_attention[1 + nth as usize].real().to_vec();
            for (token, &slot) in slots.iter().enumerate() {
                for h in 0..heads {
                    let from =
                        self.x
                            .index(slots.len(), token, (nth * heads + h) as usize, plain.head);
                    let to = index(slot as usize, h as usize, head, pool.stride as usize);
                    let stored = x[from..from + head].iter().map(|&v| pool.round(v, scale));
                    rows.splice(to..to + head, stored);
                }
            }
            HostTensor::Real(rows)
        });
        let mut with_new = of_attention.to_vec();
        (with_new[1], with_new[2]) = (&keys, &values);
        let mut written = self.append().reference(extents, &of_append);
        written.extend(self.decode.reference(extents, &with_new));
        written
    }

    /// Returns the cases of decode attention in which every sequence has one token.
    fn cases(&self) -> Vec<Case> {
        let mut cases = self.decode.cases();
        cases.retain(|case| case.lens.iter().all(|&len| len == 1));
        cases
    }

    fn tolerance(&self) -> Tolerance {
        self.decode.tolerance()
    }
}

/// Instances of every decode kernel, with queries, keys and values as columns of one projection.
pub(super) fn representative() -> Vec<KernelSpec> {
    let decode = super::decode::representative();
    let appending = decode.into_iter().filter_map(|kernel| {
        let KernelSpec::MhaDecode(decode) = kernel else {
            return None;
        };
        let plain = &decode.plain;
        let x = HeadView::TokenMajor {
            offset: plain.heads * plain.head,
            stride: (plain.heads + 2 * plain.kv_heads) * plain.head,
        };
        let kernel = MhaDecodeAppend { decode, x };
        kernel.check().is_ok().then(|| kernel.into())
    });
    appending.collect()
}
