//! `Engine`: the named outputs of a model.

use std::sync::OnceLock;

use gemmule::{
    Batch, Output,
    text::{Encoded, Input, TextEncoder},
};
use numpy::PyArray1;
use pyo3::{
    prelude::*,
    types::{PyDict, PyString},
};

use crate::{
    arguments::{items, kind_of, pair, text},
    arrays::of_output,
    error::{Error, Result, of_text},
    loading::Loading,
    text_model::{Sessions, folder, prompt},
};

/// Key of the number of tokens of each input, next to the outputs.
const LENGTHS: &str = "lengths";

/// Runs a model and returns its outputs by name.
///
/// `model` is a folder, or a name on the Hugging Face hub: "ORG/NAME" or "ORG/NAME@REVISION". `device` is "cpu", "cuda" or
/// "cuda:N", and `dtype` "float32", "float16" or "bfloat16"; by default the first CUDA device in float16, or the CPU in float32.
/// `quantize="fp8"`, `"int8"` or `"int4"` stores the weights of linear layers in 8 or 4 bits. Several threads may use one object at once.
#[pyclass(frozen, module = "gemmule")]
pub struct Engine {
    engine: gemmule::Engine,
    /// Created on first use, since a folder may have no tokenizer.
    encoder: OnceLock<TextEncoder>,
    sessions: Sessions,
}

/// An input of a run.
enum Given {
    Text(String),
    Pair(String, String),
    Ids(Vec<u32>),
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (model, *, outputs=None, device=None, dtype=None, quantize=None, threads=None))]
    fn new(
        py: Python<'_>,
        model: &Bound<'_, PyAny>,
        outputs: Option<Vec<String>>,
        device: Option<&str>,
        dtype: Option<&str>,
        quantize: Option<&str>,
        threads: Option<usize>,
    ) -> Result<Self> {
        let loading = Loading::new(model, device, dtype, quantize, threads)?;
        let engine = loading.load(
            py,
            move |builder| match outputs {
                Some(outputs) => builder.outputs(outputs),
                None => builder,
            },
            Ok,
        )?;
        Ok(Self {
            engine,
            encoder: OnceLock::new(),
            sessions: Sessions::default(),
        })
    }

    /// Run inputs as one batch: a list of texts, of pairs of texts, or of lists of token ids.
    ///
    /// Returns a dict of the outputs by name, as float32 arrays of shape [batch, width], or [tokens, width] with the tokens of
    /// all inputs one after another. `lengths` is an int64 array of shape [batch] with the number of tokens of each input.
    #[pyo3(signature = (inputs, *, outputs=None, prompt_name=None, prompt=None))]
    fn run<'py>(
        &self,
        py: Python<'py>,
        inputs: &Bound<'py, PyAny>,
        outputs: Option<Vec<String>>,
        prompt_name: Option<&str>,
        prompt: Option<&str>,
    ) -> Result<Bound<'py, PyDict>> {
        let given = items(inputs, "inputs", "a list", given)?;
        let chosen = self::prompt(prompt_name, prompt)?;
        let (run, lengths) = py.detach(|| -> Result<_> {
            let batch = self.batch(given, chosen)?;
            let run = self.sessions.with(&self.engine, |session| {
                let run = session.run(&batch)?;
                run.check_finite()?;
                Ok(run)
            })?;
            let lengths: Vec<i64> = batch.lens().iter().map(|&n| n.into()).collect();
            Ok((run, lengths))
        })?;
        let results: Vec<Output> = match outputs {
            None => run.iter().cloned().collect(),
            Some(names) => names
                .iter()
                .map(|name| Ok(run.get(name)?.clone()))
                .collect::<Result<_>>()?,
        };
        let dict = PyDict::new(py);
        for output in results {
            let name = output.name.clone();
            dict.set_item(name, of_output(py, output)?)?;
        }
        dict.set_item(LENGTHS, PyArray1::from_vec(py, lengths))?;
        Ok(dict)
    }

    /// Tokenize texts or pairs of texts, with special tokens. Returns a list of lists of token ids.
    #[pyo3(signature = (inputs, *, prompt_name=None, prompt=None))]
    fn tokenize(
        &self,
        py: Python<'_>,
        inputs: &Bound<'_, PyAny>,
        prompt_name: Option<&str>,
        prompt: Option<&str>,
    ) -> Result<Vec<Vec<u32>>> {
        let given = items(inputs, "inputs", "a list", given)?;
        let chosen = self::prompt(prompt_name, prompt)?;
        py.detach(|| {
            let encoded = self.encoded(given, chosen)?;
            Ok(encoded.into_iter().map(|one| one.ids).collect())
        })
    }

    /// Names of the outputs that the engine computes.
    #[getter]
    fn output_names(&self) -> Vec<&str> {
        let outputs = self.engine.program().outputs.iter();
        outputs.map(|(name, _)| name.as_str()).collect()
    }

    /// Device that the model runs on, in words.
    #[getter]
    fn device(&self) -> String {
        self.engine.device().to_string()
    }

    /// Precision of the products of linear layers: "f32", "f16", "bf16", "fp8", "int8" or "int4".
    #[getter]
    fn precision(&self) -> &'static str {
        self.engine.precision().name()
    }
}

impl Engine {
    fn batch(&self, given: Vec<Given>, prompt: gemmule::text::Prompt<'_>) -> Result<Batch> {
        let encoded = self.encoded(given, prompt)?;
        Ok(Encoded::batch(encoded.iter())?)
    }

    fn encoded(
        &self,
        given: Vec<Given>,
        prompt: gemmule::text::Prompt<'_>,
    ) -> Result<Vec<Encoded>> {
        let encode = |index: usize, input: Input<'_>| -> Result<Encoded> {
            let encoded = self.encoder()?.encode_one(input, prompt);
            Ok(encoded.map_err(|e| of_text(e, index))?)
        };
        let each = given.into_iter().enumerate();
        each.map(|(index, input)| match input {
            Given::Text(text) => encode(index, Input::Text(&text)),
            Given::Pair(query, document) => encode(index, Input::Pair(&query, &document)),
            Given::Ids(ids) => Ok(Encoded {
                ids,
                ..Encoded::default()
            }),
        })
        .collect()
    }

    fn encoder(&self) -> Result<&TextEncoder> {
        match self.encoder.get() {
            Some(encoder) => Ok(encoder),
            None => {
                let encoder = TextEncoder::of(folder(&self.engine)?)?;
                Ok(self.encoder.get_or_init(|| encoder))
            }
        }
    }
}

fn given(item: &Bound<'_, PyAny>, index: usize) -> Result<Given> {
    let name = format!("inputs[{index}]");
    if item.is_instance_of::<PyString>() {
        return Ok(Given::Text(text(item, || name.clone())?));
    }
    let first = item.get_item(0);
    if first.is_ok_and(|first| first.is_instance_of::<PyString>()) {
        let (query, document) = pair(item, &name)?;
        return Ok(Given::Pair(query, document));
    }
    let expected = "str, a pair of str, or a list of token ids";
    let ids = items(item, &name, expected, |id, at| match id.extract::<u32>() {
        Ok(id) => Ok(id),
        Err(_) => Err(Error::Input(format!(
            "{name}[{at}] is {} ({}); expected a token id, a whole number from 0 to 4294967295",
            id.repr()
                .map_or_else(|_| "unknown".to_owned(), |text| text.to_string()),
            kind_of(id)
        ))),
    })?;
    Ok(Given::Ids(ids))
}
