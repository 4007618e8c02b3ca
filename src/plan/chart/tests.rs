use svg::node::Attributes;
use svg::parser::Event;

use super::*;
use crate::plan::workloads::{self, BASE, Encoder};
use crate::plan::{Allocator, ChunkAllocator, Placement, Turbo};

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.into()).collect()
}

/// Returns the rectangle of each record, as (left, top, right, bottom).
fn rectangles(chart: &str) -> Vec<(usize, [f64; 4])> {
    let number = |attributes: &Attributes, name: &str| attributes[name].parse::<f64>().unwrap();
    let mut record = None;
    let mut rectangles = Vec::new();
    for event in svg::read(chart).unwrap() {
        match event {
            Event::Tag("g", _, attributes) => {
                record = attributes
                    .get("data-record")
                    .map(|record| record.parse().unwrap());
            }
            Event::Tag("rect", _, at) if at.contains_key("x") => {
                let Some(record) = record else { continue };
                let (x, y) = (number(&at, "x"), number(&at, "y"));
                let (width, height) = (number(&at, "width"), number(&at, "height"));
                rectangles.push((record, [x, y, x + width, y + height]));
            }
            _ => {}
        }
    }
    rectangles
}

/// Returns every text of the chart, including titles and tooltips.
fn texts(chart: &str) -> Vec<String> {
    let texts = svg::read(chart).unwrap().filter_map(|event| match event {
        Event::Text(text) => Some(text.to_owned()),
        _ => None,
    });
    texts.collect()
}

#[test]
fn every_tensor_is_one_rectangle_and_live_ones_never_cover_each_other() {
    let shape = Encoder {
        n_layers: 3,
        ..workloads::BASE_UNFUSED
    };
    for mut allocator in [
        Box::new(ChunkAllocator::default()) as Box<dyn Allocator>,
        Box::new(Turbo::new()),
    ] {
        let (names, records) = workloads::encoder(shape, 2, 300);
        let plan = allocator.plan(&records).unwrap();
        let drawn = rectangles(&svg(&names, &records, &plan));
        let mut found: Vec<usize> = drawn.iter().map(|&(record, _)| record).collect();
        found.sort_unstable();
        assert_eq!(found, (0..records.len()).collect::<Vec<_>>());
        // A tensor smaller than a pixel is drawn one pixel high.
        let tall = |record: usize| records[record].bytes > 100_000;
        for (i, &(a, [a_left, a_top, a_right, a_bottom])) in drawn.iter().enumerate() {
            for &(b, [b_left, b_top, b_right, b_bottom]) in &drawn[i + 1..] {
                let apart = a_right <= b_left + 0.05
                    || b_right <= a_left + 0.05
                    || a_bottom <= b_top + 0.05
                    || b_bottom <= a_top + 0.05;
                assert!(
                    apart || !tall(a) || !tall(b),
                    "{} covers {}",
                    names[a],
                    names[b]
                );
            }
        }
    }
}

#[test]
fn a_rectangle_is_as_long_as_the_life_and_as_high_as_the_size() {
    let record = |first_op, last_op, bytes| UsageRecord {
        first_op,
        last_op,
        bytes,
    };
    let records = [record(0, 1, 1 << 20), record(1, 3, 1 << 19)];
    let plan = Plan {
        chunks: vec![1 << 20, 0, 1 << 20],
        placements: vec![
            Placement {
                chunk: 0,
                offset: 0,
            },
            Placement {
                chunk: 2,
                offset: 1 << 18,
            },
        ],
    };
    let drawn = rectangles(&svg(&names(&["a", "b"]), &records, &plan));
    let [(0, a), (1, b)] = drawn[..] else {
        panic!("{drawn:?}")
    };
    let (step, lane) = ((a[2] - a[0]) / 2.0, a[3] - a[1]);
    assert!((b[0] - (a[0] + step)).abs() < 0.05, "{drawn:?}");
    assert!((b[2] - (b[0] + 3.0 * step)).abs() < 0.05, "{drawn:?}");
    assert!((b[3] - b[1] - lane / 2.0).abs() < 0.05, "{drawn:?}");
    // The lane of chunk 2 is below that of chunk 0. The bottom of `b` is above the bottom of the lane by a quarter of the lane's height.
    assert!(
        (b[3] - (a[3] + LANE_GAP + lane - lane / 4.0)).abs() < 0.05,
        "{drawn:?}"
    );
}

#[test]
fn the_chart_shows_names_chunks_footprint_and_lower_bound() {
    let (names, records) = workloads::encoder(
        Encoder {
            n_layers: 1,
            ..BASE
        },
        4,
        128,
    );
    let plan = ChunkAllocator::default().plan(&records).unwrap();
    let texts = texts(&svg(&names, &records, &plan));
    let says = |text: &str| assert!(texts.iter().any(|t| t == text), "{text}: {texts:#?}");
    says("Lifetimes and positions of 10 intermediate tensors");
    says("lower bound 4.5 MiB, footprint 4.86 MiB in 1 chunk, 1.08 × the lower bound");
    says("chunk 0 (4.86 MiB)");
    says("operator, in topological order");
    for name in &names[..names.len() - 1] {
        says(name);
    }
    // The rectangle is too small for the name, so it shows the index, and the key has the name.
    says("9");
    says("9: pooled, 6 KiB, operators 9 to 9");
}

#[test]
fn odd_names_and_odd_plans_are_drawn() {
    let records = [UsageRecord {
        first_op: 4_000_000_000,
        last_op: u32::MAX,
        bytes: 0,
    }; 2];
    let plan = ChunkAllocator::default().plan(&records).unwrap();
    let chart = svg(&names(&["<a & \"b\">\u{1}"]), &records, &plan);
    assert!(chart.contains("0: &lt;a &amp; \"b\"&gt;\u{fffd}, 0 B, operators 4000000000 to "));
    assert!(chart.contains("1: #1, 0 B"), "{chart}");
    assert_eq!(rectangles(&chart).len(), 2);

    let nothing = Plan {
        chunks: Vec::new(),
        placements: Vec::new(),
    };
    assert!(
        texts(&svg(&[], &[], &nothing))
            .contains(&"lower bound 0 B, footprint 0 B in 0 chunks".to_owned())
    );
    // The plan does not match these records of another program, and places none of them.
    assert_eq!(rectangles(&svg(&[], &records, &nothing)).len(), 0);
    let reversed = [UsageRecord {
        first_op: 9,
        last_op: 2,
        bytes: 10,
    }];
    svg(
        &[],
        &reversed,
        &Plan {
            chunks: vec![1],
            placements: plan.placements,
        },
    );
}
