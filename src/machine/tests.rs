use super::*;

fn live(name: &str, capability: (u32, u32), sms: u32) -> Live {
    Live {
        name: name.to_owned(),
        capability,
        sms,
        threads_per_sm: 1536,
        registers_per_sm: 65_536,
        shared_per_sm: 102_400,
        shared_per_cta: 101_376,
        l2_bytes: 1 << 20,
    }
}

#[test]
fn every_file_describes_a_plausible_card() {
    let all = Machine::all().expect("every file parses");
    assert_eq!(all.len(), FILES.len());
    assert!(all.len() >= 10);
    assert!(all.windows(2).all(|pair| pair[0].name < pair[1].name));
    let mut cards: Vec<&String> = all.iter().flat_map(|machine| &machine.cards).collect();
    let n_cards = cards.len();
    cards.sort();
    cards.dedup();
    assert_eq!(cards.len(), n_cards, "no card has two files");
    for machine in all {
        let name = &machine.name;
        assert!(!machine.cards.is_empty(), "{name}");
        assert_eq!(Machine::named(name).expect("it is there"), *machine);
        let is_hopper = machine.capability == (9, 0);
        let instructions = Instructions::of_capability(machine.capability);
        assert_eq!(machine.instructions, instructions, "{name}");
        let MmaSync {
            tensor: in_16_bits,
            tensor_e4m3,
            tensor_int8,
            ..
        } = machine.costs.mma_sync;
        let is_ada = instructions == Instructions::Ada;
        assert_eq!(tensor_e4m3.is_some(), is_ada, "{name}");
        assert!(tensor_e4m3.is_none_or(|e4m3| e4m3 > in_16_bits), "{name}");
        // No estimate for int8 with `mma.sync` is expected on Hopper, where wgmma multiplies integers faster, and on capability 10.0, where
        // tcgen05 does.
        let is_data_center = matches!(machine.capability, (9 | 10, 0));
        assert_eq!(tensor_int8.is_none(), is_data_center, "{name}");
        assert!(tensor_int8.is_none_or(|int8| int8 > in_16_bits), "{name}");
        assert_eq!(machine.costs.hopper.is_some(), is_hopper, "{name}");
        assert!(machine.shared_per_cta < machine.shared_per_sm, "{name}");
        assert!(
            (1..=1024).contains(&machine.sms) && machine.clock_mhz > 500,
            "{name}"
        );
        let Rates {
            tensor,
            fma,
            shared,
            dram,
        } = machine.rates;
        assert!(
            [tensor, fma, shared, dram].iter().all(|&rate| rate > 0.0),
            "{name}"
        );
        assert!(tensor > fma, "{name}");
        // The number of resident clusters never increases with the cluster size, and they have at most one CTA per SM.
        assert!(
            machine.clusters.windows(2).all(|pair| pair[0] >= pair[1]),
            "{name}"
        );
        for (at, &at_once) in machine.clusters.iter().enumerate() {
            assert!(at_once * (at as u32 + 2) <= machine.sms, "{name}");
        }
        let served = Machine::of(&live(&machine.cards[0], machine.capability, machine.sms));
        let (own, served) = served.expect("its card is described");
        assert_eq!((&own.name, served), (name, Served::Own));
    }
    assert_eq!(Machine::usual().expect("it is there").name, DEFAULT);
    let oldest = all.iter().map(|machine| machine.capability).min();
    assert_eq!(
        oldest,
        Some(Machine::usual().expect("it is there").capability)
    );
    assert_eq!(testing::hopper().fit, Fit::Timings);
}

