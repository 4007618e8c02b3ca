//! Tests of the answers of a service on the CPU, and of the recovery from failed batches.

use std::sync::atomic::Ordering;

use super::{joint::Joint, lanes::RECOVERS, queue::Entry, *};
use crate::{
    DeviceChoice,
    runtime::cpu::CpuError,
    schedule::{Micros, Settings, Waiting, scheduler},
    text::{Input, Prompt},
};

/// Starts a service with a small model on the CPU.
fn service(name: &str, engine: &Engine, encoder: TextEncoder) -> Service {
    let choice = ServiceChoice {
        scheduler: scheduler(name, &Settings::default()).unwrap(),
        costs: CostTable::parse(include_str!("../../../examples/costs.ron")).unwrap(),
        batch_bytes: 1 << 30,
        queue: Duration::from_secs(60),
        tokenizers: 1,
        seats: Vec::new(),
        trace: None,
        cache: None,
    };
    Service::start(engine, &[], encoder, choice).unwrap()
}

fn engine() -> (Engine, TextEncoder) {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = root.join("tests/checkpoints/st-mean");
    let engine = Engine::from_checkpoint(&folder).device(DeviceChoice::Cpu);
    let engine = engine.invariant(true).build().unwrap();
    (engine, TextEncoder::open(&folder).unwrap())
}

/// Returns the state of a collect thread that receives no results.
fn collect(service: &Service, engine: &Engine, bytes: u64) -> Collect {
    Collect {
        shared: Arc::clone(&service.shared),
        pipeline: Arc::new(Pipeline::new(engine.session().unwrap()).unwrap()),
        lane: 0,
        output: EMBEDDING,
        score: None,
        weights: None,
        mask: None,
        bytes,
    }
}

/// Returns the inputs of a batch, and the receivers for their answers.
#[allow(clippy::type_complexity)]
fn batch(
    service: &Service,
    texts: &[&str],
) -> (
    Vec<(u64, Entry)>,
    Vec<oneshot::Receiver<Result<Answer, ServeError>>>,
) {
    let members = texts.iter().enumerate().map(|(index, text)| {
        let (answer, reply) = oneshot::channel();
        let waiter = Waiter {
            answer,
            index,
            submit: Submit::default(),
            sent: Instant::now(),
            share: Share::unlimited(),
            load: Load::default(),
            joint: None,
        };
        let encoded = service
            .encoder()
            .encode_one(Input::Text(text), Prompt::Default);
        let entry = Entry {
            encoded: encoded.unwrap(),
            lead: Leader {
                waiter: Some(waiter),
                ticket: Arc::new(Ticket::of(&Submit::default(), Instant::now())),
                coalesced: None,
            },
            sent: Instant::now(),
            tenant: 0,
            class: 0,
        };
        ((index as u64, entry), reply)
    });
    members.unzip()
}

#[test]
fn a_batch_that_joined_another_frees_no_lane() {
    let (engine, encoder) = engine();
    let service = service("slotted-das", &engine, encoder);
    let collect = collect(&service, &engine, 1 << 30);
    let shared = &service.shared;
    {
        let mut state = shared.lock();
        let State {
            scheduling,
            scheduler,
            ..
        } = &mut *state;
        // The request takes several steps, so other requests may join its batch.
        scheduling.arrive(Waiting {
            steps: 5,
            ..Waiting::new(4, Micros(0))
        });
        let first = scheduling
            .decide(Micros(1), &mut **scheduler, &shared.costs)
            .unwrap();
        scheduling.arrive(Waiting::new(3, Micros(2)));
        let second = scheduling
            .decide(Micros(3), &mut **scheduler, &shared.costs)
            .unwrap();
        assert_eq!((first.run.len(), second.run.len()), (1, 1));
        assert_eq!((first.run[0].joins, second.run[0].joins), (false, true));
    }
    let in_flight = || shared.lock().scheduling.lanes()[0].in_flight;
    assert_eq!(in_flight(), 1);
    collect.finish(vec![1], true, None);
    assert_eq!(in_flight(), 1);
    collect.finish(vec![0], false, None);
    assert_eq!(in_flight(), 0);
}

