//! Properties of every scheduler under random load.

use proptest::prelude::*;

use super::*;
use crate::simulate::{Devices, Fate, Outcome, simulate};

/// Generates random arrivals in order of time.
fn arrivals() -> impl Strategy<Value = Vec<Waiting>> {
    let request = (
        0_u64..3000,
        1_u32..400,
        prop::option::weighted(0.5, 0_u64..20_000),
        0_u8..3,
        0_u32..3,
        1_u32..4,
    );
    prop::collection::vec(request, 1..60).prop_map(|requests| {
        let mut now = 0;
        let all = requests.into_iter().enumerate();
        all.map(|(id, (gap, tokens, within, class, tenant, steps))| {
            now += gap;
            Waiting {
                id: id as u64,
                tokens,
                arrived: Micros(now),
                deadline: within.map(|within| Micros(now + within)),
                class,
                tenant,
                steps,
            }
        })
        .collect()
    })
}

/// Wraps another scheduler and checks every decision.
struct Watched<'a> {
    of: Box<dyn Scheduler>,
    name: &'a str,
    decisions: Vec<Decision>,
}

impl Scheduler for Watched<'_> {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let decision = self.of.decide(view);
        for planned in &decision.run {
            let len = |&id: &u64| view.waiting.get(id).expect("it waits").tokens;
            let lens = planned
                .rows
                .iter()
                .map(|row| row.iter().map(len).sum::<u32>());
            let lens: Vec<u32> = lens.collect();
            let computed = planned.layout.computed(lens.iter().copied());
            let lane = view.lanes[planned.lane];
            let bytes = view.costs.bytes(planned.layout, &computed);
            assert!(bytes <= lane.bytes, "{}: {planned:?}", self.name);
            match planned.layout {
                Layout::Rows { slot, .. } => assert!(lens.iter().all(|&len| len <= slot)),
                _ => assert!(planned.rows.iter().all(|row| row.len() == 1)),
            }
            for id in planned.ids() {
                let deadline = view.waiting.get(id).and_then(|w| w.deadline);
                assert!(deadline.is_none_or(|at| at >= view.now), "{}", self.name);
            }
        }
        for (id, refusal) in &decision.refuse {
            let waiting = view.waiting.get(*id).expect("it waits");
            match refusal {
                Refusal::Expired | Refusal::Hopeless => assert!(waiting.deadline.is_some()),
                Refusal::TooLarge => {
                    let own = self.of_its_own_bytes(view, waiting.tokens);
                    let most = view.lanes.iter().map(|l| l.bytes).max().unwrap_or(0);
                    assert!(own > most || waiting.tokens > 512, "{}", self.name);
                }
            }
        }
        self.decisions.push(decision.clone());
        decision
    }

    fn finished(&mut self, ids: &[u64], lane: usize) {
        self.of.finished(ids, lane);
    }
}

impl Watched<'_> {
    fn of_its_own_bytes(&self, view: &View<'_>, tokens: u32) -> u64 {
        // TCB's schedulers compute a whole row for a single request, and refuse requests that are longer than a row.
        let tokens = match self.name.contains("das") || self.name.contains("concat") {
            true => 512,
            false => u64::from(tokens),
        };
        let extents = super::super::costs::equal(1, tokens);
        view.costs.bytes(Layout::Packed, &extents)
    }
}

