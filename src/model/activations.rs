//! Names of activation functions in config.json files.

use super::error::quoted;
use crate::ops::Activation;

/// Returns the activation with this name in config.json.
pub(super) fn activation(name: &str) -> Option<Activation> {
    ACTIVATIONS
        .iter()
        .find(|(n, _)| *n == name)
        .map(|&(_, kind)| kind)
}

/// Names of activation functions in Hugging Face transformers, with the functions that they denote.
pub(super) const ACTIVATIONS: [(&str, Activation); 10] = [
    ("gelu", Activation::GeluExact),
    ("gelu_python", Activation::GeluExact),
    ("gelu_new", Activation::GeluTanh),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_fast", Activation::GeluTanh),
    ("relu", Activation::Relu),
    ("tanh", Activation::Tanh),
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
    ("quick_gelu", Activation::QuickGelu),
];

/// Returns the help for an unknown activation. Only a different spelling of the same name is suggested: another name, such as
/// `silu` for `gelu`, is a different function.
pub(super) fn other_activations(name: &str) -> String {
    let plain = |name: &str| name.to_lowercase().replace(['_', '-', ' '], "");
    let known = || ACTIVATIONS.iter().map(|&(n, _)| n);
    match known().find(|n| plain(n) == plain(name)) {
        Some(same) => format!("did you mean `{same}`?"),
        None => format!(
            "a different function would change the model; the known ones are {}",
            quoted(&known().collect::<Vec<_>>())
        ),
    }
}
