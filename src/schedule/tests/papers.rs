//! Compares the papers' algorithms with direct implementations.

use proptest::prelude::*;

use super::*;
use crate::schedule::{
    costs::equal,
    papers::{Index, das, first_fit, slotted},
};

/// Returns the total time of padded batches of consecutive requests. `runs` has the number of requests of each batch.
fn total(lens: &[u32], runs: &[usize], costs: &dyn Costs) -> u64 {
    let mut at = 0;
    runs.iter()
        .map(|&n| {
            at += n;
            let extents = equal(n as u64, u64::from(lens[at - 1]));
            costs.time(Layout::Padded, &extents).0
        })
        .sum()
}

/// Returns all ways to cut `n` consecutive requests into runs of at most `most` requests. A run is given by its number of requests.
fn compositions(n: usize, most: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![Vec::new()];
    }
    (1..=most.min(n))
        .flat_map(|first| {
            compositions(n - first, most)
                .into_iter()
                .map(move |mut rest| {
                    rest.insert(0, first);
                    rest
                })
        })
        .collect()
}

#[test]
fn the_papers_five_requests_run_in_three_batches() {
    // TurboTransformers, figure 9: requests of 17, 18, 52, 63 and 77 tokens. The constant cost of a batch equals that of about twelve
    // tokens.
    let costs = Straight {
        batch: 12,
        ..Straight::default()
    };
    let lens = [17, 18, 52, 63, 77];
    let runs = partition(&lens, 20, u64::MAX, &costs).unwrap();
    assert_eq!(runs, [2, 2, 1]);
    let one = total(&lens, &[5], &costs);
    let none = total(&lens, &[1; 5], &costs);
    let three = total(&lens, &runs, &costs);
    // One batch of all requests takes longer than a separate batch for each request, as in the paper.
    assert!(three < none && none < one, "{three} {none} {one}");
}

#[test]
fn the_listing_of_turbos_scheduler_would_lose_a_request() {
    // Line 25 of algorithm 3 sets `i = start_idx − 1`. With this line, the batches [0, 2) and [2, 4) would become [2, 4) and [0, 1).
    let costs = Straight {
        batch: 30,
        ..Straight::default()
    };
    let lens = [10, 10, 200, 200];
    let runs = partition(&lens, 20, u64::MAX, &costs).unwrap();
    assert_eq!(runs, [2, 2]);
}

proptest! {
    #[test]
    fn turbos_partition_is_optimal(
        mut lens in prop::collection::vec(1_u32..300, 1..=10),
        batch in 0_u64..500,
        most in 1_usize..=10,
    ) {
        lens.sort_unstable();
        let costs = Straight { batch, ..Straight::default() };
        let runs = partition(&lens, most, u64::MAX, &costs).unwrap();
        prop_assert_eq!(runs.iter().sum::<usize>(), lens.len());
        prop_assert!(runs.iter().all(|&n| (1..=most).contains(&n)));
        let best = compositions(lens.len(), most);
        let best = best.iter().map(|runs| total(&lens, runs, &costs)).min();
        prop_assert_eq!(Some(total(&lens, &runs, &costs)), best);
    }

    #[test]
    fn turbos_partition_respects_the_memory(
        mut lens in prop::collection::vec(1_u32..300, 1..=30),
        tokens in 299_u64..900,
    ) {
        lens.sort_unstable();
        let costs = Straight::default();
        let runs = partition(&lens, 20, tokens * 1024, &costs).unwrap();
        let mut at = 0;
        for n in runs {
            at += n;
            prop_assert!(u64::from(lens[at - 1]) * n as u64 <= tokens);
        }
        prop_assert!(partition(&lens, 20, 10, &costs).is_none());
    }

    #[test]
    fn das_fills_rows_as_the_papers_listing_does(
        lens in prop::collection::vec(1_u32..60, 1..40),
        deadlines in prop::collection::vec(0_u64..50, 40),
        length in 60_u32..150,
        rows in 1_u32..4,
    ) {
        let waiting = with_deadlines(&lens, &deadlines);
        let mut index = filled(&waiting);
        let found: Vec<Vec<u64>> = das(&mut index, rows, length, 0.5)
            .into_iter()
            .map(|row| row.chosen.into_iter().map(|(_, (_, id))| id).collect())
            .collect();
        prop_assert_eq!(found, by_the_listing(&waiting, rows, length));
    }

    #[test]
    fn das_has_a_fifth_of_the_best_utility_of_a_batch(
        lens in prop::collection::vec(1_u32..60, 1..9),
        deadlines in prop::collection::vec(0_u64..50, 9),
        length in 60_u32..100,
        rows in 1_u32..3,
    ) {
        let waiting = with_deadlines(&lens, &deadlines);
        let chosen = das(&mut filled(&waiting), rows, length, 0.5);
        let chosen = chosen.iter().flat_map(|row| &row.chosen);
        let utility: f64 = chosen.map(|&(tokens, _)| 1.0 / f64::from(tokens)).sum();
        let best = optimum(&lens, &mut vec![length; rows as usize]);
        prop_assert!(utility >= best / 5.0, "{utility} of {best}");
    }

    #[test]
    fn das_online_has_a_fifth_of_the_best_utility(
        arrivals in prop::collection::vec((1_u32..40, 0_usize..3, 0_usize..3), 1..7),
        length in 40_u32..60,
    ) {
        // There are three time slots with one row each. In each of them, only the requests that have arrived are known.
        let mut index = Index::by_length();
        let mut utility = 0.0;
        for slot in 0..3 {
            for (id, &(tokens, at, within)) in arrivals.iter().enumerate() {
                if at == slot {
                    index.put(tokens, (Micros((at + within) as u64), id as u64));
                }
                // Expired requests are removed.
                if at + within < slot {
                    index.remove(tokens, (Micros((at + within) as u64), id as u64));
                }
            }
            for row in das(&mut index, 1, length, 0.5) {
                utility += row.chosen.iter().map(|c| 1.0 / f64::from(c.0)).sum::<f64>();
            }
        }
        let best = online_optimum(&arrivals, &mut [length; 3]);
        prop_assert!(utility >= best / 5.0 - 1e-9, "{utility} of {best}");
    }

    #[test]
    fn slots_are_as_long_as_the_longest_dominant_request_and_hold_their_requests(
        lens in prop::collection::vec(1_u32..60, 1..60),
        length in 60_u32..200,
    ) {
        let waiting = waiting(&lens);
        let rows = das(&mut filled(&waiting), 3, length, 0.5);
        let chosen: Vec<usize> = rows.iter().map(|row| row.chosen.len()).collect();
        let dominant = rows.iter().flat_map(|row| &row.chosen[..row.dominant]);
        let longest = dominant.map(|c| c.0).max().unwrap();
        let cut = slotted(rows, length);
        prop_assert_eq!(cut.slot, longest);
        for slots in &cut.rows {
            prop_assert_eq!(slots.len() as u32, length / cut.slot);
            for slot in slots {
                prop_assert!(slot.iter().map(|c| c.0).sum::<u32>() <= cut.slot);
            }
        }
        let n: usize = cut.rows.iter().flatten().map(Vec::len).sum();
        prop_assert_eq!(n + cut.left.len(), chosen.iter().sum::<usize>());
    }
}

