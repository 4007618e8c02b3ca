//! `Engine`: the named outputs of a model.

use std::sync::OnceLock;

use gemmule::{
    Batch, DeviceOutput, EngineError, Output,
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
    device_array::{DeviceArray, Target},
    error::{Error, Result},
    loading::{Choices, Loading},
    text_model::{Sessions, folder, prompt},
};

/// Key of the token counts in the dict of outputs.
const LENGTHS: &str = "lengths";

/// Runs a model and returns its outputs by name.
///
/// `model` is a folder, or a name on the Hugging Face hub: "ORG/NAME" or "ORG/NAME@REVISION". `device` is "cpu", "cuda" or
/// "cuda:N". `dtype` is "float32", "float16" or "bfloat16". The default is the first CUDA device with float16, or the CPU with
/// float32. `quantize="fp8"`, `"int8"` or `"int4"` stores the weights of linear layers in 8 or 4 bits. `dequantize=True` dequantizes
/// the weights of a quantized checkpoint. Several threads may use one object at once.
#[pyclass(frozen, module = "gemmule")]
pub struct Engine {
    engine: gemmule::Engine,
    /// Created on first use, since a folder may have no tokenizer.
    encoder: OnceLock<TextEncoder>,
    sessions: Sessions,
}

/// Outputs of a run.
enum Results {
    Host(gemmule::Outputs),
    Device(Vec<DeviceOutput>),
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
    #[pyo3(signature = (model, *, outputs=None, device=None, dtype=None, quantize=None, dequantize=false, max_context=None, threads=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn new(
        py: Python<'_>,
        model: &Bound<'_, PyAny>,
        outputs: Option<Vec<String>>,
        device: Option<&str>,
        dtype: Option<&str>,
        quantize: Option<&str>,
        dequantize: bool,
        max_context: Option<u32>,
        threads: Option<usize>,
    ) -> Result<Self> {
        let choices = Choices {
            device,
            dtype,
            quantize,
            dequantize,
            max_context,
            threads,
            ..Choices::default()
        };
        let loading = Loading::new(model, &choices)?;
        let engine = loading.load(
            py,
            move |builder| {
                Ok(match outputs {
                    Some(outputs) => builder.outputs(outputs),
                    None => builder,
                })
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
    /// Returns a dict of the outputs by name. These are float32 arrays of shape [batch, width], or [tokens, width] with the tokens of all
    /// inputs one after another. `lengths` is an int64 array of shape [batch] with the number of tokens of each input. With `to="dlpack"`,
    /// the outputs are `DeviceArray`s, which stay on the device and are not checked for NaN values.
    #[pyo3(signature = (inputs, *, outputs=None, prompt_name=None, prompt=None, to="numpy"))]
    fn run<'py>(
        &self,
        py: Python<'py>,
        inputs: &Bound<'py, PyAny>,
        outputs: Option<Vec<String>>,
        prompt_name: Option<&str>,
        prompt: Option<&str>,
        to: &str,
    ) -> Result<Bound<'py, PyDict>> {
        let given = items(inputs, "inputs", "a list", given)?;
        let chosen = self::prompt(prompt_name, prompt)?;
        let target = Target::new(to)?;
        let (results, lengths) = py.detach(|| -> Result<_> {
            let batch = self.batch(given, chosen)?;
            let results = self.sessions.with(&self.engine, |session| {
                Ok(match target {
                    Target::Numpy => {
                        let run = session.run(&batch)?;
                        run.check_finite()?;
                        Results::Host(run)
                    }
                    Target::Dlpack => Results::Device(session.run_on_device(&batch)?),
                })
            })?;
            let lengths: Vec<i64> = batch.lens().iter().map(|&n| n.into()).collect();
            Ok((results, lengths))
        })?;
        let dict = PyDict::new(py);
        match results {
            Results::Host(run) => {
                let chosen: Vec<Output> = match outputs {
                    None => run.iter().cloned().collect(),
                    Some(names) => {
                        let each = names.iter().map(|name| Ok(run.get(name)?.clone()));
                        each.collect::<Result<_>>()?
                    }
                };
                for output in chosen {
                    let name = output.name.clone();
                    dict.set_item(name, of_output(py, output)?)?;
                }
            }
            Results::Device(run) => {
                for output in chosen_of(run, outputs)? {
                    let name = output.name.clone();
                    dict.set_item(name, DeviceArray::new(output, false))?;
                }
            }
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

    /// Description of the device that the model runs on.
    #[getter]
    fn device(&self) -> String {
        self.engine.device().to_string()
    }

    /// Precision of products in linear layers: "f32", "f16", "bf16", "fp8", "int8" or "int4".
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
            Ok(encoded.map_err(|e| e.of_text(index))?)
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

/// Returns the outputs with these names, or all outputs.
fn chosen_of(run: Vec<DeviceOutput>, names: Option<Vec<String>>) -> Result<Vec<DeviceOutput>> {
    let Some(names) = names else {
        return Ok(run);
    };
    let known: Vec<String> = run.iter().map(|output| output.name.clone()).collect();
    if let Some(name) = names.iter().find(|name| !known.contains(name)) {
        let name = name.clone();
        return Err(EngineError::NoOutput { name, known }.into());
    }
    let chosen = run
        .into_iter()
        .filter(|output| names.contains(&output.name));
    Ok(chosen.collect())
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
