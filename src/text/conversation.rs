//! Conversion of texts and pairs to conversations, for models whose folder has messages in `modality_config`. Follows the Transformer of
//! sentence-transformers.

use std::sync::OnceLock;

use super::{ChatTemplate, Folder, Input, Json, TextError};

/// Renders all inputs of a model with its chat template.
pub(super) struct Conversation {
    template: ChatTemplate,
    /// Whether a message's content is a list of parts, one of which is the text.
    has_parts: bool,
    /// Variables that the folder sets for the template.
    options: Vec<(String, Json)>,
    /// `Ok` if the template includes both texts of a pair, otherwise the names of the omitted texts. Checked at the first pair.
    takes_pairs: OnceLock<Result<(), &'static str>>,
}

impl Conversation {
    /// Loads the chat template of a folder; `None` if its model reads plain texts.
    ///
    /// # Errors
    /// Returns an error if the folder uses messages and has no template.
    pub(super) fn of(folder: &Folder) -> Result<Option<Self>, TextError> {
        let Some(messages) = &folder.messages else {
            return Ok(None);
        };
        Ok(Some(Self {
            template: ChatTemplate::of(folder.files())?,
            has_parts: messages.has_parts,
            options: messages
                .options
                .iter()
                .map(|(name, value)| (name.clone(), value.clone().into()))
                .collect(),
            takes_pairs: OnceLock::new(),
        }))
    }

    /// Renders an input, including special tokens. A prompt becomes a system message.
    ///
    /// # Errors
    /// Returns an error if the template refuses an input, or omits a text of a pair.
    pub(super) fn write(&self, input: Input<'_>, prompt: &str) -> Result<String, TextError> {
        if matches!(input, Input::Pair(..)) {
            self.check_pairs()?;
        }
        self.rendered(input, prompt)
    }

    fn rendered(&self, input: Input<'_>, prompt: &str) -> Result<String, TextError> {
        let object = |fields: [(&str, Json); 2]| {
            Json::Object(fields.map(|(name, value)| (name.to_owned(), value)).into())
        };
        let string = |text: &str| Json::String(text.to_owned());
        let message = |role: &str, text: &str| {
            let content = match self.has_parts {
                true => Json::Array(vec![object([
                    ("type", string("text")),
                    ("text", string(text)),
                ])]),
                false => string(text),
            };
            object([("role", string(role)), ("content", content)])
        };
        let system = (!prompt.is_empty()).then(|| message("system", prompt));
        let mut messages: Vec<Json> = system.into_iter().collect();
        match input {
            Input::Text(text) => messages.push(message("user", text)),
            Input::Pair(query, document) => {
                messages.extend([message("query", query), message("document", document)]);
            }
        }
        self.template.write(&messages, &self.options)
    }

    /// Returns an error if the template omits a text of a pair: if changing the query or the document does not change the rendered text.
    fn check_pairs(&self) -> Result<(), TextError> {
        let found = match self.takes_pairs.get() {
            Some(found) => *found,
            None => {
                let of = |query, document| self.rendered(Input::Pair(query, document), "");
                let both = of("alpha", "bravo")?;
                let found = match (
                    of("charlie", "bravo")? == both,
                    of("alpha", "foxtrot")? == both,
                ) {
                    (false, false) => Ok(()),
                    (true, false) => Err("query"),
                    (false, true) => Err("document"),
                    (true, true) => Err("query and document"),
                };
                *self.takes_pairs.get_or_init(|| found)
            }
        };
        found.map_err(|lost| {
            self.template.broken(format!(
                "it leaves out the {lost} of a pair, given as messages with the roles `query` and `document`; use the template that the ranker was published with"
            ))
        })
    }
}
