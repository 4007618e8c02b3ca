//! CUDA source from kernels: a Tera environment over the shipped templates, and the signature.
//!
//! Rendering is a pure function of the kernel: no hash, date, path or map order gets into the text.

use include_dir::{Dir, include_dir};
use tera::{Context, Tera};

use crate::{
    kernels::{Kernel, Role},
    tensor::DType,
};

static TEMPLATES: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/templates");

/// Generated CUDA source of one kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// Name of the `__global__` function, and stem of the emitted file.
    pub symbol: String,
    pub text: String,
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
}

/// The template environment. Building it parses all templates once.
pub struct Codegen {
    tera: Tera,
}

impl Codegen {
    pub fn new() -> Result<Self, CodegenError> {
        let mut tera = Tera::new();
        tera.autoescape_on(Vec::<&'static str>::new());
        let mut files = Vec::new();
        collect(&TEMPLATES, &mut files);
        tera.add_raw_templates(files)
            .map_err(|source| CodegenError::Template {
                name: source.to_string(),
                source,
            })?;
        Ok(Self { tera })
    }

    /// The source of `kernel`.
    pub fn source(&self, kernel: &dyn Kernel) -> Result<Source, CodegenError> {
        let symbol = kernel.symbol();
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
                text: tidy(&text),
            }),
            Err(source) => Err(CodegenError::Render {
                symbol,
                template,
                source,
            }),
        }
    }
}

fn collect(dir: &'static Dir<'static>, into: &mut Vec<(&'static str, &'static str)>) {
    for file in dir.files() {
        if let (Some(name), Some(text)) = (file.path().to_str(), file.contents_utf8()) {
            into.push((name, text));
        }
    }
    for sub in dir.dirs() {
        collect(sub, into);
    }
}

/// The C type of an element.
pub fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::I32 => "int",
        DType::I64 => "long long",
    }
}

fn signature(kernel: &dyn Kernel) -> String {
    let maps = kernel.tensor_maps();
    let params: Vec<String> = kernel
        .params()
        .into_iter()
        .map(|p| match p.role {
            _ if maps.iter().any(|map| map.param == p.name) => {
                format!("const __grid_constant__ TensorMap {}", p.name)
            }
            Role::Read { dtype, .. } => format!("const {}* __restrict__ {}", c_type(dtype), p.name),
            Role::Write { dtype, .. } => format!("{}* __restrict__ {}", c_type(dtype), p.name),
            Role::Count(_) => format!("unsigned int {}", p.name),
        })
        .collect();
    params.join(", ")
}

/// Removes the blank runs and trailing spaces that template directives leave behind.
fn tidy(text: &str) -> String {
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
