//! Chat templates, which render a conversation as a prompt for the model of a checkpoint.

mod jinja;
mod message;
mod source;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use self::jinja::{Kind, Limits, Template, Variable};
pub use self::{
    jinja::Json,
    message::{ChatOptions, Message, Tool},
};
use super::{TextError, contain::contain};
use crate::runtime::weights::ModelFiles;

/// Limits of one rendering. `bytes` is several times the default maximum size of a request body. A rendering with `steps` steps takes about
/// a second.
const LIMITS: Limits = Limits {
    bytes: 96 << 20,
    steps: 1 << 23,
    depth: 2000,
};
/// Stack size of the thread that parses and renders, sufficient for the maximum depth. Untouched pages take no memory.
const STACK: usize = 64 << 20;
/// Template variables that other parameters set, so `ChatOptions::kwargs` must not contain them.
const RESERVED: [&str; 7] = [
    "messages",
    "conversation",
    "tools",
    "chat_template",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
];
/// Marker that is appended to a final message that the model should continue. The rendered prompt is cut at the marker.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// The chat template of a checkpoint, with its special tokens.
///
/// A template is code that comes with a checkpoint and is not trusted. Memory, work and stack of a rendering are bounded for
/// any template and conversation.
pub struct ChatTemplate {
    /// Template for conversations; `None` if the folder only has a template for conversations with tools.
    default: Option<Template>,
    /// Template for conversations with tools, if the folder has one.
    tool_use: Option<Template>,
    /// Special tokens by their key in tokenizer_config.json, such as `bos_token`.
    tokens: Vec<(String, Json)>,
    /// Template file, for error messages.
    file: PathBuf,
}

impl ChatTemplate {
    /// Loads the template of a checkpoint folder: `chat_template.jinja`, or else `chat_template` in `tokenizer_config.json`. If there are
    /// several named templates, `tool_use` is used for conversations with tools, and `default` for all others. Rendering follows
    /// `apply_chat_template` of the library transformers.
    ///
    /// # Errors
    /// Returns an error if files cannot be read, if the folder has no template, or if the template has invalid syntax.
    pub fn open(folder: &Path) -> Result<Self, TextError> {
        Self::of(&ModelFiles::open(folder)?)
    }

    /// Loads the templates of a model from its files, like [`open`](Self::open).
    ///
    /// # Errors
    /// Returns the errors of [`open`](Self::open).
    pub fn of(files: &ModelFiles) -> Result<Self, TextError> {
        let sources = source::Sources::read(files)?;
        let parse = |source: Option<source::Source>| {
            let Some(source::Source { file, text }) = source else {
                return Ok(None);
            };
            let broken = |problem: String| TextError::ChatTemplate { file, problem };
            match on_own_stack(|| Template::parse(&text)) {
                Ok(Ok(template)) => Ok(Some(template)),
                Ok(Err(error)) => Err(broken(with_line(&error))),
                Err(problem) => Err(broken(problem)),
            }
        };
        Ok(Self {
            default: parse(sources.default)?,
            tool_use: parse(sources.tool_use)?,
            tokens: sources.tokens,
            file: sources.file,
        })
    }

    /// Renders a conversation as a prompt that ends where the model's response begins. Special tokens are part of the text.
    ///
    /// # Errors
    /// Returns an error if the template refuses the conversation, such as for an unknown role, or if rendering exceeds
    /// a limit.
    pub fn render(&self, messages: &[Message]) -> Result<String, TextError> {
        self.render_with(messages, &ChatOptions::default())
    }

    /// Returns whether the template renders the tools that the model may call.
    pub fn takes_tools(&self) -> bool {
        let mut all = self.default.iter().chain(&self.tool_use);
        all.any(|template| template.mentions("tools"))
    }

    /// Renders a conversation with tools and options.
    ///
    /// # Errors
    /// Returns the errors of [`render`](Self::render), and an error if options contradict each other, if `kwargs` contains a variable that
    /// another parameter sets, or if the last message cannot be continued although `options` asks for it.
    pub fn render_with(
        &self,
        messages: &[Message],
        options: &ChatOptions,
    ) -> Result<String, TextError> {
        let ChatOptions {
            tools,
            add_generation_prompt,
            continue_final_message,
            kwargs,
        } = options;
        if let Some((name, _)) = kwargs.iter().find(|(name, _)| RESERVED.contains(&&**name)) {
            return Err(TextError::Conversation {
                param: "chat_template_kwargs",
                problem: format!(
                    "`{name}` is a request parameter, not a variable of the chat template; give it outside of `chat_template_kwargs`"
                ),
            });
        }
        let template = match (&self.tool_use, &self.default) {
            (Some(template), _) if tools.is_some() => template,
            (_, Some(template)) => template,
            (_, None) => {
                return Err(
                    self.broken("it has several templates and none is named `default`".to_owned())
                );
            }
        };
        let mut messages: Vec<Json> = messages.iter().map(Message::to_json).collect();
        let last = match continue_final_message {
            true => Some(self.mark_last(&mut messages, *add_generation_prompt, template)?),
            false => None,
        };
        let tools = tools.as_ref().map_or(Json::Null, |tools| {
            Json::Array(tools.iter().map(|tool| tool.0.clone()).collect())
        });
        let adds = Json::Bool(*add_generation_prompt);
        let own = [
            ("messages", Variable::Messages(&messages)),
            ("tools", Variable::Json(&tools)),
            ("add_generation_prompt", Variable::Json(&adds)),
        ];
        let text = self.rendered(template, &own, kwargs)?;
        match last {
            None => Ok(text),
            Some(last) => cut_after(&last, &text),
        }
    }

