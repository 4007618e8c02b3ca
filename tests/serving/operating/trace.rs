//! Tests of a server's trace, and of replaying the trace.

use std::{fs, thread};

use gemmule::{
    schedule::{Settings, scheduler},
    serve::{Model, ModelChoice, Recorder, Submit, Text},
    simulate::{Event, Happened, ReplayError, parse_events, parse_trace, replay},
};

use super::{choice, costs, service, within};

/// Serves requests with several lengths, priority classes and deadlines from three threads, and returns the trace. Some requests are
/// canceled.
fn served(name: &str, max_bytes: u64) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.jsonl");
    let model = Model::open(ModelChoice {
        trace: Some(Recorder::create(&file, max_bytes).unwrap()),
        ..choice(name)
    })
    .unwrap();
    thread::scope(|scope| {
        for tenant in 0..3_u32 {
            let service = service(&model);
            scope.spawn(move || {
                let mut kept = Vec::new();
                for i in 0..60 {
                    let text = |n: usize| Text::One("some words of a text ".repeat(1 + n % 7));
                    let submit = Submit {
                        tenant,
                        class: (i % 3) as u8,
                        truncate: true,
                        ..within([3, 40, 60_000][i % 3])
                    };
                    // Send lists and single texts. The thread pool tokenizes lists, but not single texts.
                    let n = if i % 5 == 0 { 8 } else { 1 };
                    let replies = service.submit((0..n).map(|j| text(i + j)).collect(), submit);
                    for (at, reply) in replies.unwrap().into_iter().enumerate() {
                        if (i + at) % 11 != 0 {
                            kept.push(reply);
                        }
                    }
                    // Sometimes wait for a response before the next request, so that there are several batches even if batches are fast.
                    if i % 6 == 2 {
                        let last = kept.pop().expect("most are kept");
                        let _ = last.wait();
                    }
                }
                for reply in kept {
                    // Ignore errors, because a deadline of three milliseconds is sometimes missed.
                    let _ = reply.wait();
                }
            });
        }
    });
    drop(model);
    fs::read_to_string(file).unwrap()
}

#[test]
fn a_trace_replayed_at_its_times_gives_the_decisions_of_the_server() {
    for name in ["packed", "dp", "slotted-das"] {
        let text = served(name, 1 << 30);
        let events = parse_events(&text).unwrap();
        let n = |is: fn(&Event) -> bool| events.iter().filter(|event| is(event)).count();
        let arrived = n(|e| matches!(e, Event::Arrived(_)));
        let decided = n(|e| matches!(e, Event::Happened(_, Happened::Decided(_))));
        assert!(arrived > 150 && arrived <= 3 * (12 * 8 + 48), "{arrived}");
        let mut again = scheduler(name, &Settings::default()).unwrap();
        let replayed = replay(&events, &mut *again, &costs()).unwrap();
        assert_eq!(replayed.requests, arrived);
        assert_eq!(replayed.decisions, decided);
        assert!(replayed.batches > 3);
        // The trace can also be used as load for a simulation.
        assert_eq!(parse_trace(&text).unwrap().len(), arrived);
        // A replay with another scheduler reports that its decisions differ from the trace.
        let mut other = scheduler("no-batch", &Settings::default()).unwrap();
        let error = replay(&events, &mut *other, &costs()).unwrap_err();
        assert!(matches!(error, ReplayError::Differs { .. }), "{error}");
    }
}

#[test]
fn a_trace_ends_at_its_size_and_the_server_goes_on() {
    let text = served("packed", 2_000);
    assert!(text.len() <= 2_000 && text.len() > 1_500, "{}", text.len());
    let events = parse_events(&text).unwrap();
    let mut again = scheduler("packed", &Settings::default()).unwrap();
    replay(&events, &mut *again, &costs()).unwrap();
}

#[test]
fn lines_that_are_no_events_are_told_by_number() {
    let error = |text: &str| parse_events(text).unwrap_err().to_string();
    insta::assert_snapshot!(error("{\"t\": 1, \"tokens\": 3}\n{\"t\": 1, \"event\": {\"slept\": 3}}"), @r#"line 2 is not a request: unknown variant `slept`, expected one of `began`, `decided`, `finished`, `left`, `bytes` at line 1 column 26; expected JSON such as {"t": 1500, "tokens": 12}, with optional deadline, class, tenant and steps"#);
    let events = parse_events("{\"t\": 1, \"tokens\": 3}").unwrap();
    let mut again = scheduler("packed", &Settings::default()).unwrap();
    let error = replay(&events, &mut *again, &costs()).unwrap_err();
    assert_eq!(error, ReplayError::NoBeginning);
}
