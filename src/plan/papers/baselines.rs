//! Three baseline allocators: the published TurboTransformers algorithm, a fresh arena per request,
//! and one plan for a declared maximum.

use crate::plan::error::check_records;
use crate::plan::pack::{self, Bin};
use crate::plan::{
    Allocator, Plan, PlanError, RequestStats, UsageRecord, append_chunk, lower_bound, release,
};

/// TurboTransformers 4.2, algorithms 1 and 2; only errors in the listing are corrected. Tensors are placed in order of descending size.
/// Each tensor goes into the first chunk with a large enough gap, and into the smallest such gap of this chunk. If no chunk has such a gap,
/// the tensor goes into a new chunk of max(2 MiB, 1.2 × its size). Chunks that a plan does not use are released at once.
#[derive(Clone, Debug, Default)]
pub struct Turbo {
    held: Vec<u64>,
    /// Chunk ids in order of creation: the paper's `chunk_list`.
    list: Vec<usize>,
    stats: RequestStats,
}

impl Turbo {
    const DEFAULT_CHUNK: u64 = 2 << 20;

    /// Creates an allocator without chunks.
    pub fn new() -> Self {
        Self::default()
    }

    /// Computes max(`DEFAULT_CHUNK_SIZE`, `K_SCALE` × `bytes`) in integers.
    fn chunk_bytes(bytes: u64) -> u64 {
        crate::plan::aligned(bytes + bytes.div_ceil(5)).max(Self::DEFAULT_CHUNK)
    }
}

impl Allocator for Turbo {
    fn name(&self) -> &'static str {
        "turbo"
    }

    fn plan(&mut self, records: &[UsageRecord]) -> Result<Plan, PlanError> {
        check_records(records)?;
        let before = self.held.clone();
        let mut items = pack::items(records);
        pack::sort_by_size(&mut items);
        let mut bins: Vec<Bin> = self
            .list
            .iter()
            .map(|&id| Bin::new(self.held[id]))
            .collect();
        let mut places = vec![None; records.len()];
        for item in &items {
            let gap = |(at, bin): (usize, &Bin)| bin.find_gap(item).map(|offset| (at, offset));
            let (at, offset) = bins.iter().enumerate().find_map(gap).unwrap_or_else(|| {
                let bytes = Self::chunk_bytes(item.size);
                bins.push(Bin::new(bytes));
                self.list.push(append_chunk(&mut self.held, bytes));
                (bins.len() - 1, 0)
            });
            bins[at].place(item, offset);
            places[item.record] = Some((self.list[at], offset));
        }
        if items.is_empty() && !records.is_empty() && self.list.is_empty() {
            self.list
                .push(append_chunk(&mut self.held, Self::DEFAULT_CHUNK));
        }
        let plan = Plan::new(&places, &self.held);
        self.list.retain(|&id| plan.chunks[id] > 0);
        self.held.clone_from(&plan.chunks);
        self.stats = RequestStats::new(&plan, &before, &self.held);
        Ok(plan)
    }

    fn held(&self) -> &[u64] {
        &self.held
    }

    fn last_request(&self) -> RequestStats {
        self.stats
    }

    fn release_all(&mut self) -> u64 {
        self.list.clear();
        release(&mut self.held, &mut self.stats)
    }
}

/// Greedy by Size for Offset Calculation (Pisarchyk and Lee 2020, section 5.2): an arena of exactly the size that a request needs is
/// allocated for the request and released before the next one. Two chunk ids alternate, so that every request has a new arena even if the
/// previous one had the same size.
#[derive(Clone, Debug, Default)]
pub struct Gsoc {
    held: Vec<u64>,
    stats: RequestStats,
}