    /// Appends [`TAG`] to the final message, and returns the text of that message without the tag.
    fn mark_last(
        &self,
        messages: &mut [Json],
        adds_prompt: bool,
        template: &Template,
    ) -> Result<String, TextError> {
        let wrong = |problem: &str| TextError::Conversation {
            param: "continue_final_message",
            problem: problem.to_owned(),
        };
        if adds_prompt {
            return Err(wrong(
                "`continue_final_message` and `add_generation_prompt` cannot both be true: the first continues the last message, the second begins a new one",
            ));
        }
        if !template.mentions("content") {
            return Err(wrong(
                "`continue_final_message` is true, and the chat template does not read the content of messages",
            ));
        }
        let content = match messages.last_mut() {
            Some(Json::Object(fields)) => fields.iter_mut().find(|(name, _)| name == "content"),
            _ => None,
        };
        match content {
            Some((_, Json::String(text))) => {
                let last = text.clone();
                text.push_str(TAG);
                Ok(last)
            }
            _ => Err(wrong(
                "`continue_final_message` is true, and there is no message to continue",
            )),
        }
    }

    /// Renders messages that are given as JSON. `options` are other variables of the template. By default, there are no tools, and no
    /// generation prompt is added.
    ///
    /// # Errors
    /// Returns the errors of [`render`](Self::render).
    pub(super) fn write(
        &self,
        messages: &[Json],
        options: &[(String, Json)],
    ) -> Result<String, TextError> {
        let template = self.default.as_ref().ok_or_else(|| {
            self.broken("it has several templates and none is named `default`".to_owned())
        })?;
        let (adds, messages) = (Json::Bool(false), Json::Array(messages.to_vec()));
        let usual = [
            ("tools", Variable::Json(&Json::Null)),
            ("add_generation_prompt", Variable::Json(&adds)),
        ];
        let is_own = |name: &str| options.iter().any(|(known, _)| known == name);
        let mut own = vec![("messages", Variable::Json(&messages))];
        own.extend(usual.into_iter().filter(|(name, _)| !is_own(name)));
        self.rendered(template, &own, options)
    }

    /// Renders a template. For equal names, `own` takes precedence over `others`, and `others` over special tokens.
    fn rendered(
        &self,
        template: &Template,
        own: &[(&str, Variable<'_>)],
        others: &[(String, Json)],
    ) -> Result<String, TextError> {
        let named = |(name, value): &'_ (String, Json)| (name.clone(), value.clone());
        let rest: Vec<(String, Json)> = others.iter().chain(&self.tokens).map(named).collect();
        let mut variables = own.to_vec();
        variables.extend(
            rest.iter()
                .map(|(name, value)| (&**name, Variable::Json(value))),
        );
        // The library transformers sets `documents` to `none` if there are none.
        variables.push(("documents", Variable::Json(&Json::Null)));
        let rendered = on_own_stack(|| template.render(&variables, LIMITS));
        let failed = |problem: String| TextError::Conversation {
            param: "messages",
            problem,
        };
        match rendered {
            Ok(Ok(text)) => Ok(text),
            Ok(Err(error)) => Err(failed(match error.kind {
                Kind::Messages => error.message,
                Kind::Refused => format!(
                    "the model's chat template refuses the conversation: {}",
                    error.message
                ),
                Kind::Failed => format!(
                    "the model's chat template cannot render the conversation: {}",
                    with_line(&error)
                ),
                Kind::Limit => format!("the model's chat template: {}", with_line(&error)),
            })),
            Err(problem) => Err(failed(problem)),
        }
    }

    /// Builds an error for this template's file.
    pub(super) fn broken(&self, problem: String) -> TextError {
        TextError::ChatTemplate {
            file: self.file.clone(),
            problem,
        }
    }
}

/// Cuts a rendered text at [`TAG`]. `last` is the final message of the conversation, which the text must contain.
fn cut_after(last: &str, text: &str) -> Result<String, TextError> {
    let mark = TAG.trim_end();
    let found = text.rfind(mark).filter(|_| text.contains(last.trim()));
    let at = found.ok_or_else(|| TextError::Conversation {
        param: "continue_final_message",
        problem: "`continue_final_message` is true, and the chat template does not write the last message unchanged; send a message that it leaves unchanged, or omit the option".to_owned(),
    })?;
    // If the template strips the message, it also strips the space at the end of `TAG`.
    Ok(match text[at..].starts_with(TAG) {
        true => text[..at].to_owned(),
        false => text[..at].trim_end().to_owned(),
    })
}

/// Runs `f` on a thread with a stack for the maximum depth. A panic becomes an error message.
fn on_own_stack<T: Send>(f: impl FnOnce() -> T + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("template".to_owned())
            .stack_size(STACK)
            .spawn_scoped(scope, || contain(f));
        let thread = thread.map_err(|e| format!("no thread for the chat template: {e}"))?;
        thread
            .join()
            .unwrap_or_else(|_| Err("it gave no reason".to_owned()))
            .map_err(|problem| format!("the chat template failed unexpectedly: {problem}"))
    })
}

/// Formats an error with the line of the template.
fn with_line(error: &jinja::Error) -> String {
    match error.line {
        Some(line) => format!("{} (line {line} of the template)", error.message),
        None => error.message.clone(),
    }
}
