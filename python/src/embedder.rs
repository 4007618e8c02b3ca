//! `Embedder`: a vector for each text.

use gemmule::{
    model::EMBEDDING,
    text::{Input, Prompt},
};
use numpy::PyArrayDyn;
use pyo3::prelude::*;

use crate::{
    arguments::{Texts, texts},
    arrays::Rows,
    error::{Error, Result},
    loading::Loading,
    text_model::{TextModel, prompt},
};

/// Names of the prompts for documents, in order of preference, as in sentence-transformers.
const DOCUMENT: [&str; 3] = ["document", "passage", "corpus"];

/// Embeds texts, as `SentenceTransformer` does.
///
/// `model` is a folder, or a name on the Hugging Face hub: "ORG/NAME" or "ORG/NAME@REVISION". `device` is "cpu", "cuda" or
/// "cuda:N", and `dtype` "float32", "float16" or "bfloat16"; by default the first CUDA device in float16, or the CPU in float32.
/// `quantize="fp8"`, `"int8"` or `"int4"` stores the weights of linear layers in 8 or 4 bits. Several threads may use one object at once.
#[pyclass(frozen, module = "gemmule")]
pub struct Embedder {
    model: TextModel,
    truncate_dim: Option<usize>,
}

#[pymethods]
impl Embedder {
    #[new]
    #[pyo3(signature = (model, *, device=None, dtype=None, quantize=None, threads=None, truncate_dim=None))]
    fn new(
        py: Python<'_>,
        model: &Bound<'_, PyAny>,
        device: Option<&str>,
        dtype: Option<&str>,
        quantize: Option<&str>,
        threads: Option<usize>,
        truncate_dim: Option<usize>,
    ) -> Result<Self> {
        let loading = Loading::new(model, device, dtype, quantize, threads)?;
        Ok(Self {
            model: TextModel::load(py, loading, EMBEDDING)?,
            truncate_dim,
        })
    }

    /// Embed texts.
    ///
    /// Returns a float32 array of shape [n, d], or of shape [d] for a single str. Texts that are longer than the model's maximum
    /// are cut. The result of a text does not depend on the other texts, except for rounding.
    ///
    /// `prompt`, or the folder's prompt `prompt_name`, is put before each text. `batch_tokens` limits the tokens that are
    /// computed at once. `normalize_embeddings`, or `normalize`, scales each vector to length 1. `truncate_dim` keeps the first
    /// values.
    #[pyo3(signature = (sentences, *, prompt_name=None, prompt=None, batch_tokens=None, normalize_embeddings=false, normalize=false, truncate_dim=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn encode<'py>(
        &self,
        py: Python<'py>,
        sentences: &Bound<'py, PyAny>,
        prompt_name: Option<&str>,
        prompt: Option<&str>,
        batch_tokens: Option<usize>,
        normalize_embeddings: bool,
        normalize: bool,
        truncate_dim: Option<usize>,
    ) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        let Texts { texts, is_single } = texts(sentences, "sentences")?;
        let chosen = self::prompt(prompt_name, prompt)?;
        let inputs = texts.iter().map(|text| Input::Text(text));
        let output = |_: &_, outputs: &gemmule::Outputs| Ok(outputs.get(EMBEDDING)?.clone());
        let mut rows = self.model.rows(py, inputs, chosen, batch_tokens, output)?;
        if let Some(n) = truncate_dim.or(self.truncate_dim) {
            rows = truncated(rows, n)?;
        }
        if normalize_embeddings || normalize {
            normalize_rows(&mut rows);
        }
        rows.into_array(py, is_single)
    }

    /// Embed queries: `encode` with the prompt `query`, if the model's folder defines it.
    ///
    /// Returns a float32 array of shape [n, d], or of shape [d] for a single str.
    #[pyo3(signature = (sentences, *, batch_tokens=None, normalize_embeddings=false, truncate_dim=None))]
    fn encode_query<'py>(
        &self,
        py: Python<'py>,
        sentences: &Bound<'py, PyAny>,
        batch_tokens: Option<usize>,
        normalize_embeddings: bool,
        truncate_dim: Option<usize>,
    ) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        let (normalize, name) = (normalize_embeddings, self.prompt_of(&["query"])?);
        self.encode(
            py,
            sentences,
            name,
            None,
            batch_tokens,
            normalize,
            false,
            truncate_dim,
        )
    }

    /// Embed documents: `encode` with the prompt `document`, `passage` or `corpus`, the first that the model's folder defines.
    ///
    /// Returns a float32 array of shape [n, d], or of shape [d] for a single str.
    #[pyo3(signature = (sentences, *, batch_tokens=None, normalize_embeddings=false, truncate_dim=None))]
    fn encode_document<'py>(
        &self,
        py: Python<'py>,
        sentences: &Bound<'py, PyAny>,
        batch_tokens: Option<usize>,
        normalize_embeddings: bool,
        truncate_dim: Option<usize>,
    ) -> Result<Bound<'py, PyArrayDyn<f32>>> {
        let (normalize, name) = (normalize_embeddings, self.prompt_of(&DOCUMENT)?);
        self.encode(
            py,
            sentences,
            name,
            None,
            batch_tokens,
            normalize,
            false,
            truncate_dim,
        )
    }

    /// Names of the prompts that the model's folder defines, sorted.
    #[getter]
    fn prompt_names(&self) -> Vec<&str> {
        self.model.encoder.folder().prompt_names()
    }

    /// Maximum number of tokens of a text, with special tokens; None without a limit.
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

impl Embedder {
    /// Returns the first of the names that is a prompt of the folder.
    fn prompt_of(&self, names: &[&str]) -> Result<Option<&str>> {
        let folder = self.model.encoder.folder();
        // A folder may have another pipeline for the texts of the first name, which every folder knows.
        if let Some(&first) = names.first() {
            folder.prompt(Prompt::Named(first))?;
        }
        let index = folder.prompt_index(names);
        Ok(index.and_then(|index| folder.prompt_name(index)))
    }
}

/// Keeps the first `n` values of each row.
fn truncated(rows: Rows, n: usize) -> Result<Rows> {
    let width = rows.row.iter().product();
    if n == 0 || n > width {
        return Err(Error::Input(format!(
            "truncate_dim is {n}; expected 1 to {width}, the dimension of the model's vectors"
        )));
    }
    let kept = rows.values.chunks_exact(width).flat_map(|row| &row[..n]);
    Ok(Rows {
        values: kept.copied().collect(),
        n_rows: rows.n_rows,
        row: vec![n],
    })
}

/// Scales each row to length 1. A row of zeros stays one.
fn normalize_rows(rows: &mut Rows) {
    let width = rows.row.iter().product::<usize>().max(1);
    for row in rows.values.chunks_exact_mut(width) {
        let squares = row.iter().map(|&x| f64::from(x) * f64::from(x));
        // The minimum length of torch.nn.functional.normalize.
        let length = squares.sum::<f64>().sqrt().max(1e-12);
        row.iter_mut()
            .for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
}
