//! Checks that idle threads of the CPU executor use no CPU time. This test is in a separate binary, because it reads the CPU time of the
//! whole process.

#![cfg(target_os = "linux")]

use std::{num::NonZeroUsize, time::Duration};

use gemmule::{Batch, DeviceChoice, Engine, runtime::weights::RandomWeights};
use serde_json::json;

/// Returns the CPU time of this process in ticks of 1/100 second.
fn ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("the process has a state");
    let behind_name = stat.rsplit(')').next().expect("a name in brackets");
    let fields: Vec<&str> = behind_name.split_whitespace().collect();
    fields[11].parse::<u64>().expect("user time") + fields[12].parse::<u64>().expect("system time")
}

#[test]
fn threads_sleep_between_runs_and_engines_of_a_number_share_them() {
    let config = json!({
        "model_type": "bert", "vocab_size": 100, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 1024, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    });
    let engine = || {
        Engine::builder("bert")
            .config_value(config.clone())
            .random_weights(RandomWeights {
                seed: 1,
                deviation: 0.02,
            })
            .outputs(["last_hidden_state"])
            .threads(NonZeroUsize::new(8).expect("not 0"))
            .device(DeviceChoice::Cpu)
            .build()
            .expect("the model loads")
    };
    let threads = || {
        std::fs::read_dir("/proc/self/task")
            .expect("threads")
            .count()
    };
    let engines = [engine(), engine(), engine()];
    let mut sessions: Vec<_> = engines
        .iter()
        .map(|e| e.session().expect("a session"))
        .collect();
    let batch = Batch::from_sequences(&[vec![1; 300], vec![2; 40]]).expect("a batch");
    let outputs: Vec<_> = sessions
        .iter_mut()
        .map(|s| s.run(&batch).expect("it runs"))
        .collect();
    assert_eq!(outputs[0], outputs[1]);
    // The process has the eight threads of the pool that all engines share, two threads of the test harness, and the threads of the global
    // pool, which the search for a device starts.
    let own = std::thread::available_parallelism().map_or(1, usize::from);
    assert!(threads() <= 8 + 2 + own, "{} threads", threads());
    std::thread::sleep(Duration::from_millis(50));
    let before = ticks();
    std::thread::sleep(Duration::from_secs(1));
    let spent = ticks() - before;
    assert!(
        spent <= 3,
        "threads without work ran for {spent} of 100 hundredths of a second"
    );
}
