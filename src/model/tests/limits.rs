//! Descriptions that are small enough to be read but ask for more than they should get.

use super::super::error::suggest;
use super::{TINY, build, changed, parse, refused};

#[test]
fn a_wrong_name_of_any_length_is_compared_with_none_of_any_length() {
    // The distance of two names of this length takes minutes.
    let (name, known) = ("a".repeat(100_000), "b".repeat(100_000));
    assert!(suggest(&name, [known.as_str()]).starts_with("there is `b"));
    assert!(suggest("a", [known.as_str()]).starts_with("there is `b"));
    assert_eq!(
        suggest("hiden", ["hidden", known.as_str()]),
        "did you mean `hidden`?"
    );
}

#[test]
fn names_of_values_are_short_since_every_iteration_has_its_own() {
    let long = "a".repeat(65);
    let source = TINY.replace("name: \"layer\"", &format!("name: \"{long}\""));
    assert!(refused(build(&source)).contains("at most 64 characters"));
    let source = TINY.replace("name: \"layer\"", &format!("name: \"{}\"", &long[1..]));
    assert!(build(&source).is_ok());
}

#[test]
fn names_of_weights_are_short_since_every_iteration_has_its_own() {
    let long = "a".repeat(250);
    let source = changed("layers.{i}.weight", &format!("layers.{{i}}.{long}"));
    assert!(refused(build(&source)).contains("at most 256 bytes"));
}

#[test]
fn lines_are_short_since_errors_show_them_with_a_mark_below() {
    for filling in ["a", "\t", "長"] {
        let comment = format!("/*{}*/", filling.repeat(70_000 / filling.len()));
        let source = changed("dims:", &format!("{comment} dums:"));
        assert!(refused(parse(&source)).contains("line 3 has"), "{filling}");
        // As wide as a line may be, the mark fits.
        let comment = format!("/*{}*/", filling.repeat(8_000 / filling.len()));
        let source = changed("dims:", &format!("{comment} dums:"));
        assert!(refused(parse(&source)).contains("dums"), "{filling}");
    }
}

#[test]
fn raw_control_characters_are_refused_without_being_shown() {
    for (evil, code) in [
        ("\u{1b}", "1B"),
        ("\u{0}", "00"),
        ("\u{7f}", "7F"),
        ("\u{9b}", "9B"),
        ("\u{202e}", "2E"),
    ] {
        for source in [
            changed("dims:", &format!("/*ä{evil}[2J*/ dims:")),
            changed("\"tiny\"", &format!("\"{evil}\"")),
        ] {
            let text = refused(parse(&source));
            assert!(
                !text.contains(evil) && text.contains(&format!("{code};")),
                "{text}"
            );
        }
    }
    let text = refused(parse(&changed("dims:", "/*ä\u{1b}[2J*/ dims:")));
    insta::assert_snapshot!(text, @r"
    × line 3, column 8 has the raw control character U+001B; leave it out, or write it as an escape
    │ in a string
    ");
    // As an escape it may be in a weight's name, and lines end either way.
    let escaped = changed("table: \"table\"", "table: \"ta\\u{1b}ble\"");
    assert!(parse(&escaped).is_ok());
    assert!(parse(&TINY.replace('\n', "\r\n")).is_ok());
}

#[test]
fn thousands_of_expectations_are_counted_at_once() {
    let source = changed(
        "body: [",
        "expect: {\"gemms\": 1, \"linear\": 1, \"add\": 1, \"launches\": 2}, body: [",
    )
    .replace("times: \"layers\"", "times: 6000");
    let source = source.replace("\"layers\": Key(\"num_hidden_layers\"),", "");
    let model = build(&source).expect("nothing is wrong with it");
    assert_eq!(model.expectations.len(), 24_000);
    // Counted one by one, they are half a billion visits of nodes.
    model.check_expectations(&model.graph).expect("they hold");
}
