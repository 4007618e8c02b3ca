//! The largest logits of a row.

/// Returns the `k` largest logits above −∞ with their ids, in descending order; ties go to the lower id. Returns fewer than `k` if the row
/// has fewer logits above −∞.
///
/// The selection has two stages (LightSeq, Wang et al. 2021, section 2.2: hierarchical auto-regressive search). The row is divided into 2k
/// groups. The k-th largest of the groups' maxima is a lower bound on the k-th largest logit, so logits below this bound need not be
/// sorted.
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
    // A logit equal to the bound may be the k-th largest.
    let mut left: Vec<(u32, f32)> = of_row
        .filter(|&(_, x)| x >= bound && x > f32::NEG_INFINITY)
        .collect();
    left.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    left.truncate(k);
    left
}
