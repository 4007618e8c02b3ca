//! Packing of lifetimes into chunks: a special case of two-dimensional strip packing, which is NP-hard. Tensors are placed one after the
//! other, each in the best gap between tensors that are already placed (TurboTransformers 4.2, algorithm 2). Packings differ in the order
//! of the tensors; [`search`] returns the best of several.

use super::{UsageRecord, aligned};

/// One tensor to place. Its size is a positive multiple of the alignment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    /// Index of its usage record.
    pub record: usize,
    pub first: u32,
    pub last: u32,
    pub size: u64,
}

/// Returns the tensors of `records` that need a place: all except those of zero bytes.
pub(super) fn items(records: &[UsageRecord]) -> Vec<Item> {
    records
        .iter()
        .enumerate()
        .filter(|(_, usage)| usage.bytes > 0)
        .map(|(record, usage)| Item {
            record,
            first: usage.first_op,
            last: usage.last_op,
            size: aligned(usage.bytes),
        })
        .collect()
}

/// Sorts by descending size (TurboTransformers, algorithm 1, line 1). Among equal sizes, tensors with longer lifetimes come first, then
/// those with lower record indices, so that the order is deterministic.
pub(super) fn sort_by_size(items: &mut [Item]) {
    items.sort_unstable_by_key(|item| (!item.size, !(item.last - item.first), item.record));
}

/// A tensor placed in a bin.
#[derive(Clone, Copy, Debug)]
struct Placed {
    offset: u64,
    end: u64,
    first: u32,
    last: u32,
}

/// A chunk being filled.
#[derive(Clone, Debug)]
pub(super) struct Bin {
    pub capacity: u64,
    /// Placed tensors, sorted by offset for the search for gaps.
    placed: Vec<Placed>,
    /// End of the highest tensor; 0 while the bin is empty.
    pub top: u64,
}

impl Bin {
    pub fn new(capacity: u64) -> Self {
        Bin {
            capacity,
            placed: Vec::new(),
            top: 0,
        }
    }

    /// Returns the offset of the smallest gap that fits `item`, or else the end of the highest tensor, if `item` fits above it. Only
    /// tensors whose lifetimes overlap with that of `item` are in its way. This is `FindGapFromChunk` (TurboTransformers, algorithm 2) with
    /// two corrections: the listing in the paper reverses the comparison with the space at the end of the chunk, and it does not say that
    /// tensors must be visited in order of offset.
    pub fn find_gap(&self, item: &Item) -> Option<u64> {
        let mut smallest_gap = u64::MAX;
        let mut best_offset = None;
        let mut prev_end = 0;
        for x in &self.placed {
            if x.first <= item.last && item.first <= x.last {
                if x.offset > prev_end {
                    let gap = x.offset - prev_end;
                    if gap >= item.size && gap < smallest_gap {
                        smallest_gap = gap;
                        best_offset = Some(prev_end);
                    }
                }
                prev_end = prev_end.max(x.end);
            }
        }
        // No tensor ends above the capacity, so this subtraction cannot overflow.
        let room = self.capacity - prev_end;
        best_offset.or_else(|| (room >= item.size).then_some(prev_end))
    }

    pub fn place(&mut self, item: &Item, offset: u64) {
        let end = offset + item.size;
        let at = self.placed.partition_point(|x| x.offset <= offset);
        self.placed.insert(
            at,
            Placed {
                offset,
                end,
                first: item.first,
                last: item.last,
            },
        );
        self.top = self.top.max(end);
    }

    fn clear(&mut self, capacity: u64) {
        self.capacity = capacity;
        self.placed.clear();
        self.top = 0;
    }
}

/// The load over time: the bytes alive at each operator where a lifetime starts. Between these operators, the load only decreases.
struct Load {
    ops: Vec<u32>,
    bytes: Vec<u64>,
}

