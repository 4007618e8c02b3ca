//! JSON files of the folder.

use serde_json::{Value as Json, json};

use super::{super::GgufError, Folder};

const MODULES: &str = "modules.json";
const POOLING: &str = "1_Pooling/config.json";
/// Folders of the linear layers after pooling, and the names of their weights.
const DENSE: [(&str, &str); 2] = [
    ("2_Dense", "2_Dense/linear.weight"),
    ("3_Dense", "3_Dense/linear.weight"),
];

impl Folder {
    /// Returns the contents of a JSON file; `None` if the folder has no file of this name.
    ///
    /// The folder has config.json, generation_config.json, tokenizer.json and tokenizer_config.json. If the metadata names a kind of
    /// pooling, the folder also has the files of sentence-transformers. Their last module normalizes embeddings, as llama.cpp does.
    ///
    /// # Errors
    /// Returns an error if metadata is missing, unsupported or damaged.
    pub fn json(&self, name: &str) -> Result<Option<Json>, GgufError> {
        match name {
            "config.json" => Ok(Some(self.config.clone())),
            "generation_config.json" => self.generation_config().map(Some),
            "tokenizer.json" => self.tokenizer().map(Some),
            "tokenizer_config.json" => self.tokenizer_config().map(Some),
            POOLING => self.pooling_config(),
            MODULES => Ok(self.pooling_config()?.map(|_| self.modules())),
            _ => Ok(self.dense_config(name)),
        }
    }

    /// Returns modules.json: the model, the pooling, linear layers if the file has any, and normalization.
    fn modules(&self) -> Json {
        let dense = DENSE.iter().filter(|(_, weight)| self.has(weight));
        let dense = dense.map(|&(folder, _)| (folder, "Dense"));
        let first = [("", "Transformer"), ("1_Pooling", "Pooling")];
        let all = first
            .into_iter()
            .chain(dense)
            .chain([("4_Normalize", "Normalize")]);
        all.map(|(folder, class)| {
            json!({"path": folder, "type": format!("sentence_transformers.models.{class}")})
        })
        .collect()
    }

    /// Returns the settings of a linear layer after pooling.
    fn dense_config(&self, name: &str) -> Option<Json> {
        let folder = name.strip_suffix("/config.json")?;
        let (_, weight) = DENSE.iter().find(|&&(known, _)| known == folder)?;
        let &[out, inner] = self.weight(weight)?.dims.as_slice() else {
            return None;
        };
        Some(json!({
            "in_features": inner,
            "out_features": out,
            "bias": false,
            "activation_function": "torch.nn.modules.linear.Identity",
        }))
    }

    fn has(&self, weight: &str) -> bool {
        self.weight(weight).is_some()
    }
}
