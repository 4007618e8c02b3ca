use super::{palette::*, *};

fn figure(kind: Kind, n_groups: usize, n_series: usize) -> Figure {
    let value = |g: usize, s: usize| Some((1 + g * g + 3 * s) as f64);
    Figure {
        title: "Time of an encoder by set".to_owned(),
        x_label: "set of lengths".to_owned(),
        y_label: "ms".to_owned(),
        groups: (0..n_groups)
            .map(|g| format!("b16_m{}", 64 << (g % 5)))
            .collect(),
        series: (0..n_series)
            .map(|s| {
                let values = (0..n_groups).map(|g| value(g, s));
                Series::new(format!("contender {s}"), values.collect())
            })
            .collect(),
        kind,
        log_y: false,
    }
}

const KINDS: [Kind; 3] = [Kind::Bars, Kind::Stacked, Kind::Lines];

fn numbers(svg: &str, attribute: &str) -> Vec<f64> {
    let start = format!(" {attribute}=\"");
    svg.split(&start)
        .skip(1)
        .map(|rest| rest.split('"').next().unwrap().parse().unwrap())
        .collect()
}

#[test]
fn sizes_are_never_negative_and_text_is_legible() {
    for kind in KINDS {
        for (n_groups, n_series) in [(0, 0), (0, 3), (3, 0), (1, 1), (8, 6), (30, 7), (50, 16)] {
            for log_y in [false, true] {
                let mut figure = figure(kind, n_groups, n_series);
                figure.log_y = log_y && kind != Kind::Stacked;
                let svg = figure.svg().unwrap();
                for attribute in ["width", "height"] {
                    assert!(numbers(&svg, attribute).iter().all(|v| *v >= 0.0));
                }
                assert!(numbers(&svg, "font-size").iter().all(|v| *v >= 12.0));
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
                let layout = Layout::new(&figure);
                assert!(
                    numbers(&svg, "x")
                        .iter()
                        .all(|x| *x <= f64::from(layout.width))
                );
                assert!(
                    numbers(&svg, "y")
                        .iter()
                        .all(|y| *y <= f64::from(layout.height))
                );
            }
        }
    }
}

#[test]
fn missing_zero_and_extreme_values_are_drawn() {
    for kind in KINDS {
        for values in [
            vec![None, None],
            vec![Some(0.0), Some(0.0)],
            vec![Some(0.0), Some(5.0)],
            vec![None, Some(1e-300)],
            vec![Some(1e-9), Some(1e30)],
            vec![Some(1e30), Some(f64::MIN_POSITIVE)],
        ] {
            for log_y in [false, true] {
                let mut figure = figure(kind, 2, 2);
                figure.log_y = log_y && kind != Kind::Stacked;
                figure.series[0].values.clone_from(&values);
                figure.series[1].values.clone_from(&values);
                let svg = figure.svg().unwrap();
                assert!(numbers(&svg, "height").iter().all(|v| *v >= 0.0), "{svg}");
                let none = values.iter().all(Option::is_none);
                assert_eq!(svg.contains("no values"), none);
            }
        }
    }
}

#[test]
fn invalid_figures_are_rejected_by_name() {
    for value in [f64::NAN, f64::INFINITY, -1.0, 1e31] {
        let mut figure = figure(Kind::Bars, 2, 2);
        figure.series[1].values[1] = Some(value);
        let error = figure.svg().unwrap_err().to_string();
        assert!(
            error.contains("`contender 1`") && error.contains("`b16_m128`"),
            "{error}"
        );
    }
    let mut short = figure(Kind::Lines, 3, 1);
    short.series[0].values.pop();
    let error = short.svg().unwrap_err().to_string();
    assert!(
        error.contains("2 values") && error.contains("3 groups"),
        "{error}"
    );
    let mut stack = figure(Kind::Stacked, 3, 1);
    stack.log_y = true;
    assert!(stack.svg().is_err());
    assert!(figure(Kind::Bars, 1, MAX_SERIES + 1).svg().is_err());
}

#[test]
fn labels_of_groups_never_overlap() {
    for kind in KINDS {
        for n_groups in [1, 8, 16, 30, 80] {
            for n_series in [1, 4, 8] {
                let figure = figure(kind, n_groups, n_series);
                let layout = Layout::new(&figure);
                let pitch = (layout.middle_of(layout.label_step) - layout.middle_of(0)) as f64;
                let widest = figure
                    .groups
                    .iter()
                    .map(|g| width_of(g, TEXT))
                    .max()
                    .unwrap();
                let least = if layout.turned { TEXT } else { widest };
                assert!(pitch >= f64::from(least), "{kind:?} {n_groups} {n_series}");
                let (from, to) = layout.bar_of(n_groups - 1, n_series - 1);
                assert!(kind != Kind::Bars || from < to && to <= layout.left + layout.plot_width);
            }
        }
    }
}

#[test]
fn all_colors_differ_in_lightness() {
    for (i, a) in COLORS.iter().enumerate() {
        for b in &COLORS[..i] {
            let difference = (lightness(*a) - lightness(*b)).abs();
            assert!(difference > 7.0, "{a:?} and {b:?}: {difference}");
        }
    }
    let all: Vec<Paint> = (0..MAX_SERIES).map(paint).collect();
    for (i, a) in all.iter().enumerate() {
        assert!(
            all[..i]
                .iter()
                .all(|b| (a.color, a.hollow) != (b.color, b.hollow))
        );
    }
}

#[test]
fn hostile_labels_are_escaped() {
    let mut figure = figure(Kind::Bars, 1, 1);
    figure.groups[0] = "<script>\u{1}&\"".repeat(40);
    figure.title = "a\u{0}b ".repeat(200);
    let svg = figure.svg().unwrap();
    assert!(!svg.contains("<script>") && !svg.contains(['\u{0}', '\u{1}']));
    assert!(svg.contains('…'));
}

#[test]
fn numbers_have_three_digits() {
    for (value, text) in [
        (0.0, "0"),
        (0.012345, "0.0123"),
        (1.0, "1"),
        (1.234, "1.23"),
        (45.64, "45.6"),
        (789.4, "789"),
        (1234.0, "1234"),
        (12_345.0, "12.3k"),
        (7.5e6, "7.5M"),
        (3e9, "3G"),
    ] {
        assert_eq!(number(value), text);
    }
}

#[test]
fn ticks_are_at_one_two_and_five() {
    assert_eq!(
        linear_ticks(&(0.0..1.0)),
        [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
    );
    assert_eq!(linear_ticks(&(0.0..23.0)), [0.0, 5.0, 10.0, 15.0, 20.0]);
    for end in [1e-300, 0.7, 99.0, 1.17e30] {
        assert!((4..=11).contains(&linear_ticks(&(0.0..end)).len()), "{end}");
    }
    assert_eq!(log_ticks(&(1.0..30.0)), [1.0, 2.0, 5.0, 10.0, 20.0]);
    assert_eq!(
        log_ticks(&(0.5..20_000.0)),
        [1.0, 10.0, 100.0, 1000.0, 10_000.0]
    );
    assert_eq!(floor_125(0.07), 0.05);
    assert_eq!(floor_125(3.0), 2.0);
    assert_eq!(floor_125(1.0), 1.0);
}
