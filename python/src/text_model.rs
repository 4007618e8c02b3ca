//! A model that computes a result for each text or pair of texts.

use std::sync::{Mutex, PoisonError};

use gemmule::{
    Batch, DeviceOutput, Engine, EngineError, Output, Outputs, Session, TextError,
    engine::DeviceName,
    heads::TokenVectors,
    text::{Encoded, Folder, Input, Prompt, TextEncoder, TextRole},
};
use pyo3::Python;

use crate::{
    arrays::Rows,
    error::{Error, Result},
    loading::Loading,
    process,
    signals::Signals,
};

/// Default maximum number of tokens per batch on a CUDA device.
const BATCH_TOKENS: usize = 16_384;
/// Default maximum number of tokens per batch on a CPU. Larger batches are not faster there, and delay the handling of signals, which takes
/// place between batches.
const BATCH_TOKENS_ON_CPU: usize = 2048;

/// An engine with its tokenizer and sessions. Several threads may use it at once.
pub struct TextModel {
    pub engine: Engine,
    pub encoder: TextEncoder,
    sessions: Sessions,
}

/// Sessions that are not in use. Creating a session allocates memory and, on a CUDA device, captures CUDA graphs.
#[derive(Default)]
pub struct Sessions(Mutex<Vec<Session>>);

impl Sessions {
    /// Calls `f` with a session that no other call uses.
    ///
    /// # Errors
    /// Returns an error if a session cannot be created, and the errors of `f`.
    pub fn with<T>(&self, engine: &Engine, f: impl FnOnce(&mut Session) -> Result<T>) -> Result<T> {
        process::check()?;
        let free = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut session = match free {
            Some(session) => session,
            None => engine.session()?,
        };
        let result = f(&mut session);
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(session);
        result
    }
}

impl TextModel {
    /// Loads a model that computes one output. `output` returns the name of this output for the model's folder.
    ///
    /// # Errors
    /// Returns the errors of [`Loading::load`] and of `output`, and an error if the folder has no tokenizer.
    pub fn load(
        py: Python<'_>,
        loading: Loading,
        output: impl FnOnce(&Folder) -> Result<&'static str> + Send + 'static,
    ) -> Result<Self> {
        loading.load(
            py,
            move |builder| {
                let folder = builder.folder()?;
                let output = output(&folder.ok_or(EngineError::NoFolderOfTexts)?)?;
                Ok(builder.outputs([output]))
            },
            |engine| {
                let encoder = TextEncoder::of(folder(&engine)?)?;
                Ok(Self {
                    engine,
                    encoder,
                    sessions: Sessions::default(),
                })
            },
        )
    }