impl Gsoc {
    /// Creates an allocator without chunks.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Allocator for Gsoc {
    fn name(&self) -> &'static str {
        "gsoc"
    }

    fn plan(&mut self, records: &[UsageRecord]) -> Result<Plan, PlanError> {
        let (mut places, bytes) = greedy_arena(records)?;
        let before = std::mem::take(&mut self.held);
        if !records.is_empty() {
            let id = usize::from(before.first().is_some_and(|&bytes| bytes > 0));
            self.held = vec![0; id + 1];
            self.held[id] = bytes;
            for (chunk, _) in places.iter_mut().flatten() {
                *chunk = id;
            }
        }
        let plan = Plan::new(&places, &self.held);
        self.stats = RequestStats::new(&plan, &before, &self.held);
        Ok(plan)
    }

    fn held(&self) -> &[u64] {
        &self.held
    }

    fn last_request(&self) -> RequestStats {
        self.stats
    }

    fn release_all(&mut self) -> u64 {
        release(&mut self.held, &mut self.stats)
    }
}

/// Places all records in one arena, greedily by size. Returns the places and the size of the arena. The size is at least
/// [`ALIGNMENT`](crate::plan::ALIGNMENT), so that records of zero bytes have an address.
#[expect(
    clippy::type_complexity,
    reason = "the only caller destructures the pair"
)]
fn greedy_arena(records: &[UsageRecord]) -> Result<(Vec<Option<(usize, u64)>>, u64), PlanError> {
    check_records(records)?;
    let mut items = pack::items(records);
    pack::sort_by_size(&mut items);
    let mut arena = Bin::new(u64::MAX);
    let mut places = vec![None; records.len()];
    for item in &items {
        if let Some(offset) = arena.find_gap(item) {
            arena.place(item, offset);
            places[item.record] = Some((0, offset));
        }
    }
    Ok((places, arena.top.max(crate::plan::ALIGNMENT)))
}

/// Memory planning of LightSeq (2.3): memory is planned once, for the largest declared request. Results that are never alive at the same
/// time share bytes. Nothing is allocated afterwards.
#[derive(Clone, Debug)]
pub struct Maximum {
    declared: Vec<UsageRecord>,
    plan: Plan,
    held: Vec<u64>,
    stats: RequestStats,
}

impl Maximum {
    /// Plans the records of the largest request. The memory exists from the first request on.
    ///
    /// # Errors
    /// Returns an error if [`Allocator::plan`] would return one for these records.
    pub fn new(declared: &[UsageRecord]) -> Result<Self, PlanError> {
        let (places, bytes) = greedy_arena(declared)?;
        let arena = if declared.is_empty() {
            Vec::new()
        } else {
            vec![bytes]
        };
        Ok(Maximum {
            plan: Plan::new(&places, &arena),
            declared: declared.to_vec(),
            held: Vec::new(),
            stats: RequestStats::default(),
        })
    }

    /// Returns the [`lower_bound`] of the declared maximum.
    pub fn declared_lower_bound(&self) -> u64 {
        lower_bound(&self.declared)
    }
}