fn run(name: &str, arrivals: &[Waiting], on: &Devices<'_>) -> (Outcome, Vec<Decision>) {
    let settings = Settings {
        rows: 4,
        slo: Micros(5_000),
        timeout: Micros(2_000),
        ..Settings::default()
    };
    let of = scheduler(name, &settings).expect("it is there");
    let mut watched = Watched {
        of,
        name,
        decisions: Vec::new(),
    };
    let outcome =
        simulate(arrivals, &mut watched, on).unwrap_or_else(|error| panic!("{name}: {error}"));
    (outcome, watched.decisions)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_request_ends_once_within_the_memory_and_decisions_are_reproducible(
        arrivals in arrivals(),
        n_lanes in 1_usize..3,
        tokens in 300_u64..3000,
        depth in 1_u8..3,
        multiple in 1_u64..100,
    ) {
        let costs = Straight { multiple, ..Straight::default() };
        let on = Devices { costs: &costs, bytes: vec![tokens * 1024; n_lanes], depth };
        for name in NAMES {
            let (outcome, decisions) = run(name, &arrivals, &on);
            for (waiting, fate) in arrivals.iter().zip(&outcome.fates) {
                match fate {
                    Fate::Done(at) => prop_assert!(*at > waiting.arrived),
                    Fate::Refused(..) => {}
                    Fate::Waits | Fate::Runs => {
                        prop_assert!(false, "{name}: request {} never ends", waiting.id);
                    }
                }
            }
            let again = run(name, &arrivals, &on);
            prop_assert_eq!((outcome, decisions), again);
        }
    }

    #[test]
    fn a_request_larger_than_any_batch_is_refused_without_blocking_others(
        mut arrivals in arrivals(),
        at in 0_usize..60,
    ) {
        let at = at % arrivals.len();
        for waiting in &mut arrivals {
            (waiting.deadline, waiting.steps) = (None, 1);
        }
        arrivals[at].tokens = 5000;
        let costs = Straight::default();
        let on = Devices { costs: &costs, bytes: vec![600 * 1024], depth: 2 };
        for name in NAMES {
            let (outcome, _) = run(name, &arrivals, &on);
            for (i, fate) in outcome.fates.iter().enumerate() {
                match i == at {
                    true => prop_assert!(
                        matches!(fate, Fate::Refused(_, Refusal::TooLarge)), "{name}: {fate:?}"
                    ),
                    false => prop_assert!(matches!(fate, Fate::Done(_)), "{name}: {fate:?}"),
                }
            }
        }
    }

    #[test]
    fn cancelled_requests_are_removed(
        arrivals in arrivals(),
        gone in prop::collection::vec(any::<bool>(), 60),
    ) {
        for name in NAMES {
            let mut of = scheduler(name, &Settings::default()).expect("it is there");
            let costs = Straight::default();
            let mut scheduling = SchedulerState::new(&[u64::MAX], 1);
            let mut left = Vec::new();
            // Start a first batch, so that the other requests have to wait.
            scheduling.arrive(Waiting::new(5, Micros(0)));
            scheduling.decide(Micros(0), &mut *of, &costs).expect("a decision");
            let n_first = u64::from(name.starts_with("lazy"));
            for (waiting, gone) in arrivals.iter().zip(&gone) {
                let id = scheduling.arrive(Waiting { deadline: None, steps: 1, ..*waiting });
                scheduling.decide(waiting.arrived, &mut *of, &costs).expect("a decision");
                if *gone {
                    scheduling.cancel(id);
                } else {
                    left.push(id);
                }
            }
            let mut now = Micros(1 << 40);
            let mut ended = 0;
            for _ in 0..500 {
                let running = scheduling.lanes()[0].in_flight;
                for _ in 0..running {
                    scheduling.finished(now, 0, &[], true, &mut *of);
                }
                now = now.plus(Micros(1_000_000));
                let decision = scheduling.decide(now, &mut *of, &costs).expect("a decision");
                ended += decision.run.iter().flat_map(Planned::ids).count();
            }
            prop_assert!(scheduling.waiting().is_empty(), "{name}");
            prop_assert!(ended as u64 <= left.len() as u64 + n_first, "{name}");
        }
    }
}

