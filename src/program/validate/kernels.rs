//! Validation of the kernels of a program from a file.

use super::{MAX_ELEMENTS, MAX_PARTS, MAX_ROWS, MAX_WIDTH};
use crate::{
    kernels::{
        KernelSpec,
        attention::MhaCached,
        cache::BLOCK,
        elementwise::Concat,
        embedding::Table,
        gemm::{Gemm, StreamNorm, Tile},
        layernorm::Teams,
        prepare_attention::PrepareAttention,
    },
    ops::{AttentionProblem, HeadView, PositionBias},
    tensor::DType,
};

/// Checks that a kernel can be generated and launched, and that it computes in the stored type.
pub(crate) fn check_kernel(kernel: &KernelSpec, stored: DType) -> Result<(), String> {
    use KernelSpec as K;
    let real = |what: &str, value: f32, fits: bool| match value.is_finite() && fits {
        true => Ok(()),
        false => Err(format!("{what} is {value}")),
    };
    let eps = |value: f32| real("eps", value, value > 0.0);
    let prepared = |k: &PrepareAttention| {
        widths(&[k.row])
            .and_then(|()| heads(k.heads, k.head, &[]))
            .and_then(|()| heads(k.kv_heads.saturating_mul(2), k.head, &[]))
            .and_then(|()| k.norm.map_or(Ok(()), eps))
            .and_then(|()| k.check())
            .and_then(|()| match k.stride {
                Some(stride) => check_stride(stride, 2 * k.kv_heads, k.head),
                None => Ok(()),
            })
    };
    let dtype = match kernel {
        K::Gemm(k) => check_gemm(k).map(|()| k.dtype),
        K::GemmWgmma(k) => check_gemm(&k.plain())
            .and_then(|()| k.check())
            .map(|()| k.dtype),
        K::GemmSplitK(k) => check_gemm(&k.plain())
            .and_then(|()| k.check())
            .map(|()| k.dtype),
        K::GemmResidualNorm(k) => check_gemm(&k.unfused().0)
            .and_then(|()| k.check())
            .and_then(|()| eps(k.eps))
            .map(|()| k.dtype),
        K::GemmResidualRowStats(k) => check_gemm(&k.unfused().0)
            .and_then(|()| k.check())
            .map(|()| k.dtype),
        K::DeferredLayerNormGemm(k) => check_gemm(&k.unfused().1)
            .and_then(|()| k.check())
            .and_then(|()| eps(k.eps))
            .map(|()| k.dtype),
        K::GemmStream(k) => check_gemm(&k.plain())
            .and_then(|()| k.check())
            .and_then(|()| match k.norm {
                StreamNorm::After { eps: value, .. } => eps(value),
                _ => Ok(()),
            })
            .map(|()| k.dtype),
        K::AddBias(k) => widths(&[k.width]).map(|()| k.dtype),
        K::Combine(k) => widths(&[k.width]).map(|()| k.dtype),
        K::RmsNorm(k) => heads(k.heads, k.width, &[columns_of(k.from, k.stride)])
            .and_then(|()| eps(k.eps))
            .map(|()| k.dtype),
        K::Rotary(k) => heads(k.rotation.heads, k.head, &[columns_of(k.from, k.stride)])
            .and_then(|()| k.check())
            .map(|()| k.dtype),
        K::Gate(k) => widths(&[k.width.saturating_mul(2)]).map(|()| k.dtype),
        K::Activate(k) => widths(&[k.width]).map(|()| k.dtype),
        K::Scale(k) => widths(&[k.width])
            .and_then(|()| real("the scale", k.by, true))
            .map(|()| k.dtype),
        K::SliceColumns(k) => widths(&[k.from_width, k.width])
            .and_then(|()| columns(k.start, k.width, k.from_width))
            .map(|()| k.dtype),
        K::SplitHeads(k) => heads(k.heads, k.head, &[]).map(|()| k.dtype),
        K::MergeHeads(k) => heads(k.heads, k.head, &[]).map(|()| k.dtype),
        K::LayerNorm(k) => widths(&[k.width])
            .and_then(|()| eps(k.eps))
            .and_then(|()| check_teams(k.teams, k.width, k.dtype))
            .map(|()| k.dtype),
        K::BiasResidualLayerNorm(k) => widths(&[k.width])
            .and_then(|()| eps(k.eps))
            .and_then(|()| check_teams(k.teams, k.width, k.dtype))
            .map(|()| k.dtype),
        K::Embedding(k) => widths(&[k.width])
            .and_then(|()| check_tables(std::slice::from_ref(&k.table)))
            .map(|()| k.dtype),
        K::EmbeddingLayerNorm(k) => widths(&[k.width])
            .and_then(|()| eps(k.eps))
            .and_then(|()| check_tables(&k.tables))
            .map(|()| k.dtype),
        K::Concat(k) => check_parts(k).map(|()| k.dtype),
        K::TokenOfSequence(k) => widths(&[k.width]).map(|()| k.dtype),
        K::MeanPool(k) => widths(&[k.width]).map(|()| k.dtype),
        K::MaxPool(k) => widths(&[k.width]).map(|()| k.dtype),
        K::Draw(k) => widths(&[k.width]).map(|()| k.dtype),
        K::LogProbability(k) => widths(&[k.width]).map(|()| k.dtype),
        K::L2Normalize(k) => widths(&[k.width])
            .and_then(|()| eps(k.eps))
            .map(|()| k.dtype),
        K::MeanPoolNormalize(k) => widths(&[k.width])
            .and_then(|()| eps(k.eps))
            .map(|()| k.dtype),
        K::AttentionScores(k) => heads(k.heads, k.head, &[k.q])
            .and_then(|()| heads(k.kv_heads, k.head, &[k.k]))
            .and_then(|()| groups(k.heads, k.kv_heads))
            .and_then(|()| real("the scale", k.scale, true))
            .map(|()| k.dtype),
        K::RelativeScores(k) => {
            heads(k.heads, k.head, &[]).and_then(|()| match k.reach <= PositionBias::FARTHEST {
                true => Ok(k.dtype),
                false => Err(format!(
                    "reaches {} positions, at most {} fit",
                    k.reach,
                    PositionBias::FARTHEST
                )),
            })
        }
        K::AttentionSoftmax(k) => widths(&[k.heads])
            .and_then(|()| real("the scale", k.scale, true))
            .and_then(|()| k.form.check(k.dtype).map_err(|e| e.to_string()))
            .map(|()| k.dtype),
        K::SoftmaxByDistance(k) => widths(&[k.heads])
            .and_then(|()| real("the scale", k.scale, true))
            .and_then(|()| k.by.check().map_err(|e| e.to_string()))
            .map(|()| k.dtype),
        K::AttentionContext(k) => heads(k.heads, k.head, &[k.out])
            .and_then(|()| heads(k.kv_heads, k.head, &[k.v]))
            .and_then(|()| groups(k.heads, k.kv_heads))
            .map(|()| k.dtype),
        K::MhaShort(k) => attending(&k.of)
            .and_then(|()| k.check().map_err(|e| e.to_string()))
            .map(|()| k.dtype),
        K::MhaOnline(k) => attending(&k.of)
            .and_then(|()| k.check().map_err(|e| e.to_string()))
            .map(|()| k.dtype),
        K::MhaSplitKeys(k) => attending(&k.plain.of)
            .and_then(|()| k.check().map_err(|e| e.to_string()))
            .map(|()| k.plain.dtype),
        K::MhaWgmma(k) => attending(&k.of)
            .and_then(|()| k.check().map_err(|e| e.to_string()))
            .map(|()| k.dtype),
        K::MhaCached(k) => cached(k)
            .and_then(|()| k.check().map_err(|e| e.to_string()))
            .map(|()| k.dtype),
        K::MhaDecode(k) => cached(&k.plain)
            .and_then(|()| k.check().map_err(|e| e.to_string()))
            .map(|()| k.plain.dtype),
        K::MhaDecodeAppend(k) => cached(&k.decode.plain)
            .and_then(|()| k.check().map_err(|e| e.to_string()))
            .map(|()| k.decode.plain.dtype),
        K::MhaPrefill(k) => cached(&k.plain)
            .and_then(|()| k.check().map_err(|e| e.to_string()))
            .map(|()| k.plain.dtype),
        K::AppendCache(k) => heads(k.heads, k.head, &[k.x])
            .and_then(|()| k.check())
            .and_then(|()| check_stride(k.stride, k.heads, k.head))
            .map(|()| k.dtype),
        K::PrepareAttention(k) => prepared(k).map(|()| k.dtype),
        K::GemmPrepareAttention(k) => check_gemm(&k.plain())
            .and_then(|()| prepared(&k.prepare))
            .and_then(|()| k.check())
            .map(|()| k.prepare.dtype),
        K::MhaLongScores(k) => heads(k.heads, k.head, &[k.q, k.k])
            .and_then(|()| k.check().map_err(|e| e.to_string()))
            .map(|()| k.dtype),
        // It reads and writes f32 for any storage type of the program.
        K::MhaLongReduce(k) => widths(&[k.heads]).map(|()| stored),
        K::MhaLongContext(k) => heads(k.heads, k.head, &[k.v])
            .and_then(|()| k.check().map_err(|e| e.to_string()))
            .map(|()| k.dtype),
        K::Upload(_) | K::Scatter(_) | K::PackScan(_) | K::PackTokens(_) => Err(
            "a program cannot contain upload and packing kernels, which belong to the runtime"
                .to_owned(),
        ),
        K::ChooseToken(_) | K::Candidates(_) | K::BeamStep(_) | K::Advance(_) => Err(
            "a program cannot contain kernels that choose tokens, which belong to the runtime"
                .to_owned(),
        ),
    }?;
    if dtype != stored {
        return Err(format!("it computes in {dtype}, the program in {stored}"));
    }
    Ok(())
}

