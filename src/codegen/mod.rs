//! Generates CUDA source from kernels, with Tera templates embedded in the binary.
//!
//! Rendering is a pure function of the kernel: the text contains no hash, date or path and does not
//! depend on the iteration order of a hash map.

mod canonical;

use std::{borrow::Cow, sync::OnceLock};

use sha2::{Digest, Sha256};
use tera::{Context, Tera};

pub use canonical::canonical;

use crate::{
    kernels::{Kernel, Role},
    tensor::{DType, Element},
};

/// Name and text of each file in `templates/`. The build script generates the list.
const TEMPLATES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/templates.rs"));

/// Generated CUDA source of one kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// Name of the `__global__` function, and of the source file without its extension.
    pub symbol: String,
    pub text: String,
}

impl Source {
    /// Returns the SHA-256 of the [`canonical`](canonical()) text in hexadecimal. Changes to comments and
    /// formatting do not affect it.
    pub fn digest(&self) -> String {
        let digest = Sha256::digest(canonical(&self.text));
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[derive(Debug, thiserror::Error)]
pub enum CodegenError {
    #[error("the template `{name}` does not parse")]
    Template {
        name: String,
        #[source]
        source: tera::Error,
    },
    #[error("the kernel `{symbol}` does not render from `{template}`")]
    Render {
        symbol: String,
        template: String,
        #[source]
        source: tera::Error,
    },
    #[error(
        "the kernel `{symbol}` has no CUDA source: {reason}; run it on a CPU, or compile without quantization"
    )]
    CpuOnly { symbol: String, reason: String },
}

/// The template environment. Creating it parses all templates.
pub struct Codegen {
    tera: Tera,
    marks: Option<Marks>,
}

/// Marker characters around the text of a partial (an included template). A marked partial is written as `begin`, its name, `name_end`, its
/// text, `end`.
#[derive(Clone, Copy, Debug)]
pub struct Marks {
    pub begin: char,
    pub name_end: char,
    pub end: char,
}

impl Marks {
    /// Control characters that no template contains.
    pub const DEFAULT: Self = Self {
        begin: '\u{1}',
        name_end: '\u{2}',
        end: '\u{3}',
    };

    fn around(self, name: &str, text: &str) -> String {
        let Self {
            begin,
            name_end,
            end,
        } = self;
        format!("{begin}{name}{name_end}{text}{end}")
    }
}

impl Codegen {
    /// Creates an environment by parsing all templates.
    ///
    /// # Errors
    /// Returns an error if a template does not parse.
    pub fn new() -> Result<Self, CodegenError> {
        Self::with_marks(None)
    }

    /// Returns the environment that all callers in the process share. The first call creates it.
    ///
    /// # Errors
    /// Returns an error if a template does not parse.
    pub fn shared() -> Result<&'static Self, CodegenError> {
        static SHARED: OnceLock<Codegen> = OnceLock::new();
        if let Some(shared) = SHARED.get() {
            return Ok(shared);
        }
        let new = Self::new()?;
        Ok(SHARED.get_or_init(|| new))
    }

    /// Creates an environment that encloses the text of each partial in [`Marks`], for tests that compare sources with reviewed snapshots.
    /// The test must remove the marks and then [`tidy`] the source.
    ///
    /// # Errors
    /// Returns an error if a template does not parse.
    pub fn marking_partials(marks: Marks) -> Result<Self, CodegenError> {
        Self::with_marks(Some(marks))
    }

    fn with_marks(marks: Option<Marks>) -> Result<Self, CodegenError> {
        let mut tera = Tera::new();
        tera.autoescape_on(Vec::<&'static str>::new());
        let files = TEMPLATES.iter().map(|&(name, text)| {
            let marks = marks.filter(|_| name.starts_with("partials/"));
            let text = marks.map_or(Cow::Borrowed(text), |marks| marks.around(name, text).into());
            (name, text)
        });
        tera.add_raw_templates(files)
            .map_err(|source| CodegenError::Template {
                name: source.to_string(),
                source,
            })?;
        Ok(Self { tera, marks })
    }

    /// Renders the source of `kernel`.
    ///
    /// # Errors
    /// Returns an error if the kernel has only a CPU form, or if a template uses an undefined value.
    pub fn source(&self, kernel: &dyn Kernel) -> Result<Source, CodegenError> {
        let symbol = kernel.symbol();
        if let Some(reason) = kernel.cpu_only() {
            return Err(CodegenError::CpuOnly { symbol, reason });
        }
        let template = format!("{}.cu.tera", kernel.template());
        let mut context = Context::new();
        for (name, value) in kernel.constants() {
            context.insert(name, &value);
        }
        context.insert("symbol", &symbol);
        context.insert("signature", &signature(kernel));
        context.insert("threads", &kernel.threads());
        match self.tera.render(&template, &context) {
            Ok(text) => Ok(Source {
                symbol,
                text: match self.marks {
                    None => tidy(&text),
                    Some(_) => text,
                },
            }),
            Err(source) => Err(CodegenError::Render {
                symbol,
                template,
                source,
            }),
        }
    }
}

/// Returns the type of an element in the generated CUDA source.
pub fn c_type(element: Element) -> &'static str {
    match element {
        Element::Value(DType::F32) => "float",
        Element::Value(DType::F16) => "f16",
        Element::Value(DType::BF16) => "bf16",
        Element::Scaled(_) | Element::E4m3 => "unsigned char",
        Element::I8 => "signed char",
        Element::I32 => "int",
        Element::I64 => "long long",
    }
}

fn signature(kernel: &dyn Kernel) -> String {
    let maps = kernel.tensor_maps();
    let params: Vec<String> = kernel
        .params()
        .into_iter()
        .map(|p| {
            let name = p.name;
            let map = maps.iter().find(|map| map.param == name);
            match (&p.role, map) {
                (_, Some(map)) => {
                    let map_named =
                        |suffix| format!("const __grid_constant__ TensorMap {name}{suffix}");
                    let last = map.has_last_box.then(|| map_named("_last"));
                    let bytes = p
                        .is_packed()
                        .then(|| format!("const unsigned char* __restrict__ {name}_bytes"));
                    let all = [Some(map_named("")), last, bytes];
                    all.into_iter().flatten().collect::<Vec<_>>().join(", ")
                }
                (Role::Read { element, .. }, None) => {
                    format!("const {}* __restrict__ {name}", c_type(*element))
                }
                (Role::Write { element, .. }, None) => {
                    format!("{}* __restrict__ {name}", c_type(*element))
                }
                (Role::Count(_), None) => format!("unsigned int {name}"),
            }
        })
        .collect();
    params.join(", ")
}

/// Removes trailing spaces and repeated blank lines, which template directives leave behind.
pub fn tidy(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut blank = true;
    for line in text.lines() {
        let line = line.trim_end();
        if line.is_empty() && blank {
            continue;
        }
        blank = line.is_empty();
        out.push_str(line);
        out.push('\n');
    }
    out
}
