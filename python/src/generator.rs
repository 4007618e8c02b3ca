//! `Generator`: text after a prompt, or a reply in a conversation.

use std::sync::{Arc, OnceLock};

use gemmule::{
    Engine,
    generate::Request,
    text::{ChatOptions, ChatTemplate, Json, LanguagePair, Message, StreamDecoder, TextEncoder},
};
use pyo3::{IntoPyObjectExt as _, prelude::*, types::PyDict};

use crate::{
    arguments::{Texts, items, text, texts},
    error::{Error, Result},
    loading::{Choices, Loading},
    options::Options,
    requests::{Requests, Step},
    signals::Signals,
    stream::TextStream,
    text_model::folder,
};

/// Generates text: after a prompt, or as a reply in a conversation.
///
/// `model` is a folder, or a name on the Hugging Face hub: "ORG/NAME" or "ORG/NAME@REVISION". `device` is "cpu", "cuda" or
/// "cuda:N". `dtype` is "float32", "float16" or "bfloat16". The default is the first CUDA device with float16, or the CPU with
/// float32. `quantize="fp8"`, `"int8"` or `"int4"` stores the weights of linear layers in 8 or 4 bits. `dequantize=True` dequantizes
/// the weights of a quantized checkpoint. `kv_dtype="fp8"` stores keys and values in 8 bits. `max_context` is the maximum number of tokens
/// of a prompt and its continuation. Several threads may use one object at once.
#[pyclass(frozen, module = "gemmule")]
pub struct Generator {
    model: Arc<WritingModel>,
    template: OnceLock<ChatTemplate>,
}

/// An engine that generates text, with the tokenizer of its prompts.
pub struct WritingModel {
    pub engine: Engine,
    pub encoder: TextEncoder,
}

/// The tokens of a call's prompts, and the decoders of their generated texts.
pub struct Prompts {
    pub ids: Vec<Vec<u32>>,
    pub texts: Vec<StreamDecoder>,
}

