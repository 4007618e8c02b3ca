//! The Python package of gemmule. Its classes run a model from a checkpoint folder or the Hugging Face hub, and return numpy arrays and
//! strings.
//!
//! `gemmule/__init__.py` defines the public names. `gemmule/__init__.pyi` contains their types and documents their arguments. All
//! computation happens without the GIL.

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

/// Suppresses the messages of panics that the library converts to errors. Python receives these errors as exceptions.
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
