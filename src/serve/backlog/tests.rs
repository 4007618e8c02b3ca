//! Tests of the estimates and of admission.

use super::*;

#[test]
fn estimated_time_is_that_of_the_slower_of_tokenizers_and_devices() {
    let costs = CostTable::parse(include_str!("../../../examples/costs.ron")).unwrap();
    let seconds = |of: &Backlog, tokens: u64| {
        let mut work = of.tenants.all().clone();
        work.tokens.add(0, tokens);
        of.time(&work, 0, &costs).as_secs_f64()
    };
    let before = |of: &Backlog, class| of.time(of.tenants.all(), class, &costs);
    let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 0.05, "{a} {b}");
    let mut one = Backlog::new(1, 1);
    assert_eq!(before(&one, 0), Duration::ZERO);
    let of_device = seconds(&one, 100_000);
    near(seconds(&one, 200_000), 2.0 * of_device);
    near(seconds(&Backlog::new(1, 4), 100_000), of_device / 4.0);
    // Batches take three times as long as estimated.
    for _ in 0..100 {
        one.ran(Micros(10_000), Duration::from_millis(30));
    }
    near(seconds(&one, 100_000), 3.0 * of_device);
    // The tokenizer is slower than the device.
    for _ in 0..100 {
        one.tokenizing.add(1000.0, Duration::from_millis(100));
    }
    let load = Load {
        bytes: 100_000,
        tokens: 25_000,
    };
    one.tenants.change(0, |work| work.add_untokenized(0, load));
    near(seconds(&one, 0), 10.0);
    let mut four = Backlog::new(4, 1);
    (four.tokenizing, four.tenants) = (one.tokenizing, one.tenants.clone());
    near(seconds(&four, 0), 2.5);
    // Devices work in parallel with the tokenizers and are faster, so an additional token to compute does not change the estimate.
    near(seconds(&four, 1), 2.5);
    // An urgent request runs before the queued work.
    assert_eq!(before(&one, 1), Duration::ZERO);
    one.tenants.change(0, |work| work.bytes.add(7, 1000));
    near(before(&one, 1).as_secs_f64(), 0.1);
    assert_eq!(before(&one, 8), Duration::ZERO);
    one.tenants.change(0, |work| work.bytes.take(7, 1000));
    // The estimate follows a changed pace within a second of work.
    for _ in 0..1000 {
        one.tokenizing.add(1000.0, Duration::from_millis(1));
    }
    near(seconds(&one, 0), f64::max(0.1, 3.0 * of_device / 4.0));
}

#[test]
fn a_tenant_below_its_share_is_admitted_under_overload() {
    let queue = Duration::from_secs(2);
    let mut tenants = Tenants::default();
    // A token takes a millisecond.
    let time = |work: &Work| Duration::from_millis(work.tokens.before(0));
    let ask = |tenants: &Tenants, tenant| tenants.admit(tenant, queue, time);
    let add = |tenants: &mut Tenants, tenant, tokens| {
        tenants.change(tenant, |work| {
            work.texts += 1;
            work.tokens.add(0, tokens);
        });
    };
    // The first 32 texts are always admitted, even if they take longer than the limit.
    for _ in 0..32 {
        assert_eq!(ask(&tenants, 1), Ok(()));
        add(&mut tenants, 1, 1000);
    }
    assert_eq!(ask(&tenants, 1), Err(Duration::from_secs(32)));
    // With two tenants, the second one gets half of the time and half of the texts that are always admitted.
    for _ in 0..16 {
        assert_eq!(ask(&tenants, 2), Ok(()));
        add(&mut tenants, 2, 100);
    }
    let ahead = Duration::from_millis(33_600);
    assert_eq!(ask(&tenants, 2), Err(ahead));
    assert_eq!(ask(&tenants, 1), Err(ahead));
    assert_eq!(ask(&tenants, 3), Ok(()));
    // A single tenant may use all of the time limit.
    let mut tenants = Tenants::default();
    for _ in 0..100 {
        assert_eq!(ask(&tenants, 1), Ok(()));
        add(&mut tenants, 1, 20);
    }
    add(&mut tenants, 1, 1);
    assert_eq!(ask(&tenants, 1), Err(Duration::from_millis(2001)));
    add(&mut tenants, 2, 1);
    assert_eq!(ask(&tenants, 2), Ok(()));
    // Answered requests do not count.
    for _ in 0..101 {
        tenants.change(1, |work| {
            work.texts -= 1;
            work.tokens.take(0, 1000);
        });
    }
    assert_eq!(tenants.each.len(), 1);
    assert_eq!(ask(&tenants, 2), Ok(()));
}

