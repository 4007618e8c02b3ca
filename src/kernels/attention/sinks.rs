//! Instances of the attention kernels with sinks.

use super::{
    DecodeCtas, FusedMha, Keys, MhaCached, MhaDecode, MhaDecodeAppend, MhaOnline, MhaPrefill,
    MhaShort, MhaSplitKeys, MhaTile, MhaToE4m3, MhaWgmma, SoftmaxByDistance, SoftmaxMask,
};
use crate::{
    kernels::{KernelSpec, cache::Pool},
    ops::{AttentionProblem, Bias, HeadView, PositionBias, SoftCap, default_scale},
    tensor::DType::{self, BF16, F16, F32},
};

/// Returns a position bias with sinks, and with a window if there is one.
fn by(window: Option<u32>) -> PositionBias {
    PositionBias {
        window,
        sinks: true,
        ..PositionBias::default()
    }
}

/// Returns a position bias with sinks, a soft cap and a bias. The cap and the bias apply to the scores, but not to the sinks.
fn adjusted(window: Option<u32>) -> PositionBias {
    PositionBias {
        cap: SoftCap::new(2.0).ok(),
        bias: Some(Bias::Slopes),
        ..by(window)
    }
}

/// Returns the columns of queries, keys and values in the rows of a merged projection.
fn merged(heads: u32, kv_heads: u32, head: u32) -> [HeadView; 3] {
    let stride = (heads + 2 * kv_heads) * head;
    [0, heads, heads + kv_heads].map(|first| HeadView::TokenMajor {
        offset: first * head,
        stride,
    })
}

/// Returns causal attention if several query heads share a key head, otherwise full attention.
fn problem([heads, kv_heads, head]: [u32; 3], by: PositionBias) -> AttentionProblem {
    let views = merged(heads, kv_heads, head);
    AttentionProblem {
        kv_heads,
        causal: kv_heads < heads,
        by,
        ..AttentionProblem::full(heads, head, default_scale(head), views)
    }
}

fn online(sizes: [u32; 3], by: PositionBias, dtype: DType) -> MhaOnline {
    let of = problem(sizes, by);
    MhaOnline { of, dtype }
}

fn cached([heads, kv_heads, head]: [u32; 3], by: PositionBias, dtype: DType) -> MhaCached {
    MhaCached {
        heads,
        kv_heads,
        head,
        scale: default_scale(head),
        q: merged(heads, kv_heads, head)[0],
        keys: Keys::Own,
        by,
        pool: Pool::of_layer(kv_heads, head, dtype),
        dtype,
    }
}

/// Instances of every kernel that supports sinks. Each way in which a kernel computes the maximum and the sum of a row has an instance.
pub(super) fn representative() -> Vec<KernelSpec> {
    let (none, some) = (by(None), by(Some(37)));
    let mut all: Vec<KernelSpec> = Vec::new();
    for plain in [
        online([6, 2, 64], some, F16),
        online([5, 5, 64], none, BF16),
        online([3, 1, 256], adjusted(None), BF16),
        online([6, 2, 40], some, F32),
    ] {
        all.push(plain.into());
    }
    all.push(MhaShort::of(&online([5, 5, 72], none, F16), 96).into());
    let plain = online([5, 5, 32], none, BF16);
    all.push(MhaSplitKeys { plain }.into());
    for (mask, by, dtype) in [
        (SoftmaxMask::Causal, none, F32),
        (SoftmaxMask::Padding, some, F16),
    ] {
        all.push(KernelSpec::from(SoftmaxByDistance {
            heads: 3,
            scale: 0.125,
            mask,
            by,
            dtype,
        }));
    }

    all.push(cached([6, 1, 40], some, F32).into());
    all.push(cached([16, 8, 128], none, BF16).scaled().into());
    for (plain, ctas) in [
        (cached([6, 3, 96], none, F32), DecodeCtas::SMALL),
        (cached([12, 1, 80], some, F16).scaled(), DecodeCtas::SMALL),
        (cached([32, 8, 64], none, BF16), DecodeCtas::MEDIUM.split(8)),
    ] {
        let [_, x, _] = merged(plain.heads, plain.kv_heads, plain.head);
        let decode = MhaDecode { plain, ctas };
        all.push(decode.clone().into());
        all.push(MhaDecodeAppend { decode, x }.into());
    }
    let tile = |head| MhaTile::gathering(head).first().copied();
    for (plain, tile) in [
        (cached([12, 3, 64], some, F16), None),
        (cached([4, 2, 80], adjusted(None), BF16).scaled(), None),
        (cached([12, 3, 64], some, F16), tile(64)),
        (cached([3, 1, 256], none, BF16).scaled(), tile(256)),
    ] {
        all.push(MhaPrefill { plain, tile }.into());
    }

    // WGMMA attention with tile `nth` of the head size. The first tile of a head size is persistent, and the last tile is not.
    let wgmma = |plain: MhaOnline, nth: usize| {
        let tile = MhaTile::candidates(plain.of.head)[nth];
        MhaWgmma::of(&plain, tile)
    };
    all.extend(
        [
            wgmma(online([6, 2, 64], by(Some(300)), F16), 1),
            wgmma(online([6, 2, 64], some, BF16), 2),
            wgmma(online([4, 2, 128], none, F16), 0),
            wgmma(online([3, 3, 32], adjusted(Some(64)), BF16), 1),
        ]
        .map(KernelSpec::from),
    );
    let attention = FusedMha::Wgmma(wgmma(online([4, 2, 128], some, F16), 1));
    all.push(MhaToE4m3 { attention }.into());
    all
}