#[test]
fn a_card_uses_its_own_file_or_the_nearest_one_with_the_drivers_properties() {
    let of = |live: &Live| Machine::of(live).expect("a file serves it");
    let h200 = live("NVIDIA H200", (9, 0), 66);
    let (machine, served) = of(&h200);
    assert_eq!((machine.name.as_str(), served), ("h200", Served::Own));
    // The properties that the driver reports for a MIG instance replace those of the file.
    assert_eq!((machine.sms, machine.threads_per_sm), (66, 1536));
    assert_eq!(
        (machine.shared_per_sm, machine.shared_per_cta),
        (102_400, 101_376)
    );
    assert_eq!(
        (machine.registers_per_sm, machine.l2_bytes),
        (65_536, 1 << 20)
    );
    let whole = Machine::named("h200").expect("it is described");
    assert_eq!(machine.clusters, whole.with_sms(66).clusters);
    // Among the cards with the same capability, the file with the nearest number of SMs is used.
    for (sms, nearest) in [(110, "h100_pcie"), (114, "h100_pcie")] {
        let (machine, served) = of(&live("NVIDIA H-Something", (9, 0), sms));
        assert_eq!((machine.name.as_str(), served), (nearest, Served::Nearest));
        assert_eq!(machine.instructions, Instructions::Hopper);
    }
    // The file of the newest older capability is used, with the baseline instructions.
    let (machine, served) = of(&live("NVIDIA Orin", (8, 7), 16));
    assert_eq!((machine.capability, served), ((8, 7), Served::Nearest));
    assert_eq!(machine.instructions, Instructions::Ampere);
    assert!(
        ["a10", "rtx3090"].contains(&machine.name.as_str()),
        "{}",
        machine.name
    );
    let (machine, _) = of(&live("NVIDIA Later", (13, 1), 300));
    assert_eq!(machine.instructions, Instructions::Ampere);
    assert!(machine.clusters.is_empty());
    let (machine, _) = of(&live("NVIDIA Small", (12, 1), 48));
    assert_eq!(machine.instructions, Instructions::Ada);
    let error = Machine::of(&live("Tesla T4", (7, 5), 40)).expect_err("it is too old");
    insta::assert_snapshot!(error, @"Tesla T4 is not supported: its compute capability is 7.5; expected 8.0 or newer");
}

#[test]
fn e4m3_products_are_used_on_cards_that_compute_them_faster_than_products_in_16_bits() {
    let all = Machine::all().expect("the cards are described").iter();
    let faster = all.filter(|machine| machine.has_e4m3_products());
    let names: Vec<&str> = faster.map(|machine| machine.name.as_str()).collect();
    let expected = [
        "h100_pcie",
        "h100_sxm",
        "h200",
        "l4",
        "l40s",
        "rtx4090",
        "rtx5090",
    ];
    assert_eq!(names, expected);
}

#[test]
fn clusters_at_once_follow_the_number_of_sms() {
    let whole = testing::hopper();
    assert_eq!(whole.clusters_at_once(1), u64::from(whole.sms));
    assert_eq!(whole.clusters_at_once(2), u64::from(whole.clusters[0]));
    assert_eq!(whole.with_sms(whole.sms), whole);
    let half = whole.with_sms(whole.sms / 2);
    for (at, &at_once) in whole.clusters.iter().enumerate() {
        assert_eq!(half.clusters_at_once(at as u32 + 2), u64::from(at_once) / 2);
    }
    // No cluster is resident if none fits or if its size is not described.
    let few = whole.with_sms(3);
    assert!(few.clusters_at_once(2) <= 1 && few.clusters_at_once(4) == 0);
    assert_eq!(whole.clusters_at_once(9), 0);
    assert_eq!(
        (whole.with_sms(0).sms, testing::usual().clusters_at_once(2)),
        (1, 0)
    );
    assert!(whole.with_sms(u32::MAX).clusters[0] > whole.clusters[0]);
}

#[test]
fn the_nearest_name_is_suggested_for_an_unknown_card() {
    let unknown = |name| Machine::named(name).expect_err("there is none").to_string();
    insta::assert_snapshot!(unknown("h20"), @"`h20` is not a card that gemmule describes; the nearest is `h200`; expected one of a10, a100, b200, h100_pcie, h100_sxm, h200, l4, l40s, rtx4090, rtx5090");
    assert!(!unknown("a card far from all names").contains("the nearest"));
}

#[test]
fn a_capability_has_one_representative_card() {
    let of = |capability| Machine::of_capability(capability).expect("they parse");
    assert_eq!(
        of((8, 0)).map(|machine| machine.name).as_deref(),
        Some("a100")
    );
    assert_eq!(of((7, 5)), None);
}

#[test]
fn an_invalid_file_is_reported_by_name() {
    let error = Machine::parse("odd", "(cards: [])").expect_err("it says too little");
    assert!(
        error
            .to_string()
            .starts_with("the card description `odd` is invalid: ")
    );
    let (_, usual) = FILES
        .iter()
        .find(|(name, _)| *name == "a100.ron")
        .expect("it is there");
    let more = usual.replacen("(", "(\n    color: 3,", 1);
    let error = Machine::parse("odd", &more).expect_err("it says too much");
    assert!(error.to_string().contains("color"), "{error}");
}
