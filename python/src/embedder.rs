//! `Embedder`: a vector for each text.

use gemmule::{
    engine::LOGITS,
    model::{EMBEDDING, TOKEN_VECTORS, computed},
    text::{Folder, Input, Prompt, TextRole},
};
use pyo3::prelude::*;

use crate::{
    arguments::{Texts, texts},
    arrays::Rows,
    device_array::{DeviceArray, Target},
    error::{Error, Result},
    loading::{Choices, Loading},
    text_model::{TextModel, prompt},
};

/// Embeds texts, as `SentenceTransformer` does.
///
/// `model` is a folder, or a name on the Hugging Face hub: "ORG/NAME" or "ORG/NAME@REVISION". `device` is "cpu", "cuda" or "cuda:N".
/// `dtype` is "float32", "float16" or "bfloat16". The default is the first CUDA device with float16, or the CPU with float32.
/// `quantize="fp8"`, `"int8"` or `"int4"` stores the weights of linear layers in 8 or 4 bits. `dequantize=True` dequantizes the weights of
/// a quantized checkpoint. `task` selects an adapter of the weights, such as "retrieval.query" of jina-embeddings-v3, or the default route
/// of a `Router` of sentence-transformers. Several threads may use one object at once.
#[pyclass(frozen, module = "gemmule")]
pub struct Embedder {
    model: TextModel,
    /// Routes of a Router, except its default route.
    routes: Vec<Route>,
    truncate_dim: Option<usize>,
}

/// A route of a Router, or the reason why it cannot be loaded.
struct Route {
    name: String,
    model: std::result::Result<TextModel, String>,
}

/// Form in which a call returns vectors.
struct Form {
    /// Whether vectors are scaled to length 1.
    normalize: bool,
    /// Number of values to keep; `None` for all.
    n_values: Option<usize>,
    target: Target,
}

