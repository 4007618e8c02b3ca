//! Prompts of a folder: texts that are put before inputs.

use serde_json::Value;

use super::{Folder, json::Json};
use crate::{
    names::{excerpt, nearest},
    text::TextError,
};

/// Choice of the text that is put before an input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prompt<'a> {
    /// The folder's default prompt, or none if it has no default.
    #[default]
    Default,
    /// The folder's prompt with this name. `query` and `document` always exist, but may be empty.
    Named(&'a str),
    /// The given text.
    Text(&'a str),
}

/// Returns the error for an unknown prompt name.
fn no_prompt(name: &str, known: &[&str]) -> TextError {
    TextError::NoPrompt {
        name: excerpt(name).into_owned(),
        near: nearest(name, known.iter().copied()).map(str::to_owned),
        known: match known {
            [] => "no prompts".to_owned(),
            known => known.join(", "),
        },
    }
}

impl Folder {
    /// Returns the text of the chosen prompt.
    ///
    /// # Errors
    /// Returns an error if the name is unknown, or if it is the name of a task whose Router route is not the loaded one.
    pub fn prompt<'s>(&'s self, choice: Prompt<'s>) -> Result<&'s str, TextError> {
        let name = match choice {
            Prompt::Text(text) => return Ok(text),
            Prompt::Named(name) => Some(name),
            Prompt::Default => match &self.default_text {
                Some(text) => return Ok(text),
                None => self.default_prompt.as_deref(),
            },
        };
        let Some(name) = name else {
            return Ok("");
        };
        if let Some(route) = &self.route
            && choice != Prompt::Default
            && let Some(other) = route.of_task(name)
            && other != route.name
        {
            return Err(TextError::OtherRoute {
                folder: self.root.path().to_owned(),
                name: excerpt(name).into_owned(),
                route: other.to_owned(),
                loaded: route.name.clone(),
            });
        }
        match self.prompts.iter().find(|(n, _)| n == name) {
            Some((_, text)) => Ok(text),
            None => {
                let known = self.prompts.iter().map(|(n, _)| n.as_str());
                let mut known: Vec<&str> = known.collect();
                known.sort_unstable();
                Err(no_prompt(name, &known))
            }
        }
    }

    /// Returns the folder with another default prompt. A prompt name must be defined in a file of the folder.
    ///
    /// # Errors
    /// Returns the errors of [`prompt`](Self::prompt).
    pub fn with_default_prompt(mut self, choice: Prompt<'_>) -> Result<Self, TextError> {
        if let Prompt::Named(name) = choice
            && self.prompt_index(&[name]).is_none()
        {
            return Err(no_prompt(name, &self.prompt_names()));
        }
        self.default_text = Some(self.prompt(choice)?.to_owned());
        Ok(self)
    }

    /// Returns the index of the first of `names` that a file of the folder defines as a prompt.
    pub fn prompt_index(&self, names: &[&str]) -> Option<usize> {
        let own = |name: &&str| {
            let at = self.prompts.iter().position(|(n, _)| n == name)?;
            (at >= self.n_implicit_prompts).then_some(at)
        };
        names.iter().find_map(own)
    }

    /// Returns the name of the prompt at this index.
    pub fn prompt_name(&self, index: usize) -> Option<&str> {
        self.prompts.get(index).map(|(name, _)| name.as_str())
    }

    /// Returns the names of the prompts that a file of the folder defines, sorted.
    pub fn prompt_names(&self) -> Vec<&str> {
        let own = self.prompts.iter().skip(self.n_implicit_prompts);
        let mut names: Vec<&str> = own.map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        names
    }

    /// Returns whether texts are converted to messages of a conversation.
    pub fn has_messages(&self) -> bool {
        self.messages.is_some()
    }

    /// Returns whether pooling leaves out the tokens of a prompt. In a conversation, the prompt is a message, which is pooled.
    pub(in crate::text) fn leaves_out_prompts(&self) -> bool {
        !self.pools_prompt && self.messages.is_none()
    }

    pub(super) fn read_prompts(&mut self, own: Option<&Json>) -> Result<(), TextError> {
        // Every folder has the prompts `query` and `document`, which are empty unless a file defines them.
        self.prompts = ["query", "document"]
            .map(|name| (name.to_owned(), String::new()))
            .into();
        self.n_implicit_prompts = self.prompts.len();
        let Some(own) = own else { return Ok(()) };
        let prompts = match own.get("prompts") {
            None => Vec::new(),
            Some(Value::Object(prompts)) => prompts.iter().collect(),
            Some(_) => return Err(own.wrong("prompts", "texts by name")),
        };
        let n_own = prompts.len();
        for (name, text) in prompts {
            let text = text.as_str();
            let text =
                text.ok_or_else(|| own.problem(format!("the prompt `{name}` is not a string")))?;
            self.prompts.retain(|(n, _)| n != name);
            self.prompts.push((name.clone(), text.to_owned()));
        }
        self.n_implicit_prompts = self.prompts.len() - n_own;
        self.default_prompt = own.text("default_prompt_name")?.map(str::to_owned);
        let known = |name: &String| self.prompts.iter().any(|(n, _)| n == name);
        match &self.default_prompt {
            Some(name) if !known(name) => Err(own.problem(format!(
                "`default_prompt_name` is `{name}`, and there is no such prompt"
            ))),
            _ => Ok(()),
        }
    }
}