#[test]
fn a_list_counts_as_its_texts() {
    let queue = Duration::from_secs(2);
    let mut tenants = Tenants::default();
    let time = |work: &Work| Duration::from_millis(work.tokens.before(0));
    assert_eq!(tenants.admit(1, queue, time), Ok(()));
    tenants.change(1, |work| {
        work.texts += 1000;
        work.tokens.add(0, 10_000);
    });
    let ahead = Duration::from_secs(10);
    assert_eq!(tenants.admit(1, queue, time), Err(ahead));
}

#[test]
fn a_list_that_misses_its_deadline_is_told_by_how_much() {
    let costs = CostTable::parse(include_str!("../../../examples/costs.ron")).unwrap();
    let mut backlog = Backlog::new(1, 1);
    let load = |tokens| Load { bytes: 0, tokens };
    let meets = |of: &Backlog, tokens: u64, within: Duration| {
        of.meets((1, 0), load(tokens), 16, within, &costs)
    };
    let takes = backlog.least(load(1 << 20), 16, &costs);
    assert_eq!(meets(&backlog, 1 << 20, takes * 2), Ok(()));
    let miss = meets(&backlog, 1 << 20, takes / 2);
    let reserved = takes / 2 - backlog.for_batches(takes / 2);
    let takes_all = takes + reserved;
    assert_eq!(miss, Err(Miss::Alone { takes: takes_all }));
    // The same amount of work is queued already.
    backlog
        .tenants
        .change(1, |work| work.tokens.add(0, 1 << 20));
    let within = takes * 3 / 2;
    let over = 2.0 * takes.as_secs_f64() - backlog.for_batches(within).as_secs_f64();
    match meets(&backlog, 1 << 20, within) {
        Err(Miss::Queued { over: found }) => {
            assert!(
                (found.as_secs_f64() / over - 1.0).abs() < 0.05,
                "{found:?} {over}"
            );
        }
        other => panic!("{other:?}"),
    }
    // Tenants take turns. The queued work of tenant 1 therefore delays a request of tenant 2 by at most the time of tenant 2's work.
    let other = |tokens| backlog.meets((2, 0), load(tokens), 16, takes, &costs);
    assert_eq!(other(1 << 18), Ok(()));
    assert!(matches!(other(1 << 20 >> 1), Err(Miss::Queued { .. })));
    // A slow measurement is ignored if nothing else has been measured for the time `RECENT`.
    backlog.ran(Micros(1000), Duration::from_secs(100));
    assert!(backlog.least(load(1000), 16, &costs) > Duration::from_secs(1));
    backlog.device.measured = Instant::now().checked_sub(RECENT);
    assert!(backlog.least(load(1000), 16, &costs) < Duration::from_secs(1));
}

#[test]
fn the_number_of_tokens_is_learned_from_texts() {
    let mut backlog = Backlog::new(1, 1);
    assert_eq!(backlog.expected(4000), 1000);
    for _ in 0..1000 {
        backlog.tokenized(1000, 500, Duration::from_micros(500));
    }
    assert!((1950..=2000).contains(&backlog.expected(4000)));
    assert_eq!(backlog.expected(0), 1);
}

#[test]
fn batches_get_less_time_if_they_take_longer_than_estimated() {
    let ms = Duration::from_millis;
    let mut backlog = Backlog::new(1, 1);
    assert_eq!(backlog.for_batches(ms(400)), ms(380));
    assert_eq!(backlog.for_batches(ms(60_000)), ms(59_950));
    backlog.ran(Micros(10_000), ms(15));
    assert_eq!(backlog.for_batches(ms(400)), ms(375));
    // The time that is reserved for late batches decays, and is at most a quarter of the time limit.
    (0..100).for_each(|_| backlog.ran(Micros(10_000), ms(10)));
    assert!(backlog.for_batches(ms(400)) > ms(379));
    backlog.ran(Micros(10_000), ms(5000));
    assert_eq!(backlog.for_batches(ms(400)), ms(280));
    assert_eq!(backlog.for_batches(Duration::ZERO), Duration::ZERO);
}