/// Checks the sizes of attention to a cache.
fn cached(k: &MhaCached) -> Result<(), String> {
    heads(k.heads, k.head, &[k.q])
        .and_then(|()| heads(k.kv_heads, k.head, &[]))
        .and_then(|()| check_stride(k.stride, k.kv_heads, k.head))
}

fn widths(all: &[u32]) -> Result<(), String> {
    match all.iter().find(|w| !(1..=MAX_WIDTH).contains(*w)) {
        None => Ok(()),
        Some(width) => Err(format!("a width of {width}, expected 1 to {MAX_WIDTH}")),
    }
}

/// Checks the operands of fused attention.
fn attending(of: &AttentionProblem) -> Result<(), String> {
    let mut operands = of.operands().into_iter();
    operands.try_for_each(|(_, view, n)| heads(n, of.head, &[view]))?;
    groups(of.heads, of.kv_heads)
}

/// Checks that a cache of these heads fits a block.
fn check_stride(stride: u64, heads: u32, head: u32) -> Result<(), String> {
    let least = u64::from(heads) * u64::from(head) * u64::from(BLOCK);
    match (least..=MAX_ELEMENTS).contains(&stride) {
        true => Ok(()),
        false => Err(format!(
            "blocks of {stride} elements, expected at least {least}"
        )),
    }
}

