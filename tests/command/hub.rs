//! Tests of models that are named by their id on the Hugging Face hub. A local server of the test takes the place of the hub.

#[path = "../../crates/gemmule-hub/tests/server/mod.rs"]
mod server;

use std::{
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::common::gguf::{Stored, bert};
use crate::common::{
    Folder,
    tiny::{on_one_line, said},
};
use gemmule::{DeviceChoice, Engine, EngineError, engine::hub};
use serde_json::Value;
use server::{Files, MODEL, Server, files_of};

fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/checkpoints")
        .join(name)
}

/// A local hub with one model, its server for file contents, and a user's home folder.
struct Hub {
    hub: Server,
    cdn: Server,
    home: Folder,
}

impl Hub {
    /// Starts a hub whose model has the files of a checkpoint and additional files.
    fn with(name: &str, more: &[&str]) -> Self {
        let mut files: Files = files_of(&checkpoint(name));
        for name in more {
            files.insert((*name).to_owned(), b"not read".to_vec());
        }
        let (hub, cdn) = server::hub(files);
        Self {
            hub,
            cdn,
            home: Folder::new(),
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.configured(Command::new(env!("CARGO_BIN_EXE_gemmule")));
        command.args(args);
        command
    }

    /// Makes a program use this hub and the cache in the user's home folder. Removes environment variables that would change this.
    fn configured(&self, mut command: Command) -> Command {
        for name in [
            "HF_HUB_CACHE",
            "HUGGINGFACE_HUB_CACHE",
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "HF_TOKEN_PATH",
            "HF_HUB_OFFLINE",
            "TRANSFORMERS_OFFLINE",
            "SSL_CERT_FILE",
        ] {
            command.env_remove(name);
        }
        command
            .env("HF_HOME", self.home.path())
            .env("HF_ENDPOINT", &self.hub.url)
            .env("NO_PROXY", "127.0.0.1")
            .env_remove("no_proxy");
        command
    }

    /// Returns the output of a command that succeeds.
    #[track_caller]
    fn ok(&self, args: &[&str]) -> String {
        let (success, out, errors) = said(&self.home, &mut self.command(args));
        assert!(success, "{args:?}: {out}{errors}");
        out
    }

    /// Returns the error of a command, on one line.
    #[track_caller]
    fn error(&self, args: &[&str]) -> String {
        self.error_of(&mut self.command(args))
    }

    #[track_caller]
    fn error_of(&self, command: &mut Command) -> String {
        let (success, out, errors) = said(&self.home, command);
        assert!(!success, "{command:?} should fail: {out}");
        on_one_line(&errors.replace(&self.hub.url, "[hub]"))
    }

    /// Returns the sorted names of the files that were requested since the last call.
    fn fetched(&self) -> Vec<String> {
        let requests = self.hub.requests();
        let names = requests
            .iter()
            .filter_map(|r| r.target.split_once("/resolve/")?.1.split_once('/'));
        let mut names: Vec<String> = names.map(|(_, name)| name.to_owned()).collect();
        names.sort_unstable();
        self.hub.forget();
        self.cdn.forget();
        names
    }
}

/// Returns the Python interpreter of an environment with huggingface_hub, or `None` if there is none. `make test` installs this
/// environment, which also has the clients of the server. In CI, its absence is an error.
fn python() -> Option<PathBuf> {
    let set = std::env::var_os("GEMMULE_CLIENTS").map(PathBuf::from);
    let own = || Path::new(env!("CARGO_MANIFEST_DIR")).join(".gemmule/clients");
    let python = set.unwrap_or_else(own).join("bin/python");
    let is_there = python.is_file();
    if !is_there {
        let problem = format!(
            "huggingface_hub was not tried: there is no {}; `make test` installs it",
            python.display()
        );
        assert!(std::env::var_os("CI").is_none(), "{problem}");
        eprintln!("{problem}");
    }
    is_there.then_some(python)
}

impl Hub {
    /// Runs a Python script that uses huggingface_hub, and returns its output.
    #[track_caller]
    fn python(&self, python: &Path, script: &str) -> String {
        let mut command = self.configured(Command::new(python));
        command
            .env("HF_HUB_DISABLE_XET", "1")
            .env("HF_HUB_DISABLE_TELEMETRY", "1")
            .args(["-c", script, MODEL]);
        let (success, out, errors) = said(&self.home, &mut command);
        assert!(success, "{script}: {out}{errors}");
        out
    }
}

fn outputs(json: &str) -> Value {
    let json: Value = serde_json::from_str(json).expect("JSON");
    json["outputs"].clone()
}

#[test]
fn a_model_is_fetched_once_and_then_runs_offline() {
    let hub = Hub::with(
        "st-dense",
        &[
            "README.md",
            "onnx/model.onnx",
            "pytorch_model.bin",
            "2_Dense/pytorch_model.bin",
            "tf_model.h5",
            "vocab.txt",
        ],
    );
    fn by<'a>(model: &[&'a str]) -> Vec<&'a str> {
        let text = ["--text", "a quick test", "--device", "cpu", "--json"];
        [&["run"], model, &text].concat()
    }
    let found = hub.ok(&by(&["--model", MODEL]));
    assert_eq!(
        hub.fetched(),
        [
            "1_Pooling/config.json",
            "2_Dense/config.json",
            "2_Dense/model.safetensors",
            "3_Dense/config.json",
            "3_Dense/model.safetensors",
            "config.json",
            "config_sentence_transformers.json",
            "model.safetensors",
            "modules.json",
            "sentence_bert_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    );
    let folder = checkpoint("st-dense");
    let local = hub.ok(&by(&["--weights", folder.to_str().unwrap()]));
    assert_eq!(outputs(&found), outputs(&local));
    // A second run only requests the list of the model's files. An offline run requests nothing.
    assert_eq!(outputs(&hub.ok(&by(&[MODEL]))), outputs(&local));
    assert_eq!(hub.hub.requests().len(), 1);
    assert_eq!(hub.fetched(), [""; 0]);
    let mut offline = hub.command(&by(&["--model", MODEL]));
    let (success, out, errors) = said(&hub.home, offline.env("HF_HUB_OFFLINE", "1"));
    assert!(success, "{errors}");
    assert_eq!(outputs(&out), outputs(&local));
    assert_eq!(hub.hub.requests().len(), 0);
}

#[test]
fn the_cache_is_shared_with_huggingface_hub_both_ways() {
    let Some(python) = python() else { return };
    let run = [
        "run",
        "--model",
        MODEL,
        "--text",
        "a quick test",
        "--device",
        "cpu",
        "--json",
    ];
    let folder = checkpoint("st-dense");
    let weights = ["run", "--weights", folder.to_str().unwrap()];

    let hub = Hub::with("st-dense", &["README.md"]);
    hub.python(
        &python,
        "import sys; from huggingface_hub import snapshot_download as get; get(sys.argv[1])",
    );
    hub.fetched();
    let mut offline = hub.command(&run);
    let (success, out, errors) = said(&hub.home, offline.env("HF_HUB_OFFLINE", "1"));
    assert!(success, "{errors}");
    let local = hub.ok(&[&weights[..], &run[3..]].concat());
    assert_eq!(outputs(&out), outputs(&local));
    assert_eq!(outputs(&hub.ok(&run)), outputs(&local));
    assert_eq!(hub.fetched(), [""; 0]);

    let hub = Hub::with("st-dense", &["README.md"]);
    hub.ok(&run);
    hub.fetched();
    let script = "\
import sys
from huggingface_hub import hf_hub_download, scan_cache_dir, snapshot_download
model = sys.argv[1]
snapshot_download(model, local_files_only=True)
hf_hub_download(model, 'model.safetensors', local_files_only=True)
cache = scan_cache_dir()
assert not cache.warnings, cache.warnings
(repo,) = cache.repos
(revision,) = repo.revisions
assert revision.refs == {'main'}, revision
print(repo.repo_id, revision.commit_hash, len(revision.files))
snapshot_download(model)
";
    let said = hub.python(&python, script);
    assert_eq!(said.trim(), format!("{MODEL} {} 12", server::COMMIT));
    // With access to the hub, huggingface_hub only downloads the two files that gemmule does not read, in any order.
    let requests = [hub.hub.requests(), hub.cdn.requests()].concat();
    let got = requests.iter().filter(|r| r.method == "GET");
    let got = got.filter(|r| !r.target.starts_with("/api/"));
    let mut got: Vec<&str> = got.map(|r| r.target.as_str()).collect();
    got.sort_unstable();
    let files = ["README.md", "expected.json"];
    let files = files.map(|file| format!("/{MODEL}/resolve/{}/{file}", server::COMMIT));
    assert_eq!(got, files);
}

#[test]
fn commands_about_the_program_fetch_no_weights() {
    let hub = Hub::with("st-mean", &[]);
    let explained = hub.ok(&["explain", "--model", MODEL]);
    assert!(explained.contains("fuse_attention"), "{explained}");
    let fetched = hub.fetched();
    assert!(fetched.contains(&"config.json".to_owned()));
    let is_large = |name: &String| name.ends_with(".safetensors") || name == "tokenizer.json";
    assert!(!fetched.iter().any(is_large), "{fetched:?}");
    let random = ["--random-weights", "1", "--device", "cpu"];
    hub.home.write("ids.json", "[[1, 2, 3]]");
    hub.ok(&[&["run", MODEL, "--ids", "ids.json"], &random[..]].concat());
    assert_eq!(hub.fetched(), [""; 0]);
    let checked = hub.ok(&["check", MODEL]);
    assert!(
        checked.contains("the checkpoint has all weights that the model reads"),
        "{checked}"
    );
    assert_eq!(hub.fetched(), ["model.safetensors", "tokenizer.json"]);
}

#[test]
fn a_model_of_the_hub_generates() {
    let hub = Hub::with("writer", &[]);
    let prompt = [
        "--prompt",
        "One cold morning",
        "--device",
        "cpu",
        "--max-new",
        "8",
    ];
    let found = hub.ok(&[&["generate", "--model", MODEL], &prompt[..]].concat());
    let folder = checkpoint("writer");
    let weights = ["generate", "--weights", folder.to_str().unwrap()];
    assert_eq!(found, hub.ok(&[&weights[..], &prompt[..]].concat()));
    assert!(hub.fetched().contains(&"generation_config.json".to_owned()));
}

#[test]
fn the_library_fetches_a_model() {
    let (server, _) = server::hub(files_of(&checkpoint("st-mean")));
    let cache = Folder::new();
    let hub = hub::Hub {
        endpoint: server.url,
        ..hub::Hub::new(cache.path())
    };
    let id = hub::ModelId::parse(MODEL).unwrap();
    let folder = hub::fetch(&hub, &id, hub::Files::All, &|_| ()).unwrap();
    let embed = |folder: &Path| {
        let builder = Engine::from_checkpoint(folder).device(DeviceChoice::Cpu);
        builder.build().unwrap().embed(&["a quick test"]).unwrap()
    };
    assert_eq!(embed(&folder), embed(&checkpoint("st-mean")));
    // A name without an owner is refused before any request.
    let error = Engine::from_hub("all-MiniLM-L6-v2").err().unwrap();
    assert!(
        matches!(error, EngineError::Hub(hub::HubError::BadId { .. })),
        "{error}"
    );
}

#[test]
fn a_served_model_has_its_name_on_the_hub() {
    let hub = Hub::with("st-mean", &[]);
    hub.home
        .write("serve.ron", format!("(models: [(model: \"{MODEL}\")])"));
    let mut child = hub
        .command(&["serve", "--config", "serve.ron", "--port", "0"])
        .current_dir(hub.home.path())
        .env("NO_COLOR", "1")
        .env("CUDA_VISIBLE_DEVICES", "")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let errors = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    for line in errors.lines().map_while(Result::ok) {
        said += &(line.clone() + "\n");
        if line.starts_with("tiny: ") && line.contains("ready after") {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(
        said.contains("\ntiny: ") || said.starts_with("tiny: "),
        "{said}"
    );
}

#[test]
fn an_input_is_missed_before_a_model_is_fetched() {
    let hub = Hub::with("st-mean", &[]);
    let error = hub.error(&["run", "--model", MODEL]);
    assert!(error.contains("there is no input"), "{error}");
    assert_eq!(hub.hub.requests().len(), 0);
}

#[test]
fn errors_say_what_to_do() {
    let hub = Hub::with("st-mean", &[]);
    let text = ["--text", "x", "--device", "cpu"];
    let run = |model: &[&str]| hub.error(&[&["run"], model, &text[..]].concat());
    insta::assert_snapshot!(run(&["--model", "org/other"]), @"× there is no model `org/other` at [hub]; check the name; private repositories need HF_TOKEN");
    insta::assert_snapshot!(run(&["--model", "org/tiny@v9"]), @"× `org/tiny` has no revision `v9`; use a branch, a tag or a commit of [hub]/org/tiny/commits/main");
    insta::assert_snapshot!(run(&["--weights", MODEL]), @"× there is no folder `org/tiny`; expected the path of a checkpoint folder, not the name of a model on the Hugging Face hub help: `--model org/tiny`, without --weights, fetches it from the hub");
    insta::assert_snapshot!(run(&["--model", MODEL, "--weights", "."]), @"× `org/tiny` is a model that includes its weights; omit the folder of weights, or give the description of the model instead help: leave --weights out");
    insta::assert_snapshot!(run(&["bert", "--model", MODEL]), @"error: the argument '[MODEL]' cannot be used with '--model <MODEL>' Usage: gemmule run --text <TEXT> --device <DEVICE> <MODEL> For more information, try '--help'.");
    let file = run(&["--model", "org/tiny.ron"]);
    assert!(
        file.starts_with(
            "× there is no description `org/tiny.ron`: it is neither a file nor shipped"
        ),
        "{file}"
    );
    insta::assert_snapshot!(hub.error(&["serve", "--model", "bert"]), @"× `bert` is neither the name of a model on the hub nor the path of a folder or a GGUF file; expected org/name, org/name@revision, org/name:file or a path");
    let mut offline = hub.command(&[&["run", MODEL], &text[..]].concat());
    insta::assert_snapshot!(hub.error_of(offline.env("HF_HUB_OFFLINE", "1")), @"× `org/tiny` is not in the cache `[dir]/hub`, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; fetch it once without them");
    let mut gone = hub.command(&[&["run", MODEL], &text[..]].concat());
    let gone = gone.env("HF_ENDPOINT", "hub.test");
    insta::assert_snapshot!(hub.error_of(gone), @"× `hub.test` is not the URL of a hub; set HF_ENDPOINT to one such as https://huggingface.co, or leave it out");
    let mut token = hub.command(&[&["run", MODEL], &text[..]].concat());
    insta::assert_snapshot!(hub.error_of(token.env("HF_TOKEN", "a b")), @"× the token from HF_TOKEN has spaces, line breaks or other characters that no token has; copy it again from the settings of your account on the hub");
}

#[test]
fn a_model_in_other_formats_is_refused() {
    let (server, _) = server::hub(Files::from([
        (
            "config.json".to_owned(),
            b"{\"model_type\": \"bert\"}".to_vec(),
        ),
        ("mmproj-q4.gguf".to_owned(), b"GGUF".to_vec()),
        ("onnx/model.onnx".to_owned(), b"x".to_vec()),
    ]));
    let hub = Hub {
        hub: server.clone(),
        cdn: server,
        home: Folder::new(),
    };
    insta::assert_snapshot!(hub.error(&["run", MODEL, "--text", "x"]), @"× `org/tiny` has no weights that gemmule reads; expected model.safetensors, model.safetensors.index.json or pytorch_model.bin, found `mmproj-q4.gguf`, `onnx/model.onnx`");
    assert_eq!(hub.fetched(), ["config.json"]);
}

#[test]
fn a_model_that_cannot_run_is_refused_before_its_weights_are_fetched() {
    let error = |config: &[u8]| {
        let (server, _) = server::hub(Files::from([
            ("config.json".to_owned(), config.to_vec()),
            ("model.safetensors".to_owned(), b"x".to_vec()),
            ("tokenizer.json".to_owned(), b"{}".to_vec()),
        ]));
        let hub = Hub {
            hub: server.clone(),
            cdn: server,
            home: Folder::new(),
        };
        let error = hub.error(&["run", MODEL, "--text", "x"]);
        assert_eq!(hub.fetched(), ["config.json"]);
        error
    };
    insta::assert_snapshot!(error(br#"{"model_type": "mamba"}"#), @"× no shipped description supports the `model_type` `mamba` of config.json help: `gemmule models` lists the descriptions; give one, or the path of a RON file, as MODEL");
    let error =
        error(br#"{"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}"#);
    assert!(
        error.contains("weights are quantized with the method `hqq`, which is not read"),
        "{error}"
    );
}

#[test]
fn a_gguf_file_is_fetched_by_its_name_or_quantization() {
    let stored = [
        ("tiny-F16.gguf", Stored::F16),
        ("tiny-Q8_0.gguf", Stored::Q8),
    ];
    let files = stored.map(|(name, stored)| (name.to_owned(), bert().bytes(stored)));
    let (server, cdn) = server::hub(Files::from(files));
    let hub = Hub {
        hub: server,
        cdn,
        home: Folder::new(),
    };
    fn by<'a>(model: &[&'a str]) -> Vec<&'a str> {
        let text = ["--text", "a quick test", "--device", "cpu", "--json"];
        [&["run"], model, &text].concat()
    }
    for (file, name) in [
        ("q8_0", "tiny-Q8_0.gguf"),
        ("tiny-F16.gguf", "tiny-F16.gguf"),
    ] {
        let model = format!("{MODEL}:{file}");
        let found = hub.ok(&by(&["--model", &model]));
        assert_eq!(hub.fetched(), [name]);
        let (_, stored) = stored[usize::from(name != stored[0].0)];
        let local = hub.home.write(name, bert().bytes(stored));
        let local = local.to_str().expect("a path");
        for local in [by(&["--weights", local]), by(&[local])] {
            assert_eq!(outputs(&found), outputs(&hub.ok(&local)), "{file}");
        }
    }
    insta::assert_snapshot!(hub.error(&by(&["--model", MODEL])), @"× `org/tiny` has several GGUF files; choose one by `org/tiny:NAME`, where NAME is one of `tiny-F16.gguf`, `tiny-Q8_0.gguf`, or its quantization, such as Q8_0");
    let other = format!("{MODEL}:Q4_0");
    insta::assert_snapshot!(hub.error(&by(&["--model", &other])), @"× `org/tiny:Q4_0` matches no GGUF file, or several; after the `:`, expected one of `tiny-F16.gguf`, `tiny-Q8_0.gguf`, or its quantization");
    let local = hub.home.file(stored[0].0);
    let both = [local.to_str().expect("a path"), "--weights", "."];
    insta::assert_snapshot!(hub.error(&by(&both)), @"× `[dir]/tiny-F16.gguf` is a model that includes its weights; omit the folder of weights, or give the description of the model instead help: leave --weights out");
    assert_eq!(hub.fetched(), Vec::<String>::new());
}
