//! Folders of `MultiVectorEncoder` of sentence-transformers 6: late interaction whose settings are in the transformer's file and in the
//! module `MultiVectorMask`. Prefixes of texts are stored as prompts.

use serde_json::Value;

use super::{
    Folder, LateInteraction, LateScore,
    json::Json,
    late::VALUE,
    modules::{Entry, dense, dropout},
    transformer::{LATE_KEYS, MAX_TOKENS},
};
use crate::{model::Module, runtime::weights::ModelFiles, text::TextError};

/// `model_type` of these folders in config_sentence_transformers.json.
const MODEL_TYPE: &str = "MultiVectorEncoder";
/// Class of the module that selects the tokens that take part in scores.
const MASK: &str = "MultiVectorMask";

/// Returns whether a folder is one of `MultiVectorEncoder`.
pub(super) fn is_multi_vector(own: Option<&Json>, listed: &[Entry]) -> bool {
    let named = own.and_then(|own| own.get("model_type"));
    named.is_some_and(|name| name == MODEL_TYPE) || listed.iter().any(|entry| entry.class == MASK)
}

/// Reads the settings for late interaction and the modules after the transformer. `transformer` is the settings file of the transformer.
///
/// # Errors
/// Returns an error if a module or setting is not supported.
pub(super) fn read(
    root: &ModelFiles,
    own: Option<&Json>,
    listed: &[Entry],
    transformer: Option<&Json>,
) -> Result<(LateInteraction, Vec<Module>), TextError> {
    let none = || Json {
        file: root.name("config_sentence_transformers.json"),
        value: Value::Object(Default::default()),
    };
    let (nothing, no_file) = (none(), none());
    let own = own.unwrap_or(&nothing);
    let score = match own.text("similarity_fn_name")? {
        None | Some("maxsim") => LateScore::Sum,
        Some("meanmaxsim") => LateScore::Mean,
        Some(_) => return Err(own.wrong("similarity_fn_name", "maxsim or meanmaxsim")),
    };
    if own.get("truncate_dim").is_some() {
        return Err(own.wrong("truncate_dim", "null for vectors of tokens"));
    }
    let transformer = transformer.unwrap_or(&no_file);
    let mut late = LateInteraction {
        floor: 0,
        skips_unknown: false,
        strips: false,
        has_role_prompts: true,
        score,
        ..LateInteraction::of_lengths([
            length(transformer, LATE_KEYS[0])?.unwrap_or(usize::MAX),
            length(transformer, LATE_KEYS[1])?.unwrap_or(usize::MAX),
        ])
    };
    expansion(transformer, &mut late)?;
    let refused = |problem: String| TextError::Folder {
        file: root.name("modules.json"),
        problem,
    };
    let (mut modules, mut is_scaled, mut has_mask) = (Vec::new(), false, false);
    for entry in &listed[1..] {
        let file = format!("{}/config.json", entry.folder);
        match entry.class.as_str() {
            "Dense" if is_scaled => {
                let problem = "a `Dense` follows `Normalize`; expected vectors that are scaled to length 1 after all others";
                return Err(refused(problem.to_owned()));
            }
            "Dense" => modules.push(dense(
                &Json::read(root, &file)?,
                entry.folder.clone(),
                VALUE,
            )?),
            "Normalize" => {
                let json = Json::read(root, &file)?;
                json.check_keys(&["module_input_name", "module_output_name"])?;
                let key = "module_input_name";
                if json.text(key)? != Some(VALUE) {
                    return Err(json.wrong(key, &format!("`{VALUE}`")));
                }
                if json
                    .text("module_output_name")?
                    .is_some_and(|name| name != VALUE)
                {
                    return Err(json.wrong("module_output_name", &format!("`{VALUE}`")));
                }
                is_scaled = true;
            }
            "Dropout" => dropout(Json::optional(root, &file)?.as_ref())?,
            MASK => {
                has_mask = true;
                mask(&Json::read(root, &file)?, &mut late)?;
            }
            other => {
                return Err(refused(format!(
                    "the module `{other}` is not computed in a model with a vector for each token; gemmule computes Transformer, Dense, Dropout, Normalize and {MASK} there"
                )));
            }
        }
    }
    if !is_scaled {
        let problem = "there is no `Normalize` of `token_embeddings`; expected vectors of length 1";
        return Err(refused(problem.to_owned()));
    }
    if late.expands && !has_mask {
        let problem = format!(
            "queries are padded (`query_expansion`), and there is no {MASK}, with which the padding takes part in scores"
        );
        return Err(refused(problem));
    }
    let hides_expansion = late.hides_expansion();
    modules.push(Module::NormalizeTokens { hides_expansion });
    Ok((late, modules))
}

