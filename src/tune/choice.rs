use std::fmt;

use serde::{Deserialize, Serialize};

use crate::kernels::{
    attention::{MhaTile, SoftmaxForm},
    gemm::{OneTile, SkinnyTile, SplitKTile, Tile, WgmmaTile},
    layernorm::Teams,
};

/// One of the kernels that solve a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Choice {
    Tile(Tile),
    /// On Hopper.
    Wgmma(WgmmaTile),
    /// On Hopper, one tile a block.
    OneTile(OneTile),
    /// On Hopper, for few rows.
    SplitK(SplitKTile),
    /// On Hopper, for the fewest rows.
    Skinny(SkinnyTile),
    /// For sequences of at most `max_len`.
    MhaShort {
        max_len: u32,
    },
    MhaOnline,
    /// On Hopper.
    MhaWgmma(MhaTile),
    /// Three launches, with the scores in memory.
    MhaGrouped,
    /// How rows are shared out among warps.
    Teams(Teams),
    /// How rows of scores are spread over lanes.
    Softmax(SoftmaxForm),
    /// On Hopper: a linear layer and the LayerNorm behind it in one launch.
    Joined(WgmmaTile),
    /// The two in launches of their own, each as its own problem says.
    Apart,
}

impl Choice {
    /// The largest size that it serves; `None` where it serves all.
    pub fn most(self) -> Option<u64> {
        match self {
            Choice::MhaShort { max_len } => Some(max_len.into()),
            Choice::OneTile(_) => Some(OneTile::MOST_ROWS),
            Choice::SplitK(tile) => Some(tile.most_rows()),
            Choice::Skinny(tile) => Some(tile.most_rows()),
            Choice::Softmax(form) => form.max_len().map(u64::from),
            Choice::Tile(_)
            | Choice::Wgmma(_)
            | Choice::MhaOnline
            | Choice::MhaWgmma(_)
            | Choice::MhaGrouped
            | Choice::Teams(_)
            | Choice::Joined(_)
            | Choice::Apart => None,
        }
    }

    /// Warps or lanes that share rows, and rows that they take together.
    pub(super) fn sharing(self) -> Option<[u32; 2]> {
        match self {
            Choice::Teams(Teams { warps, x_rows }) => Some([warps, x_rows]),
            Choice::Softmax(SoftmaxForm::Held { lanes, x_rows, .. }) => Some([lanes, x_rows]),
            _ => None,
        }
    }
}

/// As in symbols.
impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Choice::Tile(t) => write!(
                f,
                "t{}x{}x{}_w{}x{}_s{}",
                t.m, t.n, t.k, t.warps_m, t.warps_n, t.stages
            ),
            Choice::Wgmma(t) => f.write_str(&t.name()),
            Choice::OneTile(t) => f.write_str(&t.name()),
            Choice::SplitK(t) => f.write_str(&t.name()),
            Choice::Skinny(t) => f.write_str(&t.name()),
            Choice::MhaShort { max_len } => write!(f, "mha_short_l{max_len}"),
            Choice::MhaOnline => f.write_str("mha_online"),
            Choice::MhaWgmma(t) => write!(f, "mha_wgmma{}", t.name()),
            Choice::MhaGrouped => f.write_str("mha_grouped"),
            Choice::Teams(teams) => write!(f, "warps{}_x{}", teams.warps, teams.x_rows),
            Choice::Softmax(SoftmaxForm::Held {
                lanes,
                x_rows,
                max_len,
            }) => write!(f, "l{max_len}_lanes{lanes}_x{x_rows}"),
            Choice::Softmax(SoftmaxForm::Streamed) => f.write_str("streamed"),
            Choice::Joined(t) => write!(f, "joined_{}", t.name()),
            Choice::Apart => f.write_str("apart"),
        }
    }
}