#[pymethods]
impl Generator {
    #[new]
    #[pyo3(signature = (model, *, device=None, dtype=None, quantize=None, dequantize=false, kv_dtype=None, max_context=None, threads=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn new(
        py: Python<'_>,
        model: &Bound<'_, PyAny>,
        device: Option<&str>,
        dtype: Option<&str>,
        quantize: Option<&str>,
        dequantize: bool,
        kv_dtype: Option<&str>,
        max_context: Option<u32>,
        threads: Option<usize>,
    ) -> Result<Self> {
        let choices = Choices {
            device,
            dtype,
            quantize,
            dequantize,
            kv_dtype,
            max_context,
            threads,
        };
        let loading = Loading::new(model, &choices)?;
        Ok(Self {
            model: Arc::new(WritingModel::load(py, loading)?),
            template: OnceLock::new(),
        })
    }

    /// Continue prompts.
    ///
    /// Returns the new text without the prompt: a str for a str, or a list of str for a list. With `stream=True`, takes a single prompt and
    /// returns an iterator over the parts of its text.
    ///
    /// The options have the names of transformers: max_new_tokens, min_new_tokens, do_sample, temperature, top_k, top_p, min_p, seed,
    /// num_beams, num_beam_groups, diversity_penalty, length_penalty, early_stopping, repetition_penalty, no_repeat_ngram_size,
    /// forced_bos_token, stop_strings. By default, they have the values of the folder's generation_config.json.
    #[pyo3(signature = (prompts, *, stream=false, **options))]
    fn generate<'py>(
        &self,
        py: Python<'py>,
        prompts: &Bound<'py, PyAny>,
        stream: bool,
        options: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyAny>> {
        let Texts { texts, is_single } = texts(prompts, "prompts")?;
        let options = Options::new(options)?;
        if stream && !is_single {
            return Err(Error::Input(format!(
                "stream returns the text of one prompt, and prompts is a list of {}; give a single str",
                texts.len()
            )));
        }
        let prompts = py.detach(|| self.model.prompts(&texts, &LanguagePair::default()))?;
        self.run(py, prompts, options, stream, is_single)
    }

    /// Reply to a conversation that is formatted with the model's chat template.
    ///
    /// `messages` is a list of dicts with `role` and `content`. Returns the reply as a str. With `stream=True`, returns an iterator over
    /// the parts of the reply. `options` are the options of `generate`.
    #[pyo3(signature = (messages, *, stream=false, tools=None, chat_template_kwargs=None, **options))]
    fn chat<'py>(
        &self,
        py: Python<'py>,
        messages: &Bound<'py, PyAny>,
        stream: bool,
        tools: Option<&Bound<'py, PyAny>>,
        chat_template_kwargs: Option<&Bound<'py, PyAny>>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyAny>> {
        let expected = "a list of dicts with role and content";
        let messages = items(messages, "messages", expected, message)?;
        let chat_options = ChatOptions {
            tools: tools.map(|tools| json("tools", tools)).transpose()?,
            kwargs: match chat_template_kwargs {
                None => Vec::new(),
                Some(kwargs) => fields("chat_template_kwargs", kwargs)?,
            },
            ..ChatOptions::default()
        };
        let options = Options::new(options)?;
        let prompts = py.detach(|| -> Result<_> {
            let rendered = self.template()?.render_with(&messages, &chat_options)?;
            let ids = self.model.encoder.prompt_as_written(&rendered)?;
            Ok(Prompts {
                ids: vec![ids],
                texts: vec![StreamDecoder::default()],
            })
        })?;
        self.run(py, prompts, options, stream, true)
    }

    /// Description of the device that the model runs on.
    #[getter]
    fn device(&self) -> String {
        self.model.engine.device().to_string()
    }

    /// Format of the KV cache: "f32", "f16", "bf16" or "e4m3".
    #[getter]
    fn kv_dtype(&self) -> String {
        self.model.engine.program().cache_format().to_string()
    }

    /// Precision of products in linear layers: "f32", "f16", "bf16", "fp8", "int8" or "int4".
    #[getter]
    fn precision(&self) -> &'static str {
        self.model.engine.precision().name()
    }
}

impl Generator {
    fn template(&self) -> Result<&ChatTemplate> {
        match self.template.get() {
            Some(template) => Ok(template),
            None => {
                let template = ChatTemplate::open(self.model.encoder.folder().trunk())?;
                Ok(self.template.get_or_init(|| template))
            }
        }
    }

    fn run<'py>(
        &self,
        py: Python<'py>,
        prompts: Prompts,
        options: Options,
        stream: bool,
        is_single: bool,
    ) -> Result<Bound<'py, PyAny>> {
        let params = options.params(&self.model.encoder)?;
        let request = |prompt| Request {
            prompt,
            options: params.clone(),
        };
        let requests = prompts.ids.into_iter().map(request).enumerate().collect();
        let texts = prompts.texts;
        let requests = py.detach(|| Requests::new(&self.model.engine, requests, &params))?;
        if stream {
            let model = Arc::clone(&self.model);
            let stream = TextStream::new(model, requests, texts, options.stop_strings);
            return Ok(stream.into_bound_py_any(py)?);
        }
        let texts = py.detach(|| self.model.write(requests, texts, &options.stop_strings))?;
        match is_single {
            true => Ok(texts.concat().into_bound_py_any(py)?),
            false => Ok(texts.into_bound_py_any(py)?),
        }
    }
}

impl WritingModel {
    /// Loads a model that generates text.
    ///
    /// # Errors
    /// Returns the errors of [`Loading::load`], and an error if the folder has no tokenizer.
    pub fn load(py: Python<'_>, loading: Loading) -> Result<Self> {
        loading.load(
            py,
            |builder| Ok(builder.generating()),
            |engine| {
                let encoder = TextEncoder::for_prompts(folder(&engine)?)?;
                Ok(Self { engine, encoder })
            },
        )
    }