fn with_deadlines(lens: &[u32], deadlines: &[u64]) -> Vec<Waiting> {
    let mut waiting = waiting(lens);
    for (waiting, &deadline) in waiting.iter_mut().zip(deadlines) {
        waiting.deadline = Some(Micros(deadline));
    }
    waiting
}

fn filled(waiting: &[Waiting]) -> Index {
    let mut index = Index::by_length();
    waiting.iter().for_each(|w| index.insert(w));
    index
}

/// Literal implementation of TCB's algorithm 1, except that selected requests leave the set of waiting requests (N_t). Ties are broken by
/// deadline, then by arrival.
fn by_the_listing(waiting: &[Waiting], rows: u32, length: u32) -> Vec<Vec<u64>> {
    let mut left: Vec<Waiting> = waiting.to_vec();
    let mut batch = Vec::new();
    for _ in 0..rows {
        let mut row: Vec<u64> = Vec::new();
        let mut room = length;
        left.sort_by_key(|w| (w.tokens, w.deadline, w.id));
        if left.iter().map(|w| w.tokens).sum::<u32>() <= length {
            row.extend(left.drain(..).map(|w| w.id));
        } else {
            let mut sum = 0;
            let s = left
                .iter()
                .take_while(|w| {
                    sum += w.tokens;
                    sum <= length
                })
                .count();
            let p = s.div_ceil(2);
            let dominant: Vec<Waiting> = left.drain(..p).collect();
            let mean = dominant
                .iter()
                .map(|w| 1.0 / f64::from(w.tokens))
                .sum::<f64>()
                / p as f64;
            for w in &dominant {
                room -= w.tokens;
                row.push(w.id);
            }
            let is_aware = |w: &Waiting| f64::from(w.tokens) <= (1.0 / (0.5 * mean)).floor();
            let (mut aware, mut rest): (Vec<Waiting>, Vec<Waiting>) =
                left.iter().copied().partition(is_aware);
            aware.sort_by_key(|w| (w.deadline, w.id));
            rest.sort_by_key(|w| (w.tokens, w.deadline, w.id));
            for w in aware.iter().chain(&rest) {
                if w.tokens <= room {
                    room -= w.tokens;
                    row.push(w.id);
                }
            }
            left.retain(|w| !row.contains(&w.id));
        }
        if row.is_empty() {
            break;
        }
        batch.push(row);
    }
    batch
}

/// Returns the maximum total utility of requests that fit into rows. `lens` are the lengths of the requests, and `rooms` are the free
/// tokens of the rows.
fn optimum(lens: &[u32], rooms: &mut Vec<u32>) -> f64 {
    let Some((&len, rest)) = lens.split_first() else {
        return 0.0;
    };
    let mut best = optimum(rest, rooms);
    for at in 0..rooms.len() {
        if rooms[at] >= len {
            rooms[at] -= len;
            best = best.max(1.0 / f64::from(len) + optimum(rest, rooms));
            rooms[at] += len;
        }
    }
    best
}

