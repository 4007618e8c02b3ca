//! The prefix-sum packing of a padded batch (ByteTransformer III.D, figure 4).

use serde::{Deserialize, Serialize};

/// `mask [batch, longest]`, `padded_ids`, `padded_types [batch, longest]` → `cu_lens [batch + 1]`,
/// `pair_offsets [batch + 1]`, `ids`, `types`, `positions [tokens]`. One warp per sentence.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Pack;