    /// Computes a row for each input, in batches of similar lengths, and returns the rows in the order of the inputs. `output` extracts the
    /// rows of a batch, one for each sequence, from its outputs. `batch_tokens` is the maximum number of tokens of a batch.
    ///
    /// # Errors
    /// Returns an error if the tokenizer refuses an input, if the prompt is unknown, if a batch fails, or if a signal handler raises an
    /// exception.
    pub fn rows<'a>(
        &self,
        py: Python<'_>,
        inputs: impl Iterator<Item = Input<'a>> + Send,
        prompt: Prompt<'_>,
        batch_tokens: Option<usize>,
        output: impl Fn(&Engine, &Outputs) -> Result<Output> + Send + Sync,
    ) -> Result<Rows> {
        let batch_tokens = self.batch_tokens(batch_tokens)?;
        py.detach(move || {
            let mut signals = Signals::new();
            let inputs: Vec<Input<'_>> = inputs.collect();
            let encode = |&input: &Input<'_>| self.encoder.encode_one(input, prompt);
            let encoded = self.encoded(&inputs, encode, &mut signals)?;
            let mut rows = Rows {
                values: Vec::new(),
                n_rows: encoded.len(),
                row: Vec::new(),
            };
            self.each_output(&encoded, batch_tokens, &mut signals, |outputs, at| {
                let output = output(&self.engine, outputs)?;
                let width = output.values.len() / at.len();
                if rows.values.is_empty() {
                    rows.row = output.shape[1..].iter().map(|&n| n as usize).collect();
                    let n = width.saturating_mul(rows.n_rows);
                    rows.values.try_reserve_exact(n).map_err(|_| no_room(n))?;
                    rows.values.resize(n, 0.0);
                }
                for (row, &index) in output.values.chunks_exact(width.max(1)).zip(at) {
                    rows.values[index * width..][..width].copy_from_slice(row);
                }
                Ok(())
            })?;
            Ok(rows)
        })
    }

    /// Computes an output with a row for each input, like [`rows`](Self::rows), but leaves it on the device. `width` takes the
    /// width of the rows, and returns how many leading values of each row to keep.
    ///
    /// # Errors
    /// Returns the errors of [`rows`](Self::rows) and of `width`. Values that are not finite are not an error.
    pub fn device_rows<'a>(
        &self,
        py: Python<'_>,
        inputs: impl Iterator<Item = Input<'a>> + Send,
        prompt: Prompt<'_>,
        batch_tokens: Option<usize>,
        width: impl Fn(usize) -> Result<usize> + Send + Sync,
    ) -> Result<DeviceOutput> {
        let batch_tokens = self.batch_tokens(batch_tokens)?;
        py.detach(move || {
            let mut signals = Signals::new();
            let inputs: Vec<Input<'_>> = inputs.collect();
            let encode = |&input: &Input<'_>| self.encoder.encode_one(input, prompt);
            let encoded = self.encoded(&inputs, encode, &mut signals)?;
            let mut rows: Option<DeviceOutput> = None;
            let run = |session: &mut Session, batch: &Batch, at: &[usize]| {
                for output in session.run_on_device(batch)? {
                    let all = match &mut rows {
                        Some(rows) => rows,
                        none => {
                            let own = output.shape[1..].iter().product::<u64>() as usize;
                            let (n, width) = (encoded.len() as u64, width(own)? as u64);
                            none.insert(output.with_rows(n, width)?)
                        }
                    };
                    all.set_rows(&output, at)?;
                }
                Ok(())
            };
            self.sessions.with(&self.engine, |session| {
                session.each_batch(&encoded, batch_tokens, run, || signals.check())
            })?;
            rows.ok_or_else(|| Error::Input("there are no inputs".to_owned()))
        })
    }

    /// Computes the token vectors of queries or documents, for late interaction.
    ///
    /// # Errors
    /// Returns the errors of [`rows`](Self::rows).
    pub fn token_vectors(
        &self,
        py: Python<'_>,
        texts: &[String],
        role: TextRole,
        prompt: Prompt<'_>,
        batch_tokens: Option<usize>,
    ) -> Result<Vec<TokenVectors>> {
        let batch_tokens = self.batch_tokens(batch_tokens)?;
        py.detach(move || {
            let mut signals = Signals::new();
            let side = self.encoder.cut_side();
            let encode = |text: &String| self.encoder.encode_as(role, text, prompt, side);
            let encoded = self.encoded(texts, encode, &mut signals)?;
            self.sessions.with(&self.engine, |session| {
                let between = || signals.check();
                session.vectors(&self.encoder, role, &encoded, batch_tokens, between)
            })
        })
    }

    /// Scores documents for a query by their token vectors, which stay on a CUDA device. `of_query` and `of_documents` are the prompts.
    ///
    /// # Errors
    /// Returns the errors of [`rows`](Self::rows).
    pub fn late_scores(
        &self,
        py: Python<'_>,
        query: &str,
        documents: &[String],
        [of_query, of_documents]: [Prompt<'_>; 2],
        batch_tokens: Option<usize>,
    ) -> Result<Vec<f32>> {
        let batch_tokens = self.batch_tokens(batch_tokens)?;
        py.detach(move || {
            let mut signals = Signals::new();
            let side = self.encoder.cut_side();
            let encode =
                |role, text: &str, prompt| self.encoder.encode_as(role, text, prompt, side);
            let query = encode(TextRole::Query, query, of_query);
            let query = query.map_err(EngineError::from)?;
            let encode = |text: &String| encode(TextRole::Document, text, of_documents);
            let documents = self.encoded(documents, encode, &mut signals)?;
            self.sessions.with(&self.engine, |session| {
                let between = || signals.check();
                let Self {
                    engine, encoder, ..
                } = self;
                engine.late_scores(session, encoder, &query, &documents, batch_tokens, between)
            })
        })
    }

    /// Tokenizes inputs on all threads.
    fn encoded<I: Sync>(
        &self,
        inputs: &[I],
        encode: impl Fn(&I) -> std::result::Result<Encoded, TextError> + Sync,
        signals: &mut Signals,
    ) -> Result<Vec<Encoded>> {
        process::check()?;
        self.engine.encode_all(inputs, encode, || signals.check())
    }

    /// Calls `take` with the outputs of each batch and the indices of its sequences, while the device computes the next batch.
    fn each_output(
        &self,
        encoded: &[Encoded],
        batch_tokens: usize,
        signals: &mut Signals,
        take: impl FnMut(&Outputs, &[usize]) -> Result<()>,
    ) -> Result<()> {
        self.sessions.with(&self.engine, |session| {
            session.each_output(encoded, batch_tokens, take, || signals.check())
        })
    }

    /// Returns the prompt that the folder defines for texts of a role, or else its default prompt.
    ///
    /// # Errors
    /// Returns an error if the role's name selects a route of a Router that is not loaded.
    pub fn prompt_of(&self, role: TextRole) -> Result<Prompt<'_>> {
        let folder = self.encoder.folder();
        folder.prompt(Prompt::Named(role.name()))?;
        let index = folder.prompt_index(role.prompt_names());
        let name = index.and_then(|index| folder.prompt_name(index));
        Ok(name.map_or(Prompt::Default, Prompt::Named))
    }

    fn batch_tokens(&self, asked: Option<usize>) -> Result<usize> {
        match (asked, self.engine.device()) {
            (Some(0), _) => Err(Error::Input(
                "batch_tokens is 0; expected at least 1, or None for the default of the device"
                    .to_owned(),
            )),
            (Some(n), _) => Ok(n),
            (None, DeviceName::Cpu { .. }) => Ok(BATCH_TOKENS_ON_CPU),
            (None, DeviceName::Cuda(_)) => Ok(BATCH_TOKENS),
        }
    }
}

/// Returns the folder from which an engine was built.
///
/// # Errors
/// Returns an error if the engine was not built from a folder.
pub fn folder(engine: &Engine) -> Result<Folder> {
    match engine.folder() {
        Some(folder) => Ok(folder.clone()),
        None => Err(gemmule::EngineError::NoFolderOfTexts.into()),
    }
}

/// Returns the prompt that the two arguments select.
///
/// # Errors
/// Returns an error if both arguments are given.
pub fn prompt<'a>(name: Option<&'a str>, text: Option<&'a str>) -> Result<Prompt<'a>> {
    match (name, text) {
        (None, None) => Ok(Prompt::Default),
        (Some(name), None) => Ok(Prompt::Named(name)),
        (None, Some(text)) => Ok(Prompt::Text(text)),
        (Some(_), Some(_)) => Err(Error::Input(
            "prompt and prompt_name are both given; expected one of them".to_owned(),
        )),
    }
}

fn no_room(n: usize) -> Error {
    Error::Python(pyo3::exceptions::PyMemoryError::new_err(format!(
        "there is no memory for the {n} values of the result; call with fewer texts"
    )))
}
