//! Helpers that the integration tests share.
#![allow(dead_code, reason = "each folder of tests is a crate and uses a part")]

pub mod gguf;
pub mod mates;
pub mod tiny;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

use gemmule::{
    Batch, Builder, DType, DeviceChoice, Engine, EngineError, Outputs,
    engine::{CompileOptions, Compiled, compile, description},
    jit::{Nvrtc, Surroundings},
    machine::Machine,
    program::Storage,
    runtime::weights::{RandomWeights, WeightSource, encode},
};

pub use tiny::{Folder, tiny_config};

/// Returns the name of the environment variable that selects NVRTC, and its value in tests. If the variable is not set, the value is the
/// Python environment `.gemmule/venv`, which `make setup` installs, or `None` if this folder does not exist.
pub fn chosen_nvrtc() -> (&'static str, Option<PathBuf>) {
    const NAME: &str = "GEMMULE_NVRTC";
    let set = std::env::var_os(NAME).filter(|value| !value.is_empty());
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join(".gemmule/venv");
    let value = set.map(PathBuf::from).or(own.is_dir().then_some(own));
    (NAME, value)
}

/// Loads NVRTC from the path that [`chosen_nvrtc`] returns, or from the default search path if there is none.
pub fn nvrtc() -> Nvrtc {
    let surroundings = Surroundings {
        choice: chosen_nvrtc().1,
        ..Surroundings::of_this_process()
    };
    Nvrtc::find_in(&surroundings).unwrap_or_else(|error| panic!("{error}"))
}

/// Makes a child process use the same NVRTC as [`nvrtc`].
pub fn with_nvrtc(command: &mut Command) -> &mut Command {
    match chosen_nvrtc() {
        (name, Some(value)) => command.env(name, value),
        (_, None) => command,
    }
}

/// Returns the default card, for which gemmule compiles if the user names no card and the machine has none. It lacks Hopper's instructions.
pub fn usual() -> Machine {
    Machine::usual().expect("the cards are described")
}

/// Returns a card of compute capability 8.9, which has E4M3 MMAs but not Hopper's instructions.
pub fn ada() -> Machine {
    let found = Machine::of_capability((8, 9)).expect("the cards are described");
    found.expect("one has the instructions of Ada")
}

/// Returns a card with Hopper's instructions.
pub fn hopper() -> Machine {
    let found = Machine::of_capability((9, 0)).expect("the cards are described");
    found.expect("one has Hopper's instructions")
}

/// Returns compile options for the default card ([`usual`]).
pub fn options(dtype: DType) -> CompileOptions {
    CompileOptions::new(dtype, usual())
}

pub fn tiny_compiled(dtype: DType) -> Compiled {
    tiny_compiled_with(&options(dtype))
}

pub fn tiny_compiled_with(options: &CompileOptions) -> Compiled {
    let bert = description("bert").expect("it is shipped");
    compile(&bert, &tiny_config(), options).expect("it compiles")
}

/// A tensor as stored in a safetensors file.
#[derive(Clone)]
pub struct Stored {
    pub dtype: safetensors::Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl safetensors::View for &Stored {
    fn dtype(&self) -> safetensors::Dtype {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> std::borrow::Cow<'_, [u8]> {
        self.bytes.as_slice().into()
    }
    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

pub type Tensors = BTreeMap<String, Stored>;

pub const WEIGHTS: RandomWeights = RandomWeights {
    seed: 3,
    deviation: 0.1,
};

/// Returns all tensors that a checkpoint of the tiny model contains, with random values from [`WEIGHTS`].
pub fn tiny_tensors(dtype: DType) -> Tensors {
    tensors_of(&tiny_compiled(DType::F32), dtype)
}

/// Returns all tensors that a program reads from a checkpoint, with random values from [`WEIGHTS`], stored in `dtype`.
pub fn tensors_of(compiled: &Compiled, dtype: DType) -> Tensors {
    let stored_as = match dtype {
        DType::F16 => safetensors::Dtype::F16,
        DType::BF16 => safetensors::Dtype::BF16,
        _ => safetensors::Dtype::F32,
    };
    let weights = compiled.program.tensors.iter();
    weights
        .filter_map(|t| match &t.place {
            Storage::Weight(expr) => Some(expr.stored()),
            _ => None,
        })
        .flatten()
        .map(|(name, dims)| {
            let values = WEIGHTS.read(name, dims).expect("random weights exist");
            let stored = Stored {
                dtype: stored_as,
                shape: dims.iter().map(|&d| d as usize).collect(),
                bytes: encode(&values, dtype),
            };
            (name.to_owned(), stored)
        })
        .collect()
}

/// Writes a safetensors file.
pub fn write_tensors(file: &Path, tensors: &Tensors) {
    let bytes = safetensors::serialize(tensors.iter().map(|(n, t)| (n.clone(), t)), None)
        .expect("the tensors are sound");
    std::fs::write(file, bytes).expect("the folder is there");
}

impl Folder {
    /// Creates a folder with config.json and model.safetensors.
    pub fn whole(tensors: &Tensors) -> Self {
        let folder = Self::new();
        folder.write("config.json", tiny_config().to_string());
        write_tensors(&folder.file("model.safetensors"), tensors);
        folder
    }

    /// Returns the text of an error and its causes, with `[dir]` for the path of this folder.
    pub fn text(&self, error: &dyn std::error::Error) -> String {
        let chain = std::iter::successors(Some(error), |e| e.source());
        let lines: Vec<String> = chain.map(ToString::to_string).collect();
        self.redact(&lines.join("\ncaused by: "))
    }

    pub fn builder(&self) -> Builder {
        Engine::builder("bert")
            .checkpoint(self.path())
            .device(DeviceChoice::Cpu)
    }

    pub fn load(&self) -> Result<Engine, EngineError> {
        self.builder().build()
    }

    /// Returns the error of loading this folder.
    #[track_caller]
    pub fn load_error(&self) -> String {
        let error = self.load().err().expect("the checkpoint is bad");
        self.text(&error)
    }
}

/// Runs an engine of the tiny model on a fixed batch.
pub fn run(engine: &Engine) -> Outputs {
    let batch = Batch::from_sequences(&[vec![1, 2, 3], vec![19, 0]]).expect("a batch");
    let mut session = engine.session().expect("a session");
    session.run(&batch).expect("it runs")
}

/// Returns the max absolute difference between the sentence embeddings of two runs.
pub fn difference(a: &Outputs, b: &Outputs) -> f32 {
    let values = |o: &Outputs| {
        o.get("sentence_embedding")
            .expect("an output")
            .values
            .clone()
    };
    let (a, b) = (values(a), values(b));
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(&b).map(|(x, y)| (x - y).abs());
    differences.fold(0.0, f32::max)
}