#[test]
fn no_request_starves_under_packed_at_full_load() {
    // The device computes a million tokens per second, and the requests that arrive in a second have about 850,000 tokens in total. Short
    // high-class requests with deadlines arrive constantly, next to long requests of the lowest class from another tenant.
    let costs = Straight {
        batch: 50,
        ..Straight::default()
    };
    let mut arrivals = Vec::new();
    for i in 0..20_000_u64 {
        let at = Micros(i * 110);
        arrivals.push(match i % 10 {
            9 => Waiting {
                tokens: 300,
                tenant: 1,
                ..Waiting::new(300, at)
            },
            _ => Waiting {
                deadline: Some(at.plus(Micros(20_000))),
                class: 9,
                ..Waiting::new(70, at)
            },
        });
    }
    let on = Devices {
        costs: &costs,
        bytes: vec![u64::MAX],
        depth: 2,
    };
    let mut packed = scheduler("packed", &Settings::default()).unwrap();
    let outcome = simulate(&arrivals, &mut *packed, &on).unwrap();
    let mut longest = 0;
    for (waiting, fate) in arrivals.iter().zip(&outcome.fates) {
        let Fate::Done(at) = fate else {
            panic!("{waiting:?} {fate:?}");
        };
        if let Some(deadline) = waiting.deadline {
            assert!(*at <= deadline);
        }
        longest = longest.max(at.since(waiting.arrived).0);
    }
    // A request of class 0 moves up one class every 200 ms, so it is above class 9 after 2 s.
    assert!(longest < 2_000_000, "{longest} µs");
}

#[test]
fn tenants_share_a_device_evenly_under_packed() {
    // One tenant sends nine times as many requests as the other. Each sends more than half of the tokens that the device computes in this
    // test.
    let costs = Straight::default();
    let mut packed = scheduler("packed", &Settings::default()).unwrap();
    let mut scheduling = SchedulerState::new(&[u64::MAX], 1);
    for i in 0..20_000_u32 {
        scheduling.arrive(Waiting {
            tenant: u32::from(i % 10 == 0),
            ..Waiting::new(100, Micros(0))
        });
    }
    let mut tokens = [0_u32; 2];
    let of: Vec<u32> = scheduling.waiting().iter().map(|w| w.tenant).collect();
    for now in 0.. {
        let decision = scheduling
            .decide(Micros(now), &mut *packed, &costs)
            .unwrap();
        for id in decision.run.iter().flat_map(Planned::ids) {
            tokens[of[id as usize] as usize] += 100;
        }
        scheduling.finished(Micros(now), 0, &[], true, &mut *packed);
        if tokens[0] + tokens[1] > 300_000 {
            break;
        }
    }
    let share = f64::from(tokens[1]) / f64::from(tokens[0] + tokens[1]);
    assert!((0.47..0.53).contains(&share), "{tokens:?}");
}

#[test]
fn a_new_tenant_takes_turns_with_a_backlogged_one_under_packed() {
    let costs = Straight::default();
    let mut packed = scheduler("packed", &Settings::default()).unwrap();
    let mut scheduling = SchedulerState::new(&[u64::MAX], 1);
    for _ in 0..20_000 {
        scheduling.arrive(Waiting::new(100, Micros(0)));
    }
    let late = Micros(10_000_000);
    scheduling.decide(Micros(0), &mut *packed, &costs).unwrap();
    scheduling.finished(late, 0, &[], true, &mut *packed);
    let first = scheduling.arrive(Waiting {
        tenant: 1,
        ..Waiting::new(100, late)
    });
    for _ in 0..1000 {
        scheduling.arrive(Waiting {
            tenant: 1,
            ..Waiting::new(100, late)
        });
    }
    let decision = scheduling.decide(late, &mut *packed, &costs).unwrap();
    let ids: Vec<u64> = decision.run.iter().flat_map(Planned::ids).collect();
    let own = ids.iter().filter(|&&id| id >= first).count();
    let share = own as f64 / ids.len() as f64;
    assert!((0.4..0.6).contains(&share), "{own} of {}", ids.len());
}