#[pymethods]
impl Embedder {
    #[new]
    #[pyo3(signature = (model, *, device=None, dtype=None, quantize=None, dequantize=false, threads=None, truncate_dim=None, task=None))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn new(
        py: Python<'_>,
        model: &Bound<'_, PyAny>,
        device: Option<&str>,
        dtype: Option<&str>,
        quantize: Option<&str>,
        dequantize: bool,
        threads: Option<usize>,
        truncate_dim: Option<usize>,
        task: Option<&str>,
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
        let default = match task {
            Some(task) => loading.clone().for_task(task),
            None => loading.clone(),
        };
        let model = TextModel::load(py, default, embedded)?;
        let folder = model.encoder.folder();
        let route = |task| Some((folder.route_for(task)?.to_owned(), task));
        let others = folder.other_tasks().into_iter().filter_map(route);
        let mut routes = Vec::new();
        for (name, task) in others {
            let model = TextModel::load(py, loading.clone().for_task(task), embedded);
            let model = match model {
                // A signal handler raised an exception, such as `KeyboardInterrupt`, which ends the loading.
                Err(error @ Error::Python(_)) => return Err(error),
                Err(error) => Err(PyErr::from(error).value(py).to_string()),
                Ok(model) => Ok(model),
            };
            routes.push(Route { name, model });
        }
        Ok(Self {
            model,
            routes,
            truncate_dim,
        })
    }

    /// Embed texts.
    ///
    /// Returns a float32 array of shape [n, d], or of shape [d] for a single str. Texts that are longer than the model's maximum are
    /// truncated. The result of a text does not depend on the other texts, except for rounding.
    ///
    /// `prompt`, or the folder's prompt `prompt_name`, is put before each text. `task` selects the route of a Router. `batch_tokens` limits
    /// the tokens that are computed at once. `normalize_embeddings`, or `normalize`, scales each vector to length 1. `truncate_dim` keeps only
    /// the first values of each vector. With `to="dlpack"`, the result is a `DeviceArray`, which stays on the device in the model's storage
    /// type.
    #[pyo3(signature = (sentences, *, prompt_name=None, prompt=None, batch_tokens=None, normalize_embeddings=false, normalize=false, truncate_dim=None, to="numpy", task=None))]
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
        to: &str,
        task: Option<&str>,
    ) -> Result<Bound<'py, PyAny>> {
        let texts = texts(sentences, "sentences")?;
        let chosen = self::prompt(prompt_name, prompt)?;
        if let Some(task) = task {
            self.check_task(task)?;
        }
        self.run(
            py,
            self.routed(task)?,
            &texts,
            chosen,
            batch_tokens,
            self.form(normalize_embeddings || normalize, truncate_dim, to)?,
        )
    }

    /// Embed queries: `encode` with the task `query` and the prompt `query`, if the model's folder defines them.
    ///
    /// Returns a float32 array of shape [n, d], or of shape [d] for a single str.
    #[pyo3(signature = (sentences, *, batch_tokens=None, normalize_embeddings=false, truncate_dim=None, to="numpy"))]
    fn encode_query<'py>(
        &self,
        py: Python<'py>,
        sentences: &Bound<'py, PyAny>,
        batch_tokens: Option<usize>,
        normalize_embeddings: bool,
        truncate_dim: Option<usize>,
        to: &str,
    ) -> Result<Bound<'py, PyAny>> {
        let texts = texts(sentences, "sentences")?;
        let model = self.routed(Some(TextRole::Query.name()))?;
        let chosen = model.prompt_of(TextRole::Query)?;
        self.run(
            py,
            model,
            &texts,
            chosen,
            batch_tokens,
            self.form(normalize_embeddings, truncate_dim, to)?,
        )
    }

    /// Embed documents: `encode` with the task `document`, and with the first of the prompts `document`, `passage` and `corpus` that the
    /// model's folder defines.
    ///
    /// Returns a float32 array of shape [n, d], or of shape [d] for a single str.
    #[pyo3(signature = (sentences, *, batch_tokens=None, normalize_embeddings=false, truncate_dim=None, to="numpy"))]
    fn encode_document<'py>(
        &self,
        py: Python<'py>,
        sentences: &Bound<'py, PyAny>,
        batch_tokens: Option<usize>,
        normalize_embeddings: bool,
        truncate_dim: Option<usize>,
        to: &str,
    ) -> Result<Bound<'py, PyAny>> {
        let texts = texts(sentences, "sentences")?;
        let model = self.routed(Some(TextRole::Document.name()))?;
        let chosen = model.prompt_of(TextRole::Document)?;
        self.run(
            py,
            model,
            &texts,
            chosen,
            batch_tokens,
            self.form(normalize_embeddings, truncate_dim, to)?,
        )
    }

    /// Names of the prompts that the model's folder defines, sorted.
    #[getter]
    fn prompt_names(&self) -> Vec<&str> {
        self.model.encoder.folder().prompt_names()
    }

    /// Maximum number of tokens of a text, including special tokens; None if there is no limit.
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

impl Embedder {
    fn form(&self, normalize: bool, truncate_dim: Option<usize>, to: &str) -> Result<Form> {
        Ok(Form {
            normalize,
            n_values: truncate_dim.or(self.truncate_dim),
            target: Target::new(to)?,
        })
    }

    /// Checks that the model has a Router, or was loaded with the adapter for `task`.
    fn check_task(&self, task: &str) -> Result<()> {
        let folder = self.model.encoder.folder();
        let problem = match (folder.route(), folder.adapters(), folder.adapter()) {
            (Some(_), ..) => return Ok(()),
            (None, [], _) => "the model computes all tasks in the same way; omit it".to_owned(),
            (None, _, Some(loaded)) if loaded == task => return Ok(()),
            (None, _, loaded) => {
                let loaded = match loaded {
                    Some(loaded) => format!("the adapter for \"{loaded}\""),
                    None => "no adapter".to_owned(),
                };
                format!("the model has {loaded}; use Embedder(model, task=\"{task}\")")
            }
        };
        Err(Error::Input(format!("task is \"{task}\", and {problem}")))
    }