impl Load {
    fn new(items: &[Item]) -> Self {
        let mut ops: Vec<u32> = items.iter().map(|item| item.first).collect();
        ops.sort_unstable();
        ops.dedup();
        let mut bytes = vec![0; ops.len()];
        for item in items {
            let from = ops.partition_point(|&op| op < item.first);
            for (op, bytes) in ops[from..].iter().zip(&mut bytes[from..]) {
                if *op > item.last {
                    break;
                }
                *bytes += item.size;
            }
        }
        Load { ops, bytes }
    }

    fn peak(&self) -> u64 {
        self.bytes.iter().copied().max().unwrap_or(0)
    }

    /// Returns the highest load during the lifetime of `item`.
    fn peak_during(&self, item: &Item) -> u64 {
        let from = self.ops.partition_point(|&op| op < item.first);
        let to = self.ops.partition_point(|&op| op <= item.last);
        self.bytes[from..to].iter().copied().max().unwrap_or(0)
    }
}

/// A packing of all items into the given bins and one open bin, which grows as needed.
#[derive(Clone, Debug)]
pub(super) struct Packing {
    /// Bin and offset of each item, by record index; `None` for a record without an item. The open bin comes after all given bins.
    pub places: Vec<Option<(usize, u64)>>,
    /// Height of the open bin, in bytes.
    pub open_top: u64,
}

/// Max number of times that [`search`] examines a tensor. Each time takes about a nanosecond. For n items, the limit is raised to 2n² if
/// that is larger; this is enough for about four packings. The limit is a count instead of a time, so that plans are equal on all machines.
const EFFORT: usize = 40_000;

/// Packs the items into bins of the given capacities and one open bin after them, and minimizes the
/// height of the open bin.
///
/// The first attempt uses the paper's order, largest first. For most transformer models it reaches the lower bound, and the search ends.
/// Otherwise, four other orders are tried. The best packing is then refined by squeaky-wheel optimization (Joslin and Clements 1999): each
/// attempt must stay below the height of the best packing so far, and the first tensor that does not fit moves to the front of the order.
/// The search ends when [`EFFORT`] is used up.
pub(super) fn search(items: &[Item], n_records: usize, capacities: &[u64]) -> Packing {
    let load = Load::new(items);
    let floor = load.peak().saturating_sub(capacities.iter().sum());
    let mut bins: Vec<Bin> = capacities
        .iter()
        .map(|&capacity| Bin::new(capacity))
        .collect();
    bins.push(Bin::new(u64::MAX));
    let mut effort = EFFORT.max(2 * items.len() * items.len());
    let mut best: Option<Packing> = None;
    let mut best_order = Vec::new();
    let lifetime = |item: &Item| u64::from(item.last - item.first) + 1;

    let mut order = items.to_vec();
    for which in 0..5 {
        match which {
            0 => sort_by_size(&mut order),
            // Largest area of bytes × operators first.
            1 => order.sort_by_key(|item| !(u128::from(item.size) * u128::from(lifetime(item)))),
            // Greedy by breadth (Pisarchyk and Lee 2020, section 5.1): tensors of the operator with
            // the highest load first.
            2 => order.sort_by_cached_key(|item| (!load.peak_during(item), !item.size)),
            // Longest lifetime first: long-lived tensors are at the bottom, and short-lived tensors fill the gaps.
            3 => order.sort_by_key(|item| (!lifetime(item), !item.size)),
            // In order of the first operator.
            _ => order.sort_by_key(|item| (item.first, !lifetime(item), !item.size)),
        }
        let limit = best.as_ref().map_or(u64::MAX, |best| best.open_top - 1);
        if let Ok(packing) = pack(&order, n_records, &mut bins, limit, &mut effort) {
            let done = packing.open_top <= floor;
            best = Some(packing);
            best_order.clone_from(&order);
            if done {
                break;
            }
        }
        if effort == 0 {
            break;
        }
    }
    let mut best = best.expect("the first order is packed into an open bin without a limit");
    order = best_order;
    while best.open_top > floor && effort > 0 {
        match pack(&order, n_records, &mut bins, best.open_top - 1, &mut effort) {
            Ok(packing) => best = packing,
            Err(0) => break,
            Err(squeaky) => order[..=squeaky].rotate_right(1),
        }
    }
    best
}

