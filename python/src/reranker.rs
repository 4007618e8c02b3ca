//! `Reranker`: a score for each pair of a query and a document.

use gemmule::{Outputs, engine::LOGITS, text::Input};
use numpy::PyArrayDyn;
use pyo3::{
    prelude::*,
    types::{PyDict, PyString},
};

use crate::{
    arguments::{Texts, items, pair, text, texts},
    arrays::Rows,
    error::Result,
    loading::Loading,
    text_model::{TextModel, prompt},
};

/// Scores pairs of a query and a document, as `CrossEncoder` does.
///
/// `model` is a folder, or a name on the Hugging Face hub: "ORG/NAME" or "ORG/NAME@REVISION". `device` is "cpu", "cuda" or
/// "cuda:N", and `dtype` "float32", "float16" or "bfloat16"; by default the first CUDA device in float16, or the CPU in float32.
/// `quantize="fp8"`, `"int8"` or `"int4"` stores the weights of linear layers in 8 or 4 bits. Several threads may use one object at once.
#[pyclass(frozen, module = "gemmule")]
pub struct Reranker {
    model: TextModel,
}

#[pymethods]
impl Reranker {
    #[new]
    #[pyo3(signature = (model, *, device=None, dtype=None, quantize=None, threads=None))]
    fn new(
        py: Python<'_>,
        model: &Bound<'_, PyAny>,
        device: Option<&str>,
        dtype: Option<&str>,
        quantize: Option<&str>,
        threads: Option<usize>,
    ) -> Result<Self> {
        let loading = Loading::new(model, device, dtype, quantize, threads)?;
        Ok(Self {
            model: TextModel::load(py, loading, LOGITS)?,
        })
    }

    /// Score pairs of a query and a document.
    ///
    /// Returns a float32 array of shape [n], or of shape [n, labels] for a model with several labels. The scores of a single pair
    /// have no first dimension. `prompt`, or the folder's prompt `prompt_name`, is put before each query.
    #[pyo3(signature = (pairs, *, prompt_name=None, prompt=None, batch_tokens=None))]
    fn predict<'py>(
        &self,
        py: Python<'py>,
        pairs: &Bound<'py, PyAny>,
        prompt_name: Option<&str>,
        prompt: Option<&str>,
        batch_tokens: Option<usize>,
    ) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        let (pairs, is_single) = pairs_of(pairs)?;
        let chosen = self::prompt(prompt_name, prompt)?;
        let inputs = pairs
            .iter()
            .map(|(query, document)| Input::Pair(query, document));
        let rows = self.scores(py, inputs, chosen, batch_tokens)?;
        rows.into_array(py, is_single)
    }

    /// Rank documents for a query, the best first.
    ///
    /// Returns a list of dicts with `corpus_id`, the index of the document, `score`, and with `return_documents` its `text`.
    #[pyo3(signature = (query, documents, top_k=None, return_documents=false, *, prompt_name=None, prompt=None, batch_tokens=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn rank<'py>(
        &self,
        py: Python<'py>,
        query: &Bound<'py, PyAny>,
        documents: &Bound<'py, PyAny>,
        top_k: Option<usize>,
        return_documents: bool,
        prompt_name: Option<&str>,
        prompt: Option<&str>,
        batch_tokens: Option<usize>,
    ) -> Result<Vec<Bound<'py, PyDict>>> {
        let query = text(query, || "query".to_owned())?;
        let Texts {
            texts: documents, ..
        } = texts(documents, "documents")?;
        let chosen = self::prompt(prompt_name, prompt)?;
        let inputs = documents.iter().map(|text| Input::Pair(&query, text));
        let rows = self.scores(py, inputs, chosen, batch_tokens)?;
        if let [labels] = rows.row[..] {
            let labels = labels as u64;
            return Err(gemmule::EngineError::SeveralScores { labels }.into());
        }
        let mut order: Vec<usize> = (0..documents.len()).collect();
        // Equal scores stay in the order of the documents.
        order.sort_by(|&a, &b| rows.values[b].total_cmp(&rows.values[a]));
        order.truncate(top_k.unwrap_or(usize::MAX));
        let ranked = order.into_iter().map(|index| {
            let entry = PyDict::new(py);
            entry.set_item("corpus_id", index)?;
            entry.set_item("score", rows.values[index])?;
            if return_documents {
                entry.set_item("text", &documents[index])?;
            }
            Ok(entry)
        });
        ranked.collect()
    }

    /// Maximum number of tokens of a pair, with special tokens; None without a limit.
    #[getter]
    fn max_seq_length(&self) -> Option<usize> {
        self.model.encoder.max_tokens()
    }

    /// Device that the model runs on, in words.
    #[getter]
    fn device(&self) -> String {
        self.model.engine.device().to_string()
    }

    /// Precision of the products of linear layers: "f32", "f16", "bf16", "fp8", "int8" or "int4".
    #[getter]
    fn precision(&self) -> &'static str {
        self.model.engine.precision().name()
    }
}

impl Reranker {
    fn scores<'a>(
        &self,
        py: Python<'_>,
        inputs: impl Iterator<Item = Input<'a>> + Send,
        prompt: gemmule::text::Prompt<'_>,
        batch_tokens: Option<usize>,
    ) -> Result<Rows> {
        let output = |engine: &gemmule::Engine, outputs: &Outputs| Ok(engine.scores(outputs)?);
        self.model.rows(py, inputs, prompt, batch_tokens, output)
    }
}

/// Copies a list of pairs, or one pair. A tuple or list of two texts is one pair, as for `CrossEncoder`.
fn pairs_of(value: &Bound<'_, PyAny>) -> Result<(Vec<(String, String)>, bool)> {
    let first = value.get_item(0);
    if !value.is_instance_of::<PyString>()
        && first.is_ok_and(|item| item.is_instance_of::<PyString>())
    {
        return Ok((vec![pair(value, "pairs")?], true));
    }
    let expected = "a list of pairs of str";
    let pairs = items(value, "pairs", expected, |item, index| {
        pair(item, &format!("pairs[{index}]"))
    })?;
    Ok((pairs, false))
}