    /// Returns the model for a task: the model of a route if the folder has a Router, else the only model.
    fn routed(&self, task: Option<&str>) -> Result<&TextModel> {
        let folder = self.model.encoder.folder();
        let (Some(task), Some(loaded)) = (task, folder.route()) else {
            return Ok(&self.model);
        };
        let Some(name) = folder.route_for(task) else {
            return Err(Error::Input(format!(
                "the Router of `{}` has no route for the task \"{task}\"",
                folder.root().display()
            )));
        };
        let route = self.routes.iter().find(|route| route.name == name);
        match route.map(|route| &route.model) {
            Some(Ok(model)) => Ok(model),
            _ if name == loaded => Ok(&self.model),
            Some(Err(problem)) => Err(Error::Input(format!(
                "the route \"{name}\" of the task \"{task}\" cannot be loaded: {problem}"
            ))),
            None => Err(Error::Input(format!(
                "the route \"{name}\" of the task \"{task}\" does not read texts"
            ))),
        }
    }

    fn run<'py>(
        &self,
        py: Python<'py>,
        model: &TextModel,
        Texts { texts, is_single }: &Texts,
        prompt: Prompt<'_>,
        batch_tokens: Option<usize>,
        form: Form,
    ) -> Result<Bound<'py, PyAny>> {
        let inputs = texts.iter().map(|text| Input::Text(text));
        if form.target == Target::Dlpack {
            if form.normalize {
                return Err(Error::Input(
                    "normalize_embeddings is computed on the host, and to=\"dlpack\" leaves the vectors on the device; omit it, and normalize there, as torch.nn.functional.normalize does"
                        .to_owned(),
                ));
            }
            let width = |own| form.width(own);
            let output = model.device_rows(py, inputs, prompt, batch_tokens, width)?;
            let array = DeviceArray::new(output, *is_single);
            return Ok(Bound::new(py, array)?.into_any());
        }
        let output = |_: &_, outputs: &gemmule::Outputs| Ok(outputs.get(EMBEDDING)?.clone());
        let mut rows = model.rows(py, inputs, prompt, batch_tokens, output)?;
        let own = rows.row.iter().product();
        let n = form.width(own)?;
        if n < own {
            rows = truncated(rows, n);
        }
        if form.normalize {
            normalize_rows(&mut rows);
        }
        Ok(rows.into_array(py, *is_single)?.into_any())
    }
}

/// Returns the name of the embedding output. Returns an error if the modules of the folder compute another output.
fn embedded(folder: &Folder) -> Result<&'static str> {
    let found = match folder.modules().and_then(computed) {
        None | Some(EMBEDDING) => return Ok(EMBEDDING),
        Some(TOKEN_VECTORS) => {
            "computes a vector for each token, not for each text; use MultiVectorEncoder".to_owned()
        }
        Some(LOGITS) => "scores pairs, and does not embed texts; use Reranker".to_owned(),
        Some(other) => {
            format!(
                "computes the output `{other}`, and no embeddings; use Engine(model, outputs=[\"{other}\"])"
            )
        }
    };
    let folder = folder.root().display();
    Err(Error::Input(format!("the model of `{folder}` {found}")))
}

impl Form {
    /// Returns the number of values to keep of a vector with `own` values.
    fn width(&self, own: usize) -> Result<usize> {
        match self.n_values {
            Some(n) if n == 0 || n > own => Err(Error::Input(format!(
                "truncate_dim is {n}; expected 1 to {own}, the dimension of the model's vectors"
            ))),
            Some(n) => Ok(n),
            None => Ok(own),
        }
    }
}

/// Keeps only the first `n` values of each row.
fn truncated(rows: Rows, n: usize) -> Rows {
    let width = rows.row.iter().product();
    let kept = rows.values.chunks_exact(width).flat_map(|row| &row[..n]);
    Rows {
        values: kept.copied().collect(),
        n_rows: rows.n_rows,
        row: vec![n],
    }
}

/// Scales each row to length 1. A row of zeros is unchanged.
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
