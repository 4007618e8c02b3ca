//! `MultiVectorEncoder`: a vector for each token of a text, for late interaction.

use gemmule::{
    heads::TokenVectors,
    model::TOKEN_VECTORS,
    text::{Prompt, TextRole},
};
use numpy::{IxDyn, PyArray1, PyArrayDyn, PyArrayMethods, PyReadonlyArray2};
use pyo3::{
    IntoPyObjectExt as _,
    exceptions::PyTypeError,
    prelude::*,
    types::{PyDict, PyString},
};

use crate::{
    arguments::{Texts, items, kind_of, text, texts},
    error::{Error, Result},
    loading::{Choices, Loading},
    process,
    reranker::ranked,
    signals::Signals,
    text_model::{TextModel, prompt},
};

/// Computes a vector for each token of a text, for late interaction, like `MultiVectorEncoder` of sentence-transformers and `ColBERT` of
/// PyLate.
///
/// `model` is a folder, or a name on the Hugging Face hub: "ORG/NAME" or "ORG/NAME@REVISION". `device` is "cpu", "cuda" or
/// "cuda:N". `dtype` is "float32", "float16" or "bfloat16". The default is the first CUDA device with float16, or the CPU with
/// float32. `quantize="fp8"`, `"int8"` or `"int4"` stores the weights of linear layers in 8 or 4 bits. `dequantize=True` dequantizes
/// the weights of a quantized checkpoint. Several threads may use one object at once.
#[pyclass(frozen, module = "gemmule")]
pub struct MultiVectorEncoder {
    model: TextModel,
}

#[pymethods]
impl MultiVectorEncoder {
    #[new]
    #[pyo3(signature = (model, *, device=None, dtype=None, quantize=None, dequantize=false, threads=None))]
    fn new(
        py: Python<'_>,
        model: &Bound<'_, PyAny>,
        device: Option<&str>,
        dtype: Option<&str>,
        quantize: Option<&str>,
        dequantize: bool,
        threads: Option<usize>,
    ) -> Result<Self> {
        let choices = Choices {
            device,
            dtype,
            quantize,
            dequantize,
            threads,
            ..Choices::default()
        };
        let loading = Loading::new(model, &choices)?;
        Ok(Self {
            model: TextModel::load(py, loading, |_| Ok(TOKEN_VECTORS))?,
        })
    }

    /// Compute the token vectors of queries, or of documents with `is_query=False`.
    ///
    /// Returns a list of float32 arrays of shape [tokens, d], or one array for a single str. Each vector has length 1. The model's folder
    /// determines how queries are padded, and which tokens of documents have no vector.
    ///
    /// `prompt`, or the folder's prompt `prompt_name`, is put before each text. `batch_tokens` limits the tokens that are computed at once.
    #[pyo3(signature = (sentences, *, is_query=true, prompt_name=None, prompt=None, batch_tokens=None))]
    fn encode<'py>(
        &self,
        py: Python<'py>,
        sentences: &Bound<'py, PyAny>,
        is_query: bool,
        prompt_name: Option<&str>,
        prompt: Option<&str>,
        batch_tokens: Option<usize>,
    ) -> Result<Bound<'py, PyAny>> {
        let role = match is_query {
            true => TextRole::Query,
            false => TextRole::Document,
        };
        let chosen = self::prompt(prompt_name, prompt)?;
        self.run(py, sentences, role, chosen, batch_tokens)
    }

    /// Compute the token vectors of queries: `encode` with the prompt `query`, if the model's folder defines it.
    ///
    /// Returns a list of float32 arrays of shape [tokens, d], or one array for a single str.
    #[pyo3(signature = (sentences, *, batch_tokens=None))]
    fn encode_query<'py>(
        &self,
        py: Python<'py>,
        sentences: &Bound<'py, PyAny>,
        batch_tokens: Option<usize>,
    ) -> Result<Bound<'py, PyAny>> {
        let chosen = self.model.prompt_of(TextRole::Query)?;
        self.run(py, sentences, TextRole::Query, chosen, batch_tokens)
    }

    /// Compute the token vectors of documents: `encode` with `is_query=False` and the first of the prompts `document`, `passage` and
    /// `corpus` that the model's folder defines.
    ///
    /// Returns a list of float32 arrays of shape [tokens, d], or one array for a single str.
    #[pyo3(signature = (sentences, *, batch_tokens=None))]
    fn encode_document<'py>(
        &self,
        py: Python<'py>,
        sentences: &Bound<'py, PyAny>,
        batch_tokens: Option<usize>,
    ) -> Result<Bound<'py, PyAny>> {
        let chosen = self.model.prompt_of(TextRole::Document)?;
        self.run(py, sentences, TextRole::Document, chosen, batch_tokens)
    }

    /// Score documents for queries by their token vectors (MaxSim), on the model's GPU if this is estimated to be faster than the CPU.
    ///
    /// `queries` and `documents` are lists of arrays of shape [tokens, d], or single arrays of this shape. Returns a float32 array of shape
    /// [queries, documents].
    fn similarity<'py>(
        &self,
        py: Python<'py>,
        queries: &Bound<'py, PyAny>,
        documents: &Bound<'py, PyAny>,
    ) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        let queries = matrices(queries, "queries")?;
        let documents = matrices(documents, "documents")?;
        let shape = [queries.len(), documents.len()];
        let scores = self.scores(py, &queries, &documents)?;
        Ok(PyArray1::from_vec(py, scores).reshape(IxDyn(&shape))?)
    }

    /// Rank documents for a query, best first.
    ///
    /// Returns a list of dicts with `corpus_id` (the index of the document), `score` and, with `return_documents`, `text`. The prompts of
    /// `encode_query` and `encode_document` are used.
    #[pyo3(signature = (query, documents, top_k=None, return_documents=false, *, batch_tokens=None))]
    fn rank<'py>(
        &self,
        py: Python<'py>,
        query: &Bound<'py, PyAny>,
        documents: &Bound<'py, PyAny>,
        top_k: Option<usize>,
        return_documents: bool,
        batch_tokens: Option<usize>,
    ) -> Result<Vec<Bound<'py, PyDict>>> {
        let query = text(query, || "query".to_owned())?;
        let Texts { texts, .. } = texts(documents, "documents")?;
        let model = &self.model;
        let prompts = [
            model.prompt_of(TextRole::Query)?,
            model.prompt_of(TextRole::Document)?,
        ];
        let scores = model.late_scores(py, &query, &texts, prompts, batch_tokens)?;
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        ranked(py, &scores, top_k, return_documents.then_some(&texts[..]))
    }

    /// Names of the prompts that the model's folder defines, sorted.
    #[getter]
    fn prompt_names(&self) -> Vec<&str> {
        self.model.encoder.folder().prompt_names()
    }

    /// Maximum number of tokens of a query, including special tokens; None if there is no limit.
    #[getter]
    fn query_length(&self) -> Option<usize> {
        self.length(TextRole::Query)
    }

    /// Maximum number of tokens of a document, including special tokens; None if there is no limit.
    #[getter]
    fn document_length(&self) -> Option<usize> {
        self.length(TextRole::Document)
    }

    /// Description of the device that the model runs on.
    #[getter]
    fn device(&self) -> String {
        self.model.engine.device().to_string()
    }

    /// Precision of products in linear layers: "f32", "f16", "bf16", "fp8", "int8" or "int4".
    #[getter]
    fn precision(&self) -> &'static str {
        self.model.engine.precision().name()
    }
}