#[test]
fn requests_are_refused_while_tokenizers_are_overloaded() {
    let (engine, encoder) = engine();
    let service = service("packed", &engine, encoder);
    let ask = || service.submit(vec![Text::One("rain".to_owned())], Submit::default());
    assert!(ask().is_ok());
    {
        let mut state = service.shared.lock();
        for _ in 0..100 {
            state
                .backlog
                .tokenizing
                .add(1.0, Duration::from_millis(100));
        }
        state.backlog.tenants.change(0, |work| {
            work.bytes.add(0, 1000);
            work.texts += 1000;
        });
    }
    match ask().err() {
        Some(ServeError::Overloaded { retry_after }) => {
            let seconds = retry_after.as_secs_f64();
            assert!((60.0..=75.0).contains(&seconds), "{seconds}");
        }
        other => panic!("{other:?}"),
    }
    // No queued work has to run before an urgent request.
    let urgent = Submit {
        class: 1,
        ..Submit::default()
    };
    let text = || vec![Text::One("rain".to_owned())];
    assert!(service.submit(text(), urgent).is_ok());
}

#[test]
fn a_lost_device_refuses_all_requests() {
    use cudarc::driver::{DriverError, sys::CUresult};
    let (engine, encoder) = engine();
    let service = service("packed", &engine, encoder);
    let collect = collect(&service, &engine, 1 << 30);
    let (members, answers) = batch(&service, &["a small bird", "rain"]);
    // Add a request to the queue without waking the launch thread.
    let (mut waiting, waits) = batch(&service, &["words"]);
    {
        let mut state = service.shared.lock();
        let (_, entry) = waiting.remove(0);
        let id = state.scheduling.arrive(Waiting::new(3, Micros(0)));
        state.insert(id, entry);
        drop(state);
    }
    assert!(!service.is_lost());
    let lost = EngineError::Cuda(crate::runtime::cuda::CudaError::Driver {
        action: "wait for the stream".to_owned(),
        source: DriverError(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS),
    });
    collect.answer_by_halves(members, lost);
    assert!(service.is_lost());
    for answer in answers {
        let error = answer.blocking_recv().unwrap().unwrap_err();
        assert!(
            matches!(error, ServeError::NotReady { why: LOST }),
            "{error}"
        );
    }
    // The waiting request either ran before the device was lost, or gets the error of the lost device.
    for answer in waits {
        match answer.blocking_recv().unwrap() {
            Ok(_) | Err(ServeError::NotReady { why: LOST }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    let waiter = service.submit(vec![Text::One("x".to_owned())], Submit::default());
    let error = waiter.err().unwrap();
    assert_eq!(
        error.to_string(),
        "the server is not ready: its device was lost, and it is shutting down; another server may answer"
    );
}

#[test]
fn a_batch_without_memory_runs_in_halves_and_reduces_the_limit_for_a_while() {
    let (engine, encoder) = engine();
    let texts = ["a small bird", "the tower is high", "words", "rain"];
    let of_all = encoder.encode(&texts).unwrap();
    let expected = engine.session().unwrap().run(&of_all).unwrap();
    let bytes = 1 << 30;
    let service = service("packed", &engine, encoder);
    let collect = collect(&service, &engine, bytes);
    let (members, answers) = batch(&service, &texts);
    let no_memory = EngineError::Cpu(CpuError::OutOfMemory { bytes: 1 << 40 });
    let metrics = &service.shared.metrics;
    collect.answer_by_halves(members, no_memory);
    assert_eq!(metrics.failed_batches.load(Ordering::Relaxed), 1);
    for (at, answer) in answers.into_iter().enumerate() {
        let answer = answer.blocking_recv().unwrap().unwrap();
        assert_eq!(answer.values, expected.sequence(EMBEDDING, at).unwrap());
    }
    let held = || service.shared.lock().scheduling.lanes()[0].bytes;
    let less = held();
    assert!(less < bytes && less > 0, "{less}");
    // The limit increases again with each batch.
    for _ in 0..3 {
        let replies = service.submit(vec![Text::One("x".to_owned())], Submit::default());
        replies.unwrap().remove(0).wait().unwrap();
    }
    drop(collect);
    let began = Instant::now();
    while held() < less + 3 * bytes / RECOVERS {
        assert!(began.elapsed() < Duration::from_secs(10), "{}", held());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(held() < bytes);
}

#[test]
fn inputs_of_a_lost_request_leave_the_queue() {
    let (engine, encoder) = engine();
    let service = service("packed", &engine, encoder);
    let shared = &service.shared;
    let joint = |deadline| Arc::new(Joint::new(Some(Micros(deadline)), 4, false));
    // The first request would miss its deadline, the second one has failed, and the third one has time.
    let joints = [joint(1), joint(u64::MAX), joint(u64::MAX)];
    let failure = ServeError::TooLong { index: 7, limit: 9 };
    assert!(joints[1].fail(&failure));
    assert!(!joints[1].fail(&ServeError::Deadline));
    let mut replies = Vec::new();
    {
        let mut state = shared.lock();
        for joint in &joints {
            let (members, answers) = batch(&service, &["rain", "a small bird"]);
            for (_, mut entry) in members {
                let waiter = entry.lead.waiter.as_mut().unwrap();
                waiter.joint = Some(Arc::clone(joint));
                let tokens = entry.encoded.ids.len() as u32;
                let id = state.scheduling.arrive(Waiting::new(tokens, Micros(0)));
                state.insert(id, entry);
            }
            state.joints.push(Arc::clone(joint));
            replies.push(answers);
        }
        let lost = state.drop_lost(Micros(100), &shared.costs);
        assert_eq!((lost.len(), state.entries.len()), (4, 2));
        assert_eq!(state.scheduling.waiting().len(), 2);
        assert_eq!(state.joints.len(), 1);
        let errors: Vec<String> = lost.iter().map(|(_, error)| error.to_string()).collect();
        assert!(errors[0].starts_with("the request cannot be answered before its deadline"));
        assert_eq!(errors[1], errors[0]);
        assert_eq!(errors[2..], [failure.to_string(), failure.to_string()]);
        drop(state);
        for (entry, error) in lost {
            assert!(shared.give_up(entry.lead, error).is_none());
        }
        shared.changed.notify_one();
    }
    assert_eq!(shared.metrics.hopeless.load(Ordering::Relaxed), 2);
    assert_eq!(shared.metrics.cancelled.load(Ordering::Relaxed), 2);
    for (nth, answers) in replies.into_iter().enumerate() {
        for answer in answers {
            assert_eq!(answer.blocking_recv().unwrap().is_ok(), nth == 2);
        }
    }
}

#[test]
fn a_list_is_refused_if_the_queued_work_and_the_list_exceed_its_deadline() {
    let (engine, encoder) = engine();
    let service = service("packed", &engine, encoder);
    let texts = |n: usize| (0..n).map(|at| Text::One(format!("rain {at}"))).collect();
    let submit = |is_joint, ms| Submit {
        within: Some(Duration::from_millis(ms)),
        is_joint,
        ..Submit::default()
    };
    // The tokenizers are busy for ten seconds.
    let busy = |work: &mut crate::serve::backlog::Work| {
        work.add_untokenized(
            0,
            Load {
                bytes: 20_000_000,
                tokens: 0,
            },
        );
    };
    {
        let mut state = service.shared.lock();
        state.backlog.tenants.change(0, busy);
        // Another tenant also has queued work, so the tenants share the tokenizers.
        state.backlog.tenants.change(1, |work| work.texts += 1);
    }
    match service.submit(texts(5), submit(true, 2000)).err() {
        Some(ServeError::Hopeless { retry_after }) => {
            let seconds = retry_after.as_secs_f64();
            assert!((6.0..=6.2).contains(&seconds), "{seconds}");
        }
        other => panic!("{other:?}"),
    }
    let refused = || service.metrics().hopeless.load(Ordering::Relaxed);
    assert_eq!(refused(), 5);
    // The deadline is late enough.
    assert!(service.submit(texts(5), submit(true, 20_000)).is_ok());
    // Even with the earlier deadline, two requests are admitted: a list whose inputs succeed or fail independently, and a request of a
    // tenant with less work.
    assert!(service.submit(texts(5), submit(false, 2000)).is_ok());
    let other = Submit {
        tenant: 1,
        ..submit(true, 2000)
    };
    assert!(service.submit(texts(5), other).is_ok());
    assert_eq!(refused(), 5);
    // With this pace of the tokenizers, the list takes longer than its time limit even if nothing else is queued.
    {
        let mut state = service.shared.lock();
        state
            .backlog
            .tokenized(1000, 300, Duration::from_secs(1000));
    }
    match service.submit(texts(5), submit(true, 2000)).err() {
        Some(ServeError::ShortDeadline { takes, within }) => {
            assert!(takes > within && within == Duration::from_secs(2));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_text_of_a_list_counts_until_its_reply_is_dropped() {
    let (engine, encoder) = engine();
    let service = service("packed", &engine, encoder);
    let counted = || service.shared.lock().backlog.tenants.all().texts;
    let texts = (0..40).map(|at| Text::One(format!("rain {at}"))).collect();
    let mut replies = service.submit(texts, Submit::default()).unwrap();
    assert_eq!(counted(), 40);
    replies.truncate(30);
    assert_eq!(counted(), 30);
    for reply in replies {
        reply.wait().unwrap();
    }
    assert_eq!(counted(), 0);
}
