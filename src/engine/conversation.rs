//! Inputs that a model reads as conversations: what sentence-transformers' Transformer does with texts and pairs of texts where the
//! folder's `modality_config` has messages.

use std::sync::OnceLock;

use super::{ChatTemplate, EngineError, Folder, Input, Json};

/// A template that every input is written down by.
pub(super) struct Conversation {
    template: ChatTemplate,
    /// Whether a message's content is a list of parts, of which a text is one, instead of a text.
    has_parts: bool,
    /// Values that the folder gives the template.
    options: Vec<(String, Json)>,
    /// Whether both texts of a pair are in what the template writes, found by the first pair.
    takes_pairs: OnceLock<Result<(), &'static str>>,
}

impl Conversation {
    /// `None` where the folder's model reads texts as they are.
    ///
    /// # Errors
    /// A folder that asks for messages and has no template.
    pub(super) fn of(folder: &Folder) -> Result<Option<Self>, EngineError> {
        let Some(messages) = &folder.messages else {
            return Ok(None);
        };
        Ok(Some(Self {
            template: ChatTemplate::open(folder.trunk())?,
            has_parts: messages.has_parts,
            options: messages
                .options
                .iter()
                .map(|(name, value)| (name.clone(), value.clone().into()))
                .collect(),
            takes_pairs: OnceLock::new(),
        }))
    }

    /// An input as the model reads it, special tokens included. A prompt is what the system says.
    ///
    /// # Errors
    /// What the template refuses, and a pair of which it leaves out a text.
    pub(super) fn write(&self, input: Input<'_>, prompt: &str) -> Result<String, EngineError> {
        if matches!(input, Input::Pair(..)) {
            self.check_pairs()?;
        }
        self.rendered(input, prompt)
    }

    fn rendered(&self, input: Input<'_>, prompt: &str) -> Result<String, EngineError> {
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

    /// Refuses pairs where another query, or another document, would change nothing.
    fn check_pairs(&self) -> Result<(), EngineError> {
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
                "it leaves out the {lost} of a pair, which it is given as messages of the roles `query` and `document`; take the template that the ranker was published with"
            ))
        })
    }
}
