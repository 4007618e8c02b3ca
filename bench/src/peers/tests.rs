use std::cell::Cell;

use super::{answers::*, *};

fn items(n: usize) -> Vec<String> {
    (0..n).map(|i| format!("shape {i}")).collect()
}

fn read(text: &str, n_items: usize) -> Answers {
    Answers::read(text.as_bytes(), &items(n_items), &|_| ())
}

#[test]
fn times_are_read_and_progress_is_reported() {
    let done = Cell::new(0);
    let text = "{\"item\": 1, \"who\": \"torch\", \"us\": 1.25}\n\n{\"done\": 2}\n{\"item\": 0, \"who\": \"b\", \"us\": 3}";
    let answers = Answers::read(text.as_bytes(), &items(2), &|n| done.set(n));
    let time = |item, who: &str, us| PeerTime {
        item,
        who: who.to_owned(),
        us,
    };
    assert_eq!(answers.times, [time(1, "torch", 1.25), time(0, "b", 3.0)]);
    assert!(answers.remarks.is_empty(), "{:?}", answers.remarks);
    assert_eq!(done.get(), 2);
}

#[test]
fn invalid_lines_are_rejected_with_a_remark_and_the_rest_is_kept() {
    for hostile in [
        "not JSON",
        "{}",
        "[]",
        "null",
        r#"{"item": 2, "who": "torch", "us": 1}"#,
        r#"{"item": -1, "who": "torch", "us": 1}"#,
        r#"{"item": 1e99, "who": "torch", "us": 1}"#,
        r#"{"item": 0, "who": "torch", "us": NaN}"#,
        r#"{"item": 0, "who": "torch", "us": 1e999}"#,
        r#"{"item": 0, "who": "torch", "us": 0}"#,
        r#"{"item": 0, "who": "torch", "us": -3}"#,
        r#"{"item": 0, "who": "torch", "us": 1e12}"#,
        r#"{"item": 0, "who": " ", "us": 1}"#,
        r#"{"item": 0, "who": "torch", "us": 1, "more": 1}"#,
        r#"{"item": 0, "who": 7, "us": 1}"#,
        r#"{"done": 3}"#,
        "\u{1b}[2J{",
    ] {
        let text = format!("{hostile}\n{{\"item\": 0, \"who\": \"torch\", \"us\": 2}}\n");
        let answers = read(&text, 2);
        assert_eq!(answers.times.len(), 1, "{hostile}");
        assert_eq!(answers.remarks.len(), 1, "{hostile}");
        assert!(
            answers.remarks[0].contains("is invalid"),
            "{:?}",
            answers.remarks
        );
        assert!(
            !answers.remarks[0].contains('\u{1b}'),
            "escapes reach no terminal"
        );
    }
}

#[test]
fn nested_long_and_many_lines_give_few_short_remarks() {
    let deep = "[".repeat(100_000);
    let long = "x".repeat(1 << 20);
    let many = "?\n".repeat(10_000);
    let bytes = [
        deep.as_bytes(),
        b"\n",
        long.as_bytes(),
        b"\n",
        &[0xff, 0xfe, b'\n'],
        many.as_bytes(),
    ];
    let answers = Answers::read(bytes.concat().as_slice(), &items(1), &|_| ());
    assert!(answers.times.is_empty());
    assert!(
        (2..=60).contains(&answers.remarks.len()),
        "{}",
        answers.remarks.len()
    );
    assert!(answers.remarks.iter().all(|r| r.chars().count() < 600));
    assert!(answers.remarks.last().unwrap().contains("more"));
}

#[test]
fn a_peer_that_failed_is_named_with_its_error() {
    let answers = read(r#"{"item": 0, "who": "cuDNN", "error": "no\nkernel"}"#, 1);
    assert_eq!(
        answers.remarks,
        ["no time of `cuDNN` for shape 0: no kernel"]
    );
}

#[test]
fn a_probe_names_torch_and_the_device() {
    let line = r#"{"device": "NVIDIA H200", "torch": "2.11.0"}"#;
    assert_eq!(probe_line(line).unwrap(), "PyTorch 2.11.0 on NVIDIA H200");
    for hostile in ["", "{}", "[1]", r#"{"device": 1, "torch": "2"}"#] {
        assert_eq!(probe_line(hostile), None);
    }
}

#[test]
fn words_choose_the_python() {
    assert_eq!("auto".parse(), Ok(Choice::Auto));
    assert_eq!("off".parse(), Ok(Choice::Off));
    assert_eq!(
        "/opt/bin/python".parse(),
        Ok(Choice::Python("/opt/bin/python".into()))
    );
}

#[test]
fn a_missing_explicit_python_is_an_error() {
    let missing = Choice::Python("/no/such/python".into());
    let error = Peers::find(&missing, KERNELS, 0)
        .map(|p| p.is_some())
        .unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("/no/such/python") && text.contains("--peers"),
        "{text}"
    );
    assert!(Peers::find(&Choice::Off, KERNELS, 0).unwrap().is_none());
}

/// Runs a shell instead of Python, with `text` as the script.
#[cfg(unix)]
fn stand_in(text: &'static str) -> Result<Option<Peers>, Report> {
    let name = "stand_in.sh";
    Peers::find(&Choice::Python("sh".into()), Script { name, text }, 1)
}

#[cfg(unix)]
#[test]
fn a_script_that_exits_early_gives_the_reason() {
    let found = stand_in("echo 'sees no device' >&2; exit 4");
    let text = found.map(|p| p.is_some()).unwrap_err().to_string();
    assert!(
        text.contains("sees no device") && text.contains('4'),
        "{text}"
    );
    let silent = stand_in("exit 0").map(|p| p.is_some()).unwrap_err();
    assert!(
        silent.to_string().contains("did not report a device"),
        "{silent}"
    );
}

#[cfg(unix)]
#[test]
fn a_script_that_is_killed_leaves_its_results_and_a_remark() {
    let peers = stand_in(
        r#"
        case "$*" in *--probe*) echo '{"device": "a card", "torch": "2"}'; exit 0;; esac
        test "$*" = "--device 1 --request request.json" || exit 8
        test -s request.json && test -s peers.py || exit 9
        echo '{"item": 0, "who": "torch", "us": 2}'
        echo 'out of memory' >&2
        exit 7"#,
    );
    let peers = peers.unwrap().unwrap();
    assert_eq!(peers.what, "PyTorch 2 on a card");
    let answers = peers.time(&[1, 2], &items(2), &|_| ()).unwrap();
    assert_eq!(answers.times.len(), 1);
    let remark = answers.remarks.join(" ");
    assert!(
        remark.contains("out of memory") && remark.contains('7'),
        "{remark}"
    );
}
