//! `Translator`: translations of texts.

use gemmule::{
    generate::Request,
    text::{LanguagePair, StreamDecoder},
};
use pyo3::{IntoPyObjectExt as _, prelude::*, types::PyDict};

use crate::{
    arguments::{Texts, texts},
    error::{Error, Result},
    generator::WritingModel,
    loading::{Choices, Loading},
    options::Options,
    requests::Requests,
};

/// Translates texts.
///
/// `model` is a folder, or a name on the Hugging Face hub: "ORG/NAME" or "ORG/NAME@REVISION". `device` is "cpu", "cuda" or
/// "cuda:N". `dtype` is "float32", "float16" or "bfloat16". The default is the first CUDA device with float16, or the CPU with
/// float32. `quantize="fp8"`, `"int8"` or `"int4"` stores the weights of linear layers in 8 or 4 bits. `dequantize=True` dequantizes
/// the weights of a quantized checkpoint. `kv_dtype="fp8"` stores keys and values in 8 bits. Several threads may use one object at once.
#[pyclass(frozen, module = "gemmule")]
pub struct Translator {
    model: WritingModel,
}

#[pymethods]
impl Translator {
    #[new]
    #[pyo3(signature = (model, *, device=None, dtype=None, quantize=None, dequantize=false, kv_dtype=None, threads=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn new(
        py: Python<'_>,
        model: &Bound<'_, PyAny>,
        device: Option<&str>,
        dtype: Option<&str>,
        quantize: Option<&str>,
        dequantize: bool,
        kv_dtype: Option<&str>,
        threads: Option<usize>,
    ) -> Result<Self> {
        let choices = Choices {
            device,
            dtype,
            quantize,
            dequantize,
            kv_dtype,
            threads,
            ..Choices::default()
        };
        let loading = Loading::new(model, &choices)?;
        let model = WritingModel::load(py, loading)?;
        match model.engine.has_source() {
            true => Ok(Self { model }),
            false => Err(Error::Input(
                "the model continues a prompt and does not translate; use Generator".to_owned(),
            )),
        }
    }

    /// Translate texts.
    ///
    /// Returns a str for a str, and a list of str for a list. A blank text has an empty translation. `source_lang` and `target_lang` are
    /// language names of the model's tokenizer; the defaults are those of its folder. `options` are the options of `Generator.generate`.
    /// The default of `max_new_tokens` is twice the number of tokens of the text, plus 16.
    #[pyo3(signature = (texts, *, source_lang=None, target_lang=None, **options))]
    fn translate<'py>(
        &self,
        py: Python<'py>,
        texts: &Bound<'py, PyAny>,
        source_lang: Option<&str>,
        target_lang: Option<&str>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyAny>> {
        let Texts { texts, is_single } = self::texts(texts, "texts")?;
        let options = Options::new(options)?;
        let pair = self.model.encoder.language_pair(source_lang, target_lang)?;
        let translations = py.detach(|| self.translations(&texts, &pair, &options))?;
        match is_single {
            true => Ok(translations.concat().into_bound_py_any(py)?),
            false => Ok(translations.into_bound_py_any(py)?),
        }
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

impl Translator {
    fn translations(
        &self,
        texts: &[String],
        pair: &LanguagePair,
        options: &Options,
    ) -> Result<Vec<String>> {
        let mut translations = vec![String::new(); texts.len()];
        let prompts = self.model.prompts(texts, pair)?;
        let each = texts.iter().zip(prompts.ids).enumerate();
        let sources = each.filter(|(_, (text, _))| !text.trim().is_empty());
        let sources: Vec<(usize, Vec<u32>)> = sources.map(|(at, (_, ids))| (at, ids)).collect();
        if sources.is_empty() {
            return Ok(translations);
        }
        let order: Vec<usize> = sources.iter().map(|&(at, _)| at).collect();
        let mut params = options.params(&self.model.encoder)?;
        if let Some(language) = pair.forced_first {
            if params.rules.forced_first.is_some() {
                return Err(Error::Input(
                    "target_lang and forced_bos_token both choose the first token; omit one of the two"
                        .to_owned(),
                ));
            }
            params.rules.forced_first = Some(language);
        }
        params.decoder_start = pair.decoder_start.or(params.decoder_start);
        // The start token takes one position.
        let positions = self.model.engine.limits().longest;
        let most = positions.map_or(usize::MAX, |n| n.saturating_sub(1) as usize);
        let requests = sources.into_iter().map(|(at, prompt)| {
            let mut options_of_text = params.clone();
            if options.max_new_tokens.is_none() {
                let own = params.rules.max_new_tokens;
                options_of_text.rules.max_new_tokens = (2 * prompt.len() + 16).min(most).min(own);
            }
            let options = options_of_text;
            (at, Request { prompt, options })
        });
        let requests: Vec<(usize, Request)> = requests.collect();
        let new = requests
            .iter()
            .map(|(_, one)| one.options.rules.max_new_tokens);
        params.rules.max_new_tokens = new.max().unwrap_or(1);
        let requests = Requests::new(&self.model.engine, requests, &params)?;
        let decoders = vec![StreamDecoder::default(); order.len()];
        let written = self
            .model
            .write(requests, decoders, &options.stop_strings)?;
        for (index, text) in order.into_iter().zip(written) {
            translations[index] = text;
        }
        Ok(translations)
    }
}