fn length(json: &Json, key: &str) -> Result<Option<usize>, TextError> {
    Ok(json.count(key, MAX_TOKENS)?.map(|n| n as usize))
}

/// Reads `query_expansion`: the padding of queries.
fn expansion(json: &Json, late: &mut LateInteraction) -> Result<(), TextError> {
    let key = LATE_KEYS[2];
    if json.get(key).is_none() {
        return Ok(());
    }
    let inner = Json {
        file: json.file.clone(),
        value: json.object(key)?.into(),
    };
    let within = |error: TextError| match error {
        TextError::Folder { file, problem } => TextError::Folder {
            file,
            problem: format!("`{key}`: {problem}"),
        },
        other => other,
    };
    let read = || {
        inner.check_keys(&["strategy", "attend", "token", "length"])?;
        let is_fixed = match inner.text("strategy")? {
            Some("fixed") => true,
            Some("min") => false,
            _ => return Err(inner.wrong("strategy", "fixed or min")),
        };
        let floor = inner.needed("length", MAX_TOKENS)? as usize;
        let token = inner.text("token")?.map(str::to_owned);
        Ok((is_fixed, floor, token, inner.flag("attend", false)?))
    };
    let (is_fixed, floor, token, attends) = read().map_err(within)?;
    if late.lengths[0] < floor {
        let expected = format!("at least {floor}, the length to which queries are padded");
        return Err(json.wrong(LATE_KEYS[0], &expected));
    }
    (late.expands, late.attends) = (true, attends);
    (late.floor, late.padding) = (floor, token);
    if is_fixed {
        late.lengths[0] = floor;
    }
    Ok(())
}

/// Reads the file of a `MultiVectorMask`.
fn mask(json: &Json, late: &mut LateInteraction) -> Result<(), TextError> {
    let (words, tasks, kept) = ("skiplist_words", "skiplist_tasks", "keep_only_token_ids");
    json.check_keys(&[words, tasks, kept])?;
    let texts = |key: &str| -> Result<Option<Vec<String>>, TextError> {
        let Some(value) = json.get(key) else {
            return Ok(None);
        };
        let list = value.as_array().map(|list| list.iter());
        let list = list.and_then(|list| list.map(|text| Some(text.as_str()?.to_owned())).collect());
        list.map(Some)
            .ok_or_else(|| json.wrong(key, "a list of texts"))
    };
    late.skipped = texts(words)?.unwrap_or_default();
    if let Some(tasks) = texts(tasks)? {
        late.skips = ["query", "document"].map(|task| tasks.iter().any(|own| own == task));
    }
    if let Some(value) = json.get(kept) {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = value.as_array().map(|list| list.iter().map(id));
        let ids: Option<Vec<u32>> = ids.and_then(Iterator::collect);
        let ids = ids.ok_or_else(|| json.wrong(kept, "a list of token ids"))?;
        // An empty list keeps all tokens.
        late.kept = (!ids.is_empty()).then_some(ids);
    }
    Ok(())
}

impl Folder {
    /// Replaces unset lengths of queries and documents with the max number of tokens of a text.
    pub(super) fn settle_lengths(&mut self) -> Result<(), TextError> {
        let is_open = |late: &LateInteraction| late.lengths.contains(&usize::MAX);
        if !self.late.as_ref().is_some_and(is_open) {
            return Ok(());
        }
        let limit = self.limit(self.inputs().positions)?;
        if let (Some(late), Some(limit)) = (&mut self.late, limit) {
            for length in late.lengths.iter_mut().filter(|n| **n == usize::MAX) {
                *length = limit;
            }
            late.lengths[0] = late.lengths[0].max(late.floor);
        }
        Ok(())
    }
}
