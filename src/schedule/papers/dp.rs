//! TurboTransformers' batch scheduler (section 5, algorithm 3).

use crate::schedule::{Costs, Layout, Micros, costs::equal};

/// Partitions ascending lengths into consecutive runs that minimize the total time. Each run is a padded batch of at most `most` requests
/// and `bytes` bytes. Returns the number of requests of each run, or `None` if `most` is 0 or a single request needs more than `bytes`
/// bytes.
///
/// Let `states[i]` be the minimum time of the first `i` requests. Then `states[i] = min over k of states[i − k] + time(k sequences of
/// lens[i − 1] tokens)`. This is equation 2 of the paper, except that the paper's cost table holds the time per request. Backtracking
/// continues with the request before each run. The listing in the paper continues one request earlier and would lose a request.
pub fn partition(lens: &[u32], most: usize, bytes: u64, costs: &dyn Costs) -> Option<Vec<usize>> {
    let mut states = vec![0_u64; lens.len() + 1];
    let mut taken = vec![0_usize; lens.len() + 1];
    for (at, &len) in lens.iter().enumerate() {
        let i = at + 1;
        let mut least = u64::MAX;
        for k in 1..=most.min(i) {
            let extents = equal(k as u64, u64::from(len));
            if costs.bytes(Layout::Padded, &extents) > bytes {
                break;
            }
            let Micros(time) = costs.time(Layout::Padded, &extents);
            let total = states[i - k].saturating_add(time);
            if total < least || taken[i] == 0 {
                (least, taken[i]) = (total, k);
            }
        }
        if taken[i] == 0 {
            return None;
        }
        states[i] = least;
    }
    let mut runs = Vec::new();
    let mut i = lens.len();
    while i > 0 {
        runs.push(taken[i]);
        i -= taken[i];
    }
    runs.reverse();
    Some(runs)
}
