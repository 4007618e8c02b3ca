//! Descriptions that are small enough to be read but ask for more than they should get.

use super::{TINY, build, changed, refused};

#[test]
fn an_unknown_name_of_any_length_is_refused_without_much_memory() {
    // A table of edit distances between two names of this length would have 2.5 billion entries.
    let long = "a".repeat(50_000);
    let source = changed("a: \"x\"", &format!("a: \"{long}\""));
    assert!(refused(build(&source)).contains("is not defined"));
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
