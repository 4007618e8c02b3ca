//! The Python package of gemmule: classes that run a model of a checkpoint folder or of the Hugging Face hub, and return numpy
//! arrays and strings.
//!
//! `gemmule/__init__.py` has the names that users import, and `gemmule/__init__.pyi` their types and documentation of arguments.
//! All computing happens without the GIL.

mod arguments;
mod arrays;
mod command;
mod device_array;
mod dlpack;
mod embedder;
mod engine;
mod error;
mod generator;
mod loading;
mod multi_vector;
mod options;
mod process;
mod requests;
mod reranker;
mod signals;
mod stream;
mod text_model;
mod translator;

use std::panic;

use pyo3::prelude::*;

/// Silences panics that the library turns into errors. They are raised as exceptions.
fn silence_contained_panics() {
    let otherwise = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !gemmule::text::panics_are_contained() {
            otherwise(info);
        }
    }));
}

#[pymodule]
fn _gemmule(module: &Bound<'_, PyModule>) -> PyResult<()> {
    silence_contained_panics();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<device_array::DeviceArray>()?;
    module.add_class::<embedder::Embedder>()?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<generator::Generator>()?;
    module.add_class::<multi_vector::MultiVectorEncoder>()?;
    module.add_class::<reranker::Reranker>()?;
    module.add_class::<stream::TextStream>()?;
    module.add_class::<translator::Translator>()?;
    module.add_function(wrap_pyfunction!(command::_run_command, module)?)
}
