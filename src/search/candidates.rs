//! The largest logits of a row.

/// The `k` largest with their ids, the largest first and of equal ones the lowest id: as many as there are above −∞.
///
/// In two stages (LightSeq 2.2, hierarchical auto-regressive search): the k-th largest of the maxima of 2k groups bounds the
/// k-th largest of all from below, so that what is below it need not be sorted.
pub fn largest(row: &[f32], k: usize) -> Vec<(u32, f32)> {
    let k = k.min(row.len());
    if k == 0 {
        return Vec::new();
    }
    let groups = 2 * k;
    let mut maxima = vec![f32::NEG_INFINITY; groups.min(row.len())];
    for group in row.chunks(groups) {
        for (top, &x) in maxima.iter_mut().zip(group) {
            *top = top.max(x);
        }
    }
    let bound = match maxima.len() >= k {
        true => {
            *maxima
                .select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a))
                .1
        }
        false => f32::NEG_INFINITY,
    };
    let of_row = (0u32..).zip(row.iter().copied());
    // The bound itself may be the k-th largest.
    let mut left: Vec<(u32, f32)> = of_row
        .filter(|&(_, x)| x >= bound && x > f32::NEG_INFINITY)
        .collect();
    left.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    left.truncate(k);
    left
}
