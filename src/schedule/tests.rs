//! Properties of every scheduler, and the claims of the papers about their schedulers.

mod papers;
mod properties;

use super::*;

/// Linear costs in microseconds: `batch` for each batch, `token` for each token, and 1 for each million query-key pairs. The number of
/// tokens is rounded up to a multiple of `multiple`.
pub(super) struct Straight {
    pub batch: u64,
    pub token: u64,
    pub multiple: u64,
}

impl Default for Straight {
    fn default() -> Self {
        Self {
            batch: 200,
            token: 1,
            multiple: 1,
        }
    }
}

impl Costs for Straight {
    fn time(&self, _: Layout, extents: &crate::tensor::Extents) -> Micros {
        Micros(self.batch + self.token * extents.tokens + extents.pairs / 1_000_000)
    }

    fn bytes(&self, _: Layout, extents: &crate::tensor::Extents) -> u64 {
        extents.tokens * 1024
    }

    fn rounded(&self, tokens: u64) -> u64 {
        tokens.next_multiple_of(self.multiple)
    }
}

/// Creates requests with these lengths, which have all arrived at time 0.
pub(super) fn waiting(lens: &[u32]) -> Vec<Waiting> {
    lens.iter()
        .enumerate()
        .map(|(id, &tokens)| Waiting {
            id: id as u64,
            ..Waiting::new(tokens, Micros(0))
        })
        .collect()
}

pub(super) fn lane() -> Lane {
    Lane {
        in_flight: 0,
        depth: 2,
        free_at: Micros(0),
        bytes: u64::MAX,
    }
}

#[test]
fn an_unknown_scheduler_error_suggests_the_nearest_name_and_bad_settings_are_named() {
    let error = |name: &str, settings: &Settings| match scheduler(name, settings) {
        Ok(_) => "none".to_owned(),
        Err(error) => error.to_string(),
    };
    let usual = Settings::default();
    insta::assert_snapshot!(error("slotted_das", &usual), @"there is no scheduler `slotted_das` (did you mean `slotted-das`?); there are packed, no-batch, naive, dp, lazy-naive, lazy-dp, tnb, ttb, concat-fcfs, concat-sjf, concat-edf, concat-das, slotted-das");
    let settings = Settings {
        dominance: 1.0,
        ..usual.clone()
    };
    insta::assert_snapshot!(error("tnb", &settings), @"the share of requests selected by utility is 1; expected a number between 0 and 1, both excluded");
    let settings = Settings { rows: 0, ..usual };
    insta::assert_snapshot!(error("ttb", &settings), @"the number of rows is 0; expected at least 1");
}

#[test]
fn a_cost_table_interpolates_linearly_and_extrapolates_in_proportion() {
    let grid = Grid {
        x: vec![64.0, 1024.0],
        y: vec![16.0, 128.0],
        // The second value of the first row is measurement noise.
        values: vec![vec![100.0, 90.0], vec![1000.0, 1200.0]],
    };
    let table = CostTable {
        about: String::new(),
        packed: grid,
        padded: None,
        overhead: 5.0,
        bytes: Default::default(),
        multiple: 8,
    };
    let table = table.checked().unwrap();
    let time = |n: u64, len: u64| {
        let extents = super::costs::equal(n, len);
        table.time(Layout::Packed, &extents).0
    };
    assert_eq!(time(4, 16), 105);
    assert_eq!(time(1, 64), 105);
    assert_eq!(time(64, 16), 1005);
    assert_eq!(time(34, 16), 555);
    assert_eq!(time(8, 128), 1205);
    assert_eq!(time(16, 128), 2405);
    assert_eq!(time(1, 1), 105);
    assert_eq!(table.rounded(17), 24);
    assert_eq!(CostTable::parse(&table.to_ron().unwrap()).unwrap(), table);
}

#[test]
fn a_damaged_table_of_costs_is_told_by_the_field_that_is_wrong() {
    let table = |packed: &str, rest: &str| format!("(about: \"\", packed: ({packed}), {rest})");
    let sound = "x: [1, 2], y: [1], values: [[1.0], [2.0]]";
    assert!(CostTable::parse(&table(sound, "")).is_ok());
    let damaged = [
        "what".to_owned(),
        table("x: [2, 1], y: [1], values: [[1.0], [2.0]]", ""),
        table("x: [], y: [1], values: []", ""),
        table("x: [1, 2], y: [1], values: [[1.0]]", ""),
        table("x: [1, 2], y: [1], values: [[1.0], []]", ""),
        table("x: [1, 2], y: [1], values: [[1.0], [-2.0]]", ""),
        table("x: [1, 2], y: [1], values: [[1.0], [NaN]]", ""),
        table(sound, "overhead: -1.0"),
        table(sound, "multiple: 0"),
    ];
    let errors = damaged.map(|text| CostTable::parse(&text).unwrap_err().to_string());
    insta::assert_snapshot!(errors.join("\n"));
}

#[test]
fn the_state_keeps_the_remaining_requests_in_order() {
    /// Scheduler that runs the requests with the given ids in one batch.
    struct These(Vec<u64>);
    impl Scheduler for These {
        fn decide(&mut self, _: &View<'_>) -> Decision {
            let run = Planned {
                lane: 0,
                layout: Layout::Packed,
                rows: Rows::of_one(self.0.clone()),
                estimate: Micros(1),
                joins: false,
            };
            Decision {
                run: vec![run],
                ..Decision::default()
            }
        }
    }
    let mut scheduling = SchedulerState::new(&[1], 1);
    for tokens in 1..=8 {
        scheduling.arrive(Waiting::new(tokens, Micros(0)));
    }
    let ids = |scheduling: &SchedulerState| -> Vec<u64> {
        scheduling.waiting().iter().map(|w| w.id).collect()
    };
    let decide = |scheduling: &mut SchedulerState, ids: &[u64]| {
        scheduling.decide(Micros(0), &mut These(ids.to_vec()), &Straight::default())
    };
    decide(&mut scheduling, &[5, 1, 2]).unwrap();
    assert_eq!(ids(&scheduling), [0, 3, 4, 6, 7]);
    assert_eq!(scheduling.tokens(), 1 + 4 + 5 + 7 + 8);
    assert_eq!(scheduling.lanes()[0].in_flight, 1);
    assert!(scheduling.cancel(4));
    assert!(!scheduling.cancel(4));
    assert!(!scheduling.cancel(99));
    for wrong in [vec![3, 3], vec![4], vec![0, 99]] {
        let error = decide(&mut scheduling, &wrong).unwrap_err();
        assert!(
            matches!(error, InvalidDecision::NotWaiting { .. }),
            "{error}"
        );
    }
    assert_eq!(
        decide(&mut scheduling, &[]).unwrap_err(),
        InvalidDecision::Empty { lane: 0 }
    );
    assert_eq!(ids(&scheduling), [0, 3, 6, 7]);
    decide(&mut scheduling, &[0, 3, 6, 7]).unwrap();
    assert!(scheduling.waiting().is_empty());
    assert_eq!(scheduling.tokens(), 0);
    scheduling.finished(Micros(5), 0, &[5, 1, 2], true, &mut These(Vec::new()));
    assert_eq!(scheduling.lanes()[0].in_flight, 1);
    assert_eq!(scheduling.lanes()[0].free_at, Micros(6));
}