#[test]
fn packed_gives_a_busy_lane_its_next_batch_late_or_when_it_is_large() {
    let costs = Straight::default();
    let mut packed = scheduler("packed", &Settings::default()).unwrap();
    let mut scheduling = SchedulerState::new(&[u64::MAX], 2);
    scheduling.arrive(Waiting::new(10_000, Micros(0)));
    let first = scheduling.decide(Micros(0), &mut *packed, &costs).unwrap();
    assert_eq!(first.run.len(), 1);
    // The batch ends at 10.3 ms. A short request is held back until shortly before the batch ends.
    scheduling.arrive(Waiting::new(10, Micros(100)));
    let waits = scheduling
        .decide(Micros(100), &mut *packed, &costs)
        .unwrap();
    assert!(waits.run.is_empty());
    assert_eq!(waits.wake, Some(Micros(10_000)));
    assert_eq!(
        scheduling
            .decide(Micros(10_000), &mut *packed, &costs)
            .unwrap()
            .run
            .len(),
        1
    );
    // The lane already has its maximum of two batches.
    scheduling.arrive(Waiting::new(100_000, Micros(10_001)));
    assert!(
        scheduling
            .decide(Micros(10_001), &mut *packed, &costs)
            .unwrap()
            .run
            .is_empty()
    );
}

#[test]
fn packed_refuses_requests_that_would_be_late() {
    let costs = Straight::default();
    let mut packed = scheduler("packed", &Settings::default()).unwrap();
    let mut scheduling = SchedulerState::new(&[u64::MAX], 1);
    let with = |tokens, deadline| Waiting {
        deadline: Some(Micros(deadline)),
        ..Waiting::new(tokens, Micros(0))
    };
    scheduling.arrive(with(100, 299));
    scheduling.arrive(with(100, 300));
    scheduling.arrive(with(100, 5));
    let decision = scheduling.decide(Micros(0), &mut *packed, &costs).unwrap();
    assert_eq!(
        decision.refuse,
        [(2, Refusal::Hopeless), (0, Refusal::Hopeless)]
    );
    assert_eq!(decision.run[0].rows, vec![vec![1]].into());
    scheduling.arrive(with(100, 900));
    let late = scheduling
        .decide(Micros(1_000), &mut *packed, &costs)
        .unwrap();
    assert_eq!(late.refuse, [(3, Refusal::Expired)]);
}

/// Approximate costs of BERT-base on an H200.
fn of_a_card() -> CostTable {
    let text = "(about: \"\", packed: (x: [32, 512, 1024, 2048, 4096, 16384], y: [16, 512], \
        values: [[140, 150], [200, 230], [330, 360], [620, 650], [1200, 1300], [4800, 5200]]), overhead: 20.0, multiple: 64)";
    CostTable::parse(text).expect("a sound table")
}

#[test]
fn packed_meets_more_deadlines_than_the_others_at_every_load() {
    let costs = of_a_card();
    // Each entry is the request lengths, the requests per second that the card sustains, and the range of the time to the deadline in
    // microseconds. The deadlines are at most a few batch durations after the arrivals.
    let loads = [
        ("normal:5,500,250,90", 12_800.0, 3_000, 15_000),
        ("normal:3,100,20,4.5", 165_000.0, 1_000, 5_000),
        ("uniform:1,400", 16_000.0, 1_500, 6_000),
    ];
    for (lengths, capacity, least, most) in loads {
        for share in [0.3, 0.7, 0.9, 1.0, 1.3] {
            let load = crate::simulate::Load {
                rate: share * capacity,
                requests: 6_000,
                lengths: lengths.parse().unwrap(),
                steps: 1,
                deadlines: Some((Micros(least), Micros(most))),
                seed: 7,
            };
            let arrivals = load.arrivals();
            let on = Devices {
                costs: &costs,
                bytes: vec![u64::MAX],
                depth: 2,
            };
            let met = |name: &str| {
                let mut scheduler = scheduler(name, &Settings::default()).unwrap();
                let outcome = simulate(&arrivals, &mut *scheduler, &on).unwrap();
                crate::simulate::Summary::of(&arrivals, &outcome, 1).in_time
            };
            let ours = met("packed");
            for name in NAMES {
                let theirs = met(name);
                assert!(
                    ours >= theirs - 0.002,
                    "{lengths} at {share}: packed {ours}, {name} {theirs}"
                );
            }
        }
    }
}