fn groups(heads: u32, kv_heads: u32) -> Result<(), String> {
    match heads.is_multiple_of(kv_heads) {
        true => Ok(()),
        false => Err(format!("{heads} heads in {kv_heads} groups")),
    }
}

fn check_parts(concat: &Concat) -> Result<(), String> {
    let n = concat.widths.len();
    if !(2..=Concat::MAX_PARTS).contains(&n) {
        return Err(format!("{n} parts, expected 2 to {}", Concat::MAX_PARTS));
    }
    widths(&concat.widths)?;
    widths(&[concat.width()])
}

fn check_teams(teams: Teams, width: u32, dtype: DType) -> Result<(), String> {
    match teams.fits(width, dtype) {
        true => Ok(()),
        false => Err(format!("{teams:?} cannot hold rows of {width} {dtype}")),
    }
}

fn columns(start: u32, width: u32, of: u32) -> Result<(), String> {
    if u64::from(start) + u64::from(width) > u64::from(of) {
        return Err(format!("{width} columns from {start} on, in rows of {of}"));
    }
    Ok(())
}

/// Returns the view of adjacent heads in rows.
fn columns_of(offset: u32, stride: u32) -> HeadView {
    HeadView::TokenMajor { offset, stride }
}

fn heads(heads: u32, head: u32, views: &[HeadView]) -> Result<(), String> {
    widths(&[heads, head])?;
    let width = heads
        .checked_mul(head)
        .filter(|&w| w <= MAX_WIDTH)
        .ok_or_else(|| format!("{heads} heads of {head}, at most {MAX_WIDTH} columns fit"))?;
    for view in views {
        if let HeadView::TokenMajor { offset, stride } = *view {
            widths(&[stride])?;
            columns(offset, width, stride)?;
        }
    }
    Ok(())
}

fn check_tables(tables: &[Table]) -> Result<(), String> {
    if !(1..=MAX_PARTS).contains(&tables.len()) {
        return Err(format!(
            "{} tables, expected 1 to {MAX_PARTS}",
            tables.len()
        ));
    }
    for table in tables {
        if table.offset >= table.rows || table.rows > MAX_ROWS {
            return Err(format!(
                "a table of {} rows, read from row {} on",
                table.rows, table.offset
            ));
        }
    }
    Ok(())
}

fn check_gemm(gemm: &Gemm) -> Result<(), String> {
    // The width of a GEMM over the vocabulary is limited like the rows of a table.
    for size in [gemm.n, gemm.k] {
        if !(1..=MAX_ROWS).contains(&size) {
            return Err(format!("a width of {size}, expected 1 to {MAX_ROWS}"));
        }
    }
    if !Tile::candidates(gemm.dtype).contains(&gemm.tile) {
        return Err(format!("{:?} is not a tile for {}", gemm.tile, gemm.dtype));
    }
    Ok(())
}