impl MultiVectorEncoder {
    /// Scores all documents for each query, one query after another.
    fn scores(
        &self,
        py: Python<'_>,
        queries: &[TokenVectors],
        documents: &[TokenVectors],
    ) -> Result<Vec<f32>> {
        process::check()?;
        py.detach(|| {
            let mut signals = Signals::new();
            let mut scores = Vec::new();
            for query in queries {
                scores.extend(self.model.engine.max_sim(query, documents)?);
                signals.check()?;
            }
            Ok(scores)
        })
    }

    fn run<'py>(
        &self,
        py: Python<'py>,
        sentences: &Bound<'py, PyAny>,
        role: TextRole,
        prompt: Prompt<'_>,
        batch_tokens: Option<usize>,
    ) -> Result<Bound<'py, PyAny>> {
        let Texts { texts, is_single } = texts(sentences, "sentences")?;
        let model = &self.model;
        let vectors = model.token_vectors(py, &texts, role, prompt, batch_tokens)?;
        let arrays = vectors.into_iter().map(|TokenVectors { width, values }| {
            let shape = IxDyn(&[values.len() / width.max(1), width]);
            Ok(PyArray1::from_vec(py, values).reshape(shape)?)
        });
        let mut arrays: Vec<Bound<'py, PyArrayDyn<f32>>> = arrays.collect::<Result<_>>()?;
        match arrays.pop() {
            Some(array) if is_single => Ok(array.into_any()),
            last => {
                arrays.extend(last);
                Ok(arrays.into_bound_py_any(py)?)
            }
        }
    }

    fn length(&self, role: TextRole) -> Option<usize> {
        let encoder = &self.model.encoder;
        let positions = encoder.max_tokens();
        match encoder.folder().late_interaction() {
            Some(late) => Some(late.length(role).min(positions.unwrap_or(usize::MAX))),
            None => positions,
        }
    }
}

/// Copies the token vectors of several texts, or of one text.
fn matrices(value: &Bound<'_, PyAny>, name: &str) -> Result<Vec<TokenVectors>> {
    let numpy = value.py().import("numpy")?;
    let matrix = |value: &Bound<'_, PyAny>, name: &str| -> Result<TokenVectors> {
        let keywords = PyDict::new(value.py());
        keywords.set_item("dtype", "float32")?;
        let array = numpy.call_method("asarray", (value,), Some(&keywords));
        let array = array.map_err(|e| Error::Python(wrong(name, value, &e.to_string())))?;
        let array: PyReadonlyArray2<'_, f32> = array.extract().map_err(|_| {
            let found = array.getattr("ndim").map_or_else(
                |_| "an unknown number of".to_owned(),
                |ndim| ndim.to_string(),
            );
            Error::Input(format!(
                "{name} has {found} dimensions; expected 2, an array of shape [tokens, d]"
            ))
        })?;
        let array = array.as_array();
        Ok(TokenVectors {
            width: array.ncols(),
            values: array.iter().copied().collect(),
        })
    };
    if value.is_instance_of::<PyString>() {
        let expected = "the arrays of encode, not texts";
        return Err(Error::Python(wrong(name, value, expected)));
    }
    let n_dims = value.getattr("ndim").and_then(|n| n.extract::<usize>());
    if n_dims.is_ok_and(|n| n == 2) {
        return Ok(vec![matrix(value, name)?]);
    }
    let expected = "a list of arrays of shape [tokens, d]";
    items(value, name, expected, |item, at| {
        matrix(item, &format!("{name}[{at}]"))
    })
}

fn wrong(name: &str, value: &Bound<'_, PyAny>, expected: &str) -> PyErr {
    PyTypeError::new_err(format!(
        "{name} is {}; expected an array of shape [tokens, d]: {expected}",
        kind_of(value)
    ))
}
