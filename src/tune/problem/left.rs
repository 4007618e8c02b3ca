//! Ranges of which others serve a part.

use crate::{kernels::gemm::RowRange, tune::Range};

/// Without the ranges, but the first and the last, of which others serve more than half. What serves the next
/// sizes serves these, too.
pub(super) fn mostly_left(ranges: Vec<Range>, others: &[RowRange]) -> Vec<Range> {
    let mut kept: Vec<Range> = Vec::new();
    let mut begin = 0;
    for range in ranges {
        if let (Some(end), false) = (range.up_to, kept.is_empty()) {
            let of = |&(above, up_to): &RowRange| {
                let end = up_to.map_or(end, |up_to| up_to.min(end));
                end.saturating_sub(above.max(begin))
            };
            if others.iter().map(of).sum::<u64>() > (end - begin) / 2 {
                continue;
            }
        }
        begin = range.up_to.unwrap_or(begin);
        match kept.last_mut() {
            Some(before) if before.choice == range.choice => before.up_to = range.up_to,
            _ => kept.push(range),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{kernels::layernorm::Teams, tune::Choice};

    fn range(up_to: Option<u64>, warps: u32) -> Range {
        let choice = Choice::Teams(Teams { warps, x_rows: 1 });
        Range { up_to, choice }
    }

    #[test]
    fn a_range_is_left_out_where_others_serve_more_than_half_of_it() {
        let all = || vec![range(Some(100), 1), range(Some(300), 2), range(None, 3)];
        assert_eq!(mostly_left(all(), &[]), all());
        assert_eq!(mostly_left(all(), &[(200, Some(400))]), all());
        let without = [range(Some(100), 1), range(None, 3)];
        assert_eq!(mostly_left(all(), &[(199, Some(400))]), without);
        assert_eq!(
            mostly_left(all(), &[(100, Some(150)), (240, None)]),
            without
        );
        // The first and the last serve the fewest and the most.
        assert_eq!(mostly_left(all(), &[(0, Some(100)), (300, None)]), all());
    }

    #[test]
    fn neighbours_that_are_then_equal_are_one() {
        let all = vec![range(Some(100), 1), range(Some(300), 2), range(None, 1)];
        assert_eq!(mostly_left(all, &[(100, Some(300))]), [range(None, 1)]);
    }
}
