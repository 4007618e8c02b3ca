use super::*;
use crate::ops::{BatchInput, Epilogue};

fn weight(g: &mut Graph, name: &str, dims: &[u64]) -> NodeId {
    let expr = WeightExpr::Stored {
        name: name.to_owned(),
        dims: dims.to_vec(),
    };
    g.add(name, Op::Weight(expr), &[])
        .expect("a weight has no operands")
}

fn embedded(g: &mut Graph) -> NodeId {
    let ids = g
        .add("ids", Op::Input(BatchInput::TokenIds), &[])
        .expect("an input");
    let table = weight(g, "table", &[100, 16]);
    g.add("x", Op::Embedding { offset: 0 }, &[ids, table])
        .expect("shapes agree")
}

#[test]
fn text_lists_values_in_order_with_their_shapes() {
    let mut g = Graph::new();
    let x = embedded(&mut g);
    let w = weight(&mut g, "w", &[8, 16]);
    let y = g
        .add(
            "y",
            Op::Linear {
                epilogue: Epilogue::default(),
            },
            &[x, w],
        )
        .expect("shapes agree");
    g.add_output("result", y);
    g.verify().expect("the graph is sound");
    insta::assert_snapshot!(g.text(), @r"
    ids = input(TokenIds) : [tokens]
    x = embedding ids @table : [tokens, 16]
    y = linear x @w : [tokens, 8]
    output result = y
    ");
}

#[test]
fn invalid_shapes_are_reported_with_both_sides() {
    let mut g = Graph::new();
    let x = embedded(&mut g);
    let w = weight(&mut g, "w", &[8, 24]);
    let error = g
        .add(
            "y",
            Op::Linear {
                epilogue: Epilogue::default(),
            },
            &[x, w],
        )
        .expect_err("24 is not 16");
    insta::assert_snapshot!(error, @"`y` (linear): the input is 16 wide, but the weight takes 24; operands are `x` [tokens, 16], `w` [8, 24]");
}

#[test]
fn unneeded_values_are_pruned() {
    let mut g = Graph::new();
    let x = embedded(&mut g);
    let pooled = g.add("pooled", Op::MeanPool, &[x]).expect("shapes agree");
    g.add_output("tokens", x);
    g.add_output("pooled", pooled);
    g.select_outputs(&["tokens"]).expect("the output exists");
    assert_eq!(g.n_launches(), 1);
    assert!(g.select_outputs(&["pooled"]).is_err());
}

#[test]
fn a_cycle_is_found() {
    let mut g = Graph::new();
    let x = embedded(&mut g);
    let a = g.add("a", Op::Add, &[x, x]).expect("shapes agree");
    let b = g.add("b", Op::Add, &[a, x]).expect("shapes agree");
    g.add_output("b", b);
    g.replace(x, b);
    assert!(matches!(g.verify(), Err(GraphError::Cycle { .. })));
}

#[test]
fn a_rewritten_value_keeps_its_name_and_readers_and_drops_its_unneeded_operands() {
    let mut g = Graph::new();
    let x = embedded(&mut g);
    let mean = g.add("mean", Op::MeanPool, &[x]).expect("shapes agree");
    let unit = Op::L2Normalize { eps: 1e-12 };
    let unit = g.add("unit", unit, &[mean]).expect("shapes agree");
    let sum = g.add("sum", Op::Add, &[unit, unit]).expect("shapes agree");
    g.add_output("sum", sum);
    g.rewrite(unit, Op::MeanPoolNormalize { eps: 1e-12 }, &[x])
        .expect("shapes agree");
    g.verify().expect("the graph is sound");
    assert!(!g.contains(mean));
    insta::assert_snapshot!(g.text(), @r"
    ids = input(TokenIds) : [tokens]
    x = embedding ids @table : [tokens, 16]
    unit = mean_pool_normalize(eps=1e-12) x : [batch, 16]
    sum = add unit unit : [batch, 16]
    output sum = sum
    ");
}

#[test]
fn an_invalid_rewrite_changes_nothing() {
    let mut g = Graph::new();
    let x = embedded(&mut g);
    let y = g.add("y", Op::Add, &[x, x]).expect("shapes agree");
    g.add_output("y", y);
    let before = g.text();
    assert!(g.rewrite(y, Op::MergeHeads, &[x]).is_err());
    assert_eq!(g.text(), before);
}

#[test]
fn buckets_match_transformers() {
    // Hashes of the rows for distances −1100 to 1100, from `T5Attention._relative_position_bucket` of the library transformers 5.23.
    let rows: [(bool, u32, u32, u64); 14] = [
        (true, 32, 128, 226150528736991970),
        (true, 12, 20, 618439699497466452),
        (true, 64, 256, 137479721334584210),
        (true, 8, 50, 1167925361363079716),
        (true, 4, 9, 2092555031633075024),
        (true, 32, 1000, 2043202503227201646),
        (false, 32, 128, 1182911282767819616),
        (false, 12, 20, 65875898269138745),
        (false, 64, 256, 1412718324973474776),
        (false, 8, 50, 1526399837542106259),
        (false, 2, 4, 1698897068911218024),
        (false, 4, 9, 2078902357430383533),
        (false, 33, 100, 2142782865689561910),
        (false, 32, 1000, 1497196570417647588),
    ];
    for (bidirectional, n, reach, want) in rows {
        let buckets = Buckets {
            n,
            reach,
            bidirectional,
        };
        assert_eq!(buckets.problem(), None);
        let hash = |hash: u64, distance| {
            let next = u128::from(hash) * 1_000_003 + u128::from(buckets.row(distance));
            (next % (1 << 61)) as u64
        };
        assert_eq!((-1100..=1100).fold(0, hash), want, "{n} up to {reach}");
        // Larger distances use the last row on their side of the table.
        for far in [buckets.reach + 1, 1 << 23] {
            for side in [-1, 1] {
                let end = buckets.row(side * i64::from(buckets.reach));
                assert_eq!(buckets.row(side * i64::from(far)), end);
            }
        }
    }
}

/// Expected values are from `make_log_bucket_position` of the library transformers.
#[test]
fn positions_match_transformers() {
    let check = |span, reach, expected: &[(i64, u64)]| {
        let positions = Positions {
            span,
            reach: Some(reach),
        };
        assert_eq!(positions.problem(), None);
        for &(distance, row) in expected {
            assert_eq!(positions.row(distance), row, "{span} {reach} {distance}");
        }
        let farthest = i64::from(positions.farthest().expect("it is near"));
        let last = 2 * u64::from(span) - 1;
        assert_eq!(positions.row(farthest), 0);
        assert_eq!(positions.row(-farthest), last);
        let before = [positions.row(farthest - 1), positions.row(1 - farthest)];
        assert_ne!(before, [0, last]);
    };
    check(
        256,
        512,
        &[
            (0, 256),
            (-7, 263),
            (7, 249),
            (-128, 384),
            (-129, 385),
            (129, 127),
            (-200, 425),
            (300, 49),
            (-510, 511),
            (512, 0),
            (-5000, 511),
        ],
    );
    check(
        48,
        512,
        &[
            (25, 23),
            (-30, 74),
            (40, 20),
            (-100, 83),
            (129, 11),
            (300, 5),
        ],
    );
    check(15, 40, &[(-8, 23), (25, 3), (-39, 28), (40, 1), (129, 0)]);
    let plain = Positions {
        span: 4,
        reach: None,
    };
    assert_eq!(plain.farthest(), Some(4));
    let rows: Vec<u64> = (-5..=5).map(|d| plain.row(d)).collect();
    assert_eq!(rows, [7, 7, 7, 6, 5, 4, 3, 2, 1, 0, 0]);
    let steep = Positions {
        span: 3,
        reach: Some(512),
    };
    assert!(steep.problem().is_some());
}

#[test]
fn slopes_match_the_paper() {
    let of = |n| (0..n).map(|head| slope(head, n)).collect::<Vec<f64>>();
    assert_eq!(of(8), [1, 2, 3, 4, 5, 6, 7, 8].map(|n| 0.5f64.powi(n)));
    // Three heads use the slopes of two heads, and the first slope of four heads.
    let expected = [2f64.powi(-4), 2f64.powi(-8), 2f64.powi(-2)];
    assert_eq!(of(3), expected);
}