    /// Tokenizes prompts, and handles signals in the meantime. The caller must not hold the GIL.
    ///
    /// # Errors
    /// Returns an error for a text that the tokenizer refuses, and the exception of a signal handler.
    pub fn prompts(&self, texts: &[String], pair: &LanguagePair) -> Result<Prompts> {
        let mut signals = Signals::new();
        let mut prompts = Prompts {
            ids: Vec::new(),
            texts: Vec::new(),
        };
        for (index, text) in texts.iter().enumerate() {
            let ids = self.encoder.source(index, text, pair)?;
            // In an encoder-decoder model, the generated text does not continue the prompt.
            prompts.texts.push(match self.engine.has_source() {
                true => StreamDecoder::default(),
                false => StreamDecoder::after(&ids, |tokens| self.encoder.decode(tokens))?,
            });
            prompts.ids.push(ids);
            signals.check()?;
        }
        Ok(prompts)
    }

    /// Runs all requests and returns their texts.
    ///
    /// # Errors
    /// Returns the error of a request that fails, and the exception of a signal handler.
    pub fn write(
        &self,
        mut requests: Requests,
        mut texts: Vec<StreamDecoder>,
        stops: &[String],
    ) -> Result<Vec<String>> {
        let mut signals = Signals::new();
        while !requests.are_done() {
            for (index, step) in requests.step()? {
                if let Step::Token(id) = step {
                    let text = &mut texts[index];
                    // Ignore the tokens that this step returned after a stop string.
                    if text.stopped {
                        continue;
                    }
                    text.push(id, |tokens| self.encoder.decode(tokens))?;
                    if text.cut(stops) {
                        requests.stop(index);
                    }
                }
            }
            signals.check()?;
        }
        Ok(texts.into_iter().map(|text| text.text).collect())
    }
}

/// Converts a dict to a message.
fn message(value: &Bound<'_, PyAny>, index: usize) -> Result<Message> {
    let name = format!("messages[{index}]");
    let mut message = Message::new("", "");
    let mut fields = fields(&name, value)?;
    for (key, into) in [
        ("role", &mut message.role),
        ("content", &mut message.content),
    ] {
        let at = fields.iter().position(|(field, _)| field == key);
        match at.map(|at| fields.remove(at).1) {
            Some(Json::String(text)) => *into = text,
            Some(other) => {
                return Err(Error::Input(format!(
                    "{name}[\"{key}\"] is {}; expected str",
                    other.kind()
                )));
            }
            // A message that calls tools may have no content.
            None if key == "content" && !fields.is_empty() => {}
            None => {
                return Err(Error::Input(format!(
                    "{name} has no \"{key}\"; expected str"
                )));
            }
        }
    }
    message.others = fields;
    Ok(message)
}

/// Converts a dict to the fields of a JSON object.
fn fields(name: &str, value: &Bound<'_, PyAny>) -> Result<Vec<(String, Json)>> {
    match json::<Json>(name, value)? {
        Json::Object(fields) => Ok(fields),
        other => Err(Error::Input(format!(
            "{name} is {}; expected a dict",
            other.kind()
        ))),
    }
}

/// Converts a Python value through its JSON representation.
fn json<T: serde::de::DeserializeOwned>(name: &str, value: &Bound<'_, PyAny>) -> Result<T> {
    let dumps = value.py().import("json")?.getattr("dumps")?;
    let dumped = dumps.call1((value,));
    let dumped = dumped.map_err(|e| {
        Error::Input(format!("{name} cannot be written as JSON: {e}; expected dicts, lists, str, numbers, bool and None"))
    })?;
    let dumped = text(&dumped, || name.to_owned())?;
    serde_json::from_str(&dumped).map_err(|e| Error::Input(format!("{name}: {e}")))
}