impl Allocator for Maximum {
    fn name(&self) -> &'static str {
        "maximum"
    }

    /// # Errors
    /// Returns an error if the request belongs to another program, or if it needs more memory than was declared.
    fn plan(&mut self, records: &[UsageRecord]) -> Result<Plan, PlanError> {
        check_records(records)?;
        if records.len() != self.declared.len() {
            return Err(PlanError::MaximumCount {
                declared: self.declared.len(),
                found: records.len(),
            });
        }
        for (record, (declared, found)) in self.declared.iter().zip(records).enumerate() {
            let lifetime = |usage: &UsageRecord| (usage.first_op, usage.last_op);
            if lifetime(declared) != lifetime(found) {
                return Err(PlanError::MaximumLifetime {
                    record,
                    declared: lifetime(declared),
                    found: lifetime(found),
                });
            }
            if found.bytes > declared.bytes {
                return Err(PlanError::MaximumBytes {
                    record,
                    declared: declared.bytes,
                    found: found.bytes,
                });
            }
        }
        let before = std::mem::replace(&mut self.held, self.plan.chunks.clone());
        self.stats = RequestStats::new(&self.plan, &before, &self.held);
        Ok(self.plan.clone())
    }

    fn held(&self) -> &[u64] {
        &self.held
    }

    fn last_request(&self) -> RequestStats {
        self.stats
    }

    /// Keeps the plan. The next request allocates the memory again.
    fn release_all(&mut self) -> u64 {
        release(&mut self.held, &mut self.stats)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn record(first_op: u32, last_op: u32, bytes: u64) -> UsageRecord {
        UsageRecord {
            first_op,
            last_op,
            bytes,
        }
    }

    #[test]
    fn turbo_allocates_chunks_of_2_mib_or_20_percent_headroom_and_releases_them_at_once() {
        let mut turbo = Turbo::new();
        let plan = turbo
            .plan(&[
                record(0, 1, 10 * MIB),
                record(0, 1, 2 * MIB),
                record(1, 1, 64),
            ])
            .unwrap();
        assert_eq!(turbo.held(), [12 * MIB, 2 * MIB]);
        assert_eq!(plan.placements[1].offset, 10 * MIB);
        assert_eq!(plan.placements[2].chunk, 1);
        turbo.plan(&[record(0, 1, 12 * MIB)]).unwrap();
        assert_eq!(turbo.held(), [12 * MIB, 0]);
        assert_eq!(turbo.last_request().released, 2 * MIB);
        assert_eq!(turbo.last_request().newly_allocated, 0);
    }

    #[test]
    fn gsoc_allocates_exactly_the_arena_at_every_request() {
        let mut gsoc = Gsoc::new();
        let records = [record(0, 1, 1000), record(1, 2, 300), record(2, 3, 1000)];
        for (released, held) in [(0, &[1536][..]), (1536, &[0, 1536]), (1536, &[1536])] {
            gsoc.plan(&records).unwrap().validate(&records).unwrap();
            assert_eq!(gsoc.held(), held);
            let stats = RequestStats {
                footprint: 1536,
                newly_allocated: 1536,
                released,
                held: 1536,
            };
            assert_eq!(gsoc.last_request(), stats);
        }
    }

    #[test]
    fn the_maximum_is_allocated_once_and_dead_tensors_share_it() {
        let declared = [
            record(0, 1, 4 * MIB),
            record(1, 2, MIB),
            record(2, 3, 4 * MIB),
        ];
        let mut maximum = Maximum::new(&declared).unwrap();
        assert_eq!(maximum.declared_lower_bound(), 5 * MIB);
        for newly_allocated in [5 * MIB, 0, 0] {
            let shorter = declared.map(|usage| UsageRecord {
                bytes: usage.bytes / 2,
                ..usage
            });
            maximum.plan(&shorter).unwrap().validate(&shorter).unwrap();
            assert_eq!(maximum.last_request().newly_allocated, newly_allocated);
            assert_eq!(maximum.last_request().held, 5 * MIB);
        }
    }

    #[test]
    fn a_request_beyond_the_declared_maximum_is_rejected() {
        let mut maximum = Maximum::new(&[record(0, 1, 1024), record(1, 2, 512)]).unwrap();
        let mut refused = |records: &[UsageRecord]| maximum.plan(records).unwrap_err().to_string();
        assert_eq!(
            refused(&[record(0, 1, 1024), record(1, 2, 513)]),
            "tensor 1 needs 513 bytes, more than the 512 of the declared maximum: declare a larger \
             maximum, or send a smaller batch"
        );
        assert_eq!(
            refused(&[record(0, 1, 1024)]),
            "the request has 1 tensors, but the declared maximum has 2: declare the \
             maximum with the records of the same program"
        );
        assert_eq!(
            refused(&[record(0, 2, 1024), record(1, 2, 512)]),
            "tensor 0 is alive at operators (0, 2), but at (0, 1) in the declared maximum: declare \
             the maximum with the records of the same program"
        );
    }
}