/// Returns the maximum total utility if each request runs in a time slot between its arrival and its deadline.
fn online_optimum(arrivals: &[(u32, usize, usize)], rooms: &mut [u32; 3]) -> f64 {
    let Some((&(len, at, within), rest)) = arrivals.split_first() else {
        return 0.0;
    };
    let mut best = online_optimum(rest, rooms);
    for slot in at..=(at + within).min(2) {
        if rooms[slot] >= len {
            rooms[slot] -= len;
            best = best.max(1.0 / f64::from(len) + online_optimum(rest, rooms));
            rooms[slot] += len;
        }
    }
    best
}

#[test]
fn first_fit_stops_at_the_first_request_without_room() {
    let order = [5_u32, 4, 6, 1, 9, 1].into_iter().zip(0..);
    let rows = first_fit(order, 2, 10);
    let ids: Vec<Vec<i32>> = rows
        .into_iter()
        .map(|row| row.into_iter().map(|(_, id)| id).collect())
        .collect();
    assert_eq!(ids, [vec![0, 1, 3], vec![2]]);
}

#[test]
fn lazy_waits_for_a_full_batch_a_timeout_or_half_of_the_latency() {
    let settings = Settings {
        most: 3,
        timeout: Micros(10_000),
        slo: Micros(10_000),
        ..Settings::default()
    };
    let costs = Straight::default();
    let decide = |lens: &[u32], now: u64| {
        let mut lazy = scheduler("lazy-naive", &settings).unwrap();
        lazy.decide(&View {
            now: Micros(now),
            waiting: waiting(lens).as_slice().into(),
            lanes: &[lane()],
            costs: &costs,
        })
    };
    // The target latency is 10 ms. A batch must finish within half of this latency and takes 200 µs, plus 200 µs for its tokens, so it
    // starts after 4.6 ms.
    let early = decide(&[100, 100], 0);
    assert!(early.run.is_empty());
    assert_eq!(early.wake, Some(Micros(4_600)));
    assert_eq!(decide(&[100, 100], 4_600).run.len(), 1);
    assert_eq!(decide(&[100, 100, 100], 0).run.len(), 1);
    let timeout = Settings {
        timeout: Micros(1_000),
        ..settings.clone()
    };
    let mut lazy = scheduler("lazy-dp", &timeout).unwrap();
    let decision = lazy.decide(&View {
        now: Micros(0),
        waiting: waiting(&[7]).as_slice().into(),
        lanes: &[lane()],
        costs: &costs,
    });
    assert_eq!(decision.wake, Some(Micros(1_000)));
}

#[test]
fn requests_join_slots_whose_requests_have_finished() {
    let settings = Settings {
        rows: 1,
        length: 40,
        ..Settings::default()
    };
    let mut das = scheduler("slotted-das", &settings).unwrap();
    let costs = Straight::default();
    let steps = |lens: &[u32]| -> Vec<Waiting> {
        let all = waiting(lens).into_iter();
        all.map(|w| Waiting { steps: 5, ..w }).collect()
    };
    let all = steps(&[10, 10, 10, 10, 8, 30]);
    let view = |waiting, in_flight| View {
        now: Micros(0),
        waiting,
        lanes: match in_flight {
            true => &[Lane {
                in_flight: 1,
                depth: 1,
                free_at: Micros(9),
                bytes: u64::MAX,
            }],
            false => &[Lane {
                in_flight: 0,
                depth: 1,
                free_at: Micros(0),
                bytes: u64::MAX,
            }],
        },
        costs: &costs,
    };
    let first = das.decide(&view(all.as_slice().into(), false));
    let layout = Layout::Rows {
        length: 40,
        slot: 10,
    };
    assert_eq!(first.run[0].layout, layout);
    assert_eq!(
        first.run[0].rows,
        vec![vec![4], vec![0], vec![1], vec![2]].into()
    );
    let rest: Vec<Waiting> = all
        .iter()
        .copied()
        .filter(|w| [3, 5].contains(&w.id))
        .collect();
    assert!(
        das.decide(&view(rest.as_slice().into(), true))
            .run
            .is_empty()
    );
    das.finished(&[0], 0);
    let joined = das.decide(&view(rest.as_slice().into(), true));
    assert_eq!(joined.run.len(), 1);
    assert!(joined.run[0].joins);
    assert_eq!(joined.run[0].rows, vec![vec![3]].into());
    // Requests with a single step all end with their batch, so a slot cannot be reused while they run.
    let mut other = scheduler("slotted-das", &settings).unwrap();
    let all = waiting(&[10, 10, 10]);
    let first = other.decide(&view(all[..1].into(), false));
    assert_eq!(first.run[0].rows.len(), 4);
    let second = other.decide(&view(all[1..].into(), true));
    assert!(second.run.is_empty(), "{second:?}");
    // The request of 30 tokens fits no slot and waits.
    das.finished(&[1, 2, 3, 4], 0);
    assert!(das.decide(&view(rest[1..].into(), true)).run.is_empty());
}
