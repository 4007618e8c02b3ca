//! `Reranker`: a score for each pair of a query and a document.

use std::{collections::HashMap, mem};

use gemmule::{
    Outputs,
    engine::LOGITS,
    heads::TokenVectors,
    model::TOKEN_VECTORS,
    text::{Folder, Input, Prompt, TextRole},
};
use numpy::PyArrayDyn;
use pyo3::{
    prelude::*,
    types::{PyDict, PyString},
};

use crate::{
    arguments::{Texts, items, pair, text, texts},
    arrays::Rows,
    error::Result,
    loading::{Choices, Loading},
    signals::Signals,
    text_model::{TextModel, prompt},
};

/// Scores pairs of a query and a document, like `CrossEncoder`, or with the token vectors of a late-interaction model.
///
/// `model` is a folder, or a name on the Hugging Face hub: "ORG/NAME" or "ORG/NAME@REVISION". `device` is "cpu", "cuda" or
/// "cuda:N". `dtype` is "float32", "float16" or "bfloat16". The default is the first CUDA device with float16, or the CPU with
/// float32. `quantize="fp8"`, `"int8"` or `"int4"` stores the weights of linear layers in 8 or 4 bits. `dequantize=True` dequantizes
/// the weights of a quantized checkpoint. Several threads may use one object at once.
#[pyclass(frozen, module = "gemmule")]
pub struct Reranker {
    model: TextModel,
}

#[pymethods]
impl Reranker {
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
            model: TextModel::load(py, loading, scored)?,
        })
    }

    /// Score pairs of a query and a document.
    ///
    /// Returns a float32 array of shape [n], or of shape [n, labels] for a model with several labels. For a single pair, the first
    /// dimension is dropped. `prompt`, or the folder's prompt `prompt_name`, is put before each query.
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
        let rows = self.scores(py, &pairs, chosen, batch_tokens)?;
        rows.into_array(py, is_single)
    }

    /// Rank documents for a query, best first.
    ///
    /// Returns a list of dicts with `corpus_id` (the index of the document), `score` and, with `return_documents`, `text`.
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
        let Texts { texts, .. } = texts(documents, "documents")?;
        let chosen = self::prompt(prompt_name, prompt)?;
        let pairs = texts.into_iter().map(|text| (query.clone(), text));
        let pairs: Vec<(String, String)> = pairs.collect();
        let rows = self.scores(py, &pairs, chosen, batch_tokens)?;
        if let [labels] = rows.row[..] {
            let labels = labels as u64;
            return Err(gemmule::EngineError::SeveralScores { labels }.into());
        }
        let texts: Vec<&str> = pairs.iter().map(|(_, text)| text.as_str()).collect();
        ranked(
            py,
            &rows.values,
            top_k,
            return_documents.then_some(&texts[..]),
        )
    }

    /// Maximum number of tokens of a pair, including special tokens; None if there is no limit.
    #[getter]
    fn max_seq_length(&self) -> Option<usize> {
        self.model.encoder.max_tokens()
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

impl Reranker {
    fn scores(
        &self,
        py: Python<'_>,
        pairs: &[(String, String)],
        prompt: Prompt<'_>,
        batch_tokens: Option<usize>,
    ) -> Result<Rows> {
        if self.model.engine.has_token_vectors() {
            return self.late_scores(py, pairs, prompt, batch_tokens);
        }
        let output = |engine: &gemmule::Engine, outputs: &Outputs| Ok(engine.scores(outputs)?);
        let inputs = pairs.iter();
        let inputs = inputs.map(|(query, document)| Input::Pair(query, document));
        self.model.rows(py, inputs, prompt, batch_tokens, output)
    }

    /// Scores pairs by their token vectors. The prompt applies to the queries. Equal queries are computed once.
    fn late_scores(
        &self,
        py: Python<'_>,
        pairs: &[(String, String)],
        prompt: Prompt<'_>,
        batch_tokens: Option<usize>,
    ) -> Result<Rows> {
        let mut queries: Vec<String> = Vec::new();
        let mut places: HashMap<&str, usize> = HashMap::new();
        let mut pairs_of: Vec<Vec<usize>> = Vec::new();
        for (at, (query, _)) in pairs.iter().enumerate() {
            let place = *places.entry(query).or_insert_with(|| {
                queries.push(query.clone());
                pairs_of.push(Vec::new());
                queries.len() - 1
            });
            pairs_of[place].push(at);
        }
        let documents: Vec<String> = pairs.iter().map(|(_, text)| text.clone()).collect();
        let model = &self.model;
        if let [query] = &queries[..] {
            let prompts = [prompt, Prompt::Default];
            let values = model.late_scores(py, query, &documents, prompts, batch_tokens)?;
            return Ok(Rows {
                values,
                n_rows: pairs.len(),
                row: Vec::new(),
            });
        }
        let (query, document) = (TextRole::Query, TextRole::Document);
        let queries = model.token_vectors(py, &queries, query, prompt, batch_tokens)?;
        let mut documents =
            model.token_vectors(py, &documents, document, Prompt::Default, batch_tokens)?;
        let mut values = vec![0.0; pairs.len()];
        py.detach(|| -> Result<()> {
            let mut signals = Signals::new();
            for (query, pairs) in queries.iter().zip(&pairs_of) {
                let own = pairs.iter().map(|&at| mem::take(&mut documents[at]));
                let own: Vec<TokenVectors> = own.collect();
                let scores = model.engine.max_sim(query, &own)?;
                for (&at, score) in pairs.iter().zip(scores) {
                    values[at] = score;
                }
                signals.check()?;
            }
            Ok(())
        })?;
        Ok(Rows {
            values,
            n_rows: pairs.len(),
            row: Vec::new(),
        })
    }
}

/// Returns the output from which scores are computed: token vectors for late interaction, logits for cross-encoders. Late interaction is
/// used if the folder has settings for it, or the layer `colbert_linear` of BGE-M3.
fn scored(folder: &Folder) -> Result<&'static str> {
    let layers = ["colbert_linear.safetensors", "colbert_linear.pt"];
    let is_late = folder.late_interaction().is_some()
        || layers.iter().any(|layer| folder.root_files().has(layer));
    Ok(match is_late {
        true => TOKEN_VECTORS,
        false => LOGITS,
    })
}

/// Returns the best `top_k` documents as dicts. Documents with equal scores keep their order. `documents` contains the texts if they are to
/// be returned.
pub fn ranked<'py>(
    py: Python<'py>,
    scores: &[f32],
    top_k: Option<usize>,
    documents: Option<&[&str]>,
) -> Result<Vec<Bound<'py, PyDict>>> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(top_k.unwrap_or(usize::MAX));
    let entries = order.into_iter().map(|index| {
        let entry = PyDict::new(py);
        entry.set_item("corpus_id", index)?;
        entry.set_item("score", scores[index])?;
        if let Some(text) = documents.and_then(|texts| texts.get(index)) {
            entry.set_item("text", text)?;
        }
        Ok(entry)
    });
    entries.collect()
}

/// Copies a list of pairs, or a single pair. A tuple or list of two texts is a single pair, as for `CrossEncoder`.
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