/// Places the items in the given order, each in the first bin where it fits (TurboTransformers, algorithm 1, lines 2 to 12). The last bin
/// has a capacity of `limit` bytes.
///
/// # Errors
/// Returns an error if an item fits in no bin: the position in `order` of the first such item.
fn pack(
    order: &[Item],
    n_records: usize,
    bins: &mut [Bin],
    limit: u64,
    effort: &mut usize,
) -> Result<Packing, usize> {
    // Each attempt costs at least one unit per item, so that a series of attempts that fail early also uses up the effort.
    *effort = effort.saturating_sub(order.len());
    let open = bins.len() - 1;
    for (index, bin) in bins.iter_mut().enumerate() {
        bin.clear(if index == open { limit } else { bin.capacity });
    }
    let mut places = vec![None; n_records];
    for (position, item) in order.iter().enumerate() {
        let place = bins.iter().enumerate().find_map(|(index, bin)| {
            *effort = effort.saturating_sub(bin.placed.len() + 4);
            bin.find_gap(item).map(|offset| (index, offset))
        });
        let (bin, offset) = place.ok_or(position)?;
        bins[bin].place(item, offset);
        places[item.record] = Some((bin, offset));
    }
    Ok(Packing {
        places,
        open_top: bins[open].top,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(first: u32, last: u32, size: u64) -> Item {
        Item {
            record: 0,
            first,
            last,
            size,
        }
    }

    #[test]
    fn a_tensor_is_appended_only_if_the_chunk_has_room() {
        let mut bin = Bin::new(1024);
        bin.place(&item(0, 9, 512), 0);
        // The paper's listing has a reversed comparison: it would accept 768 and reject 256.
        assert_eq!(bin.find_gap(&item(0, 9, 256)), Some(512));
        assert_eq!(bin.find_gap(&item(0, 9, 512)), Some(512));
        assert_eq!(bin.find_gap(&item(0, 9, 768)), None);
    }

    #[test]
    fn gaps_are_found_in_any_order_of_the_tensors() {
        let mut bin = Bin::new(2048);
        for offset in [1280, 0, 768] {
            bin.place(&item(0, 9, 256), offset);
        }
        // Gaps: 256..768, 1024..1280, 1536..2048.
        assert_eq!(
            bin.find_gap(&item(3, 3, 256)),
            Some(1024),
            "the smallest gap"
        );
        assert_eq!(
            bin.find_gap(&item(3, 3, 512)),
            Some(256),
            "the only gap before the end"
        );
        assert_eq!(
            bin.find_gap(&item(10, 12, 2048)),
            Some(0),
            "nothing else is alive"
        );
    }

    #[test]
    fn the_search_improves_on_largest_first() {
        let items: Vec<Item> = [
            (0, 1, 1024),
            (3, 4, 1024),
            (1, 2, 768),
            (2, 3, 768),
            (0, 4, 512),
        ]
        .into_iter()
        .enumerate()
        .map(|(record, (first, last, size))| Item {
            record,
            first,
            last,
            size,
        })
        .collect();
        let mut greedy = items.clone();
        sort_by_size(&mut greedy);
        let mut bins = [Bin::new(u64::MAX)];
        let greedy = pack(&greedy, items.len(), &mut bins, u64::MAX, &mut 0).unwrap();
        let lower_bound = Load::new(&items).peak();
        assert_eq!(lower_bound, 1024 + 768 + 512);
        assert!(greedy.open_top > lower_bound, "{greedy:?}");
        assert_eq!(search(&items, items.len(), &[]).open_top, lower_bound);
    }
}
