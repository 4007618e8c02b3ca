//! Chat templates: how a checkpoint wants a conversation written down before it goes on from there.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use minijinja::{
    Environment, Error, ErrorKind, Value, context,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde, ValueKind},
};
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use super::EngineError;
use crate::files::{self, Kind};

/// Steps of a template at most: far more than any published one takes, and few enough that one without end is an error soon.
const FUEL: u64 = 1 << 22;

/// What someone said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Mostly `system`, `user` or `assistant`.
    pub role: String,
    pub content: String,
    /// What else a template may ask of it, such as `tool_calls`.
    pub others: serde_json::Map<String, serde_json::Value>,
}

impl Message {
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
            others: serde_json::Map::new(),
        }
    }
}

/// A tool that a model may call, as a template writes it down: an object, whose fields keep their order.
#[derive(Clone, Debug)]
pub struct Tool(Value);

impl<'de> Deserialize<'de> for Tool {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(from)?;
        match value.kind() {
            ValueKind::Map => Ok(Self(value)),
            other => Err(D::Error::custom(format!(
                "a tool is a {other}; expected an object"
            ))),
        }
    }
}

/// The template of a checkpoint, with the tokens that it may name.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Special tokens by their key in tokenizer_config.json, as `bos_token`.
    tokens: BTreeMap<String, String>,
    /// For messages.
    file: PathBuf,
}

const NAME: &str = "chat";

impl ChatTemplate {
    /// The template of a checkpoint's folder: `chat_template.jinja`, or else `chat_template` in `tokenizer_config.json`, of several the
    /// one called `default`. It is rendered by the rules of transformers' `apply_chat_template`.
    ///
    /// # Errors
    /// Files that cannot be read, a folder without a template, and one that is no Jinja.
    pub fn open(folder: &Path) -> Result<Self, EngineError> {
        let own = folder.join("chat_template.jinja");
        let config = folder.join("tokenizer_config.json");
        let broken = |file: &Path, problem: String| EngineError::ChatTemplate {
            file: file.to_owned(),
            problem,
        };
        let settings = match config.is_file() {
            true => {
                let text = files::text(&config, Kind::Config)?;
                serde_json::from_str(&text)
                    .map_err(|e| broken(&config, format!("it is no JSON: {e}")))?
            }
            false => serde_json::Value::Null,
        };
        let (file, source) = match own.is_file() {
            true => (own.clone(), Some(files::text(&own, Kind::Config)?)),
            false => (config.clone(), template_of(&settings)),
        };
        let source = source.as_deref().map(without_marks).ok_or_else(|| {
            broken(
                folder,
                "it has neither chat_template.jinja nor `chat_template` in tokenizer_config.json; its model was not made for conversations: give it a prompt as it is".to_owned(),
            )
        })?;
        let mut syntax = SyntaxConfig::builder();
        let syntax = syntax.trim_blocks(true).lstrip_blocks(true).build();
        let syntax = syntax.map_err(|e| broken(&file, say(&e)))?;
        let mut environment = Environment::new();
        environment.set_syntax(syntax);
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function(
            "raise_exception",
            |problem: String| -> Result<Value, Error> {
                Err(Error::new(ErrorKind::InvalidOperation, problem))
            },
        );
        environment.add_function("strftime_now", strftime_now);
        environment
            .add_template_owned(NAME, source)
            .map_err(|e| broken(&file, say(&e)))?;
        let tokens = settings.as_object().into_iter().flatten();
        let tokens = tokens.filter_map(|(key, value)| {
            let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
            key.ends_with("_token")
                .then(|| (key.clone(), text.to_owned()))
        });
        Ok(Self {
            tokens: tokens.collect(),
            environment,
            file,
        })
    }

    /// A conversation as the model was taught to read it, up to where it is to go on. Special tokens are part of the text.
    ///
    /// # Errors
    /// What the template refuses, as a role that it does not know.
    pub fn render(&self, messages: &[Message]) -> Result<String, EngineError> {
        self.render_with(messages, &[])
    }

    /// Whether it writes down tools that the model may call.
    pub fn takes_tools(&self) -> bool {
        let template = self.environment.get_template(NAME);
        template.is_ok_and(|template| template.undeclared_variables(false).contains("tools"))
    }

    /// As [`render`](Self::render), with the tools that the model may call.
    ///
    /// # Errors
    /// As `render`.
    pub fn render_with(&self, messages: &[Message], tools: &[Tool]) -> Result<String, EngineError> {
        let messages = messages.iter().map(|message| {
            let Message {
                role,
                content,
                others,
            } = message;
            let others = Value::from(Serde(others));
            context! { role, content, ..others }
        });
        let messages: Vec<Value> = messages.collect();
        let conversation = context! { messages, add_generation_prompt => true };
        let tools: Vec<Value> = tools.iter().map(|tool| tool.0.clone()).collect();
        self.rendered(match tools.is_empty() {
            true => conversation,
            false => context! { tools, ..conversation },
        })
    }

    /// Messages of any form, with other values that the template may ask for. Unless these say so, the conversation does not go on.
    ///
    /// # Errors
    /// As `render`.
    pub(super) fn write(
        &self,
        messages: &[serde_json::Value],
        options: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, EngineError> {
        let messages = Value::from(Serde(messages));
        let options = Value::from(Serde(options));
        let usual = context! { add_generation_prompt => false };
        self.rendered(context! { ..context! { messages }, ..options, ..usual })
    }

    fn rendered(&self, conversation: Value) -> Result<String, EngineError> {
        let broken = |error: Error| self.broken(say(&error));
        let template = self.environment.get_template(NAME).map_err(broken)?;
        let tokens = Value::from(self.tokens.clone());
        // As in transformers, tools are there and `none` where there are none, as documents are, which templates ask for, too.
        let others = context! { tools => (), documents => () };
        template
            .render(context! { ..conversation, ..others, ..tokens })
            .map_err(broken)
    }

    /// An error of this template.
    pub(super) fn broken(&self, problem: String) -> EngineError {
        EngineError::ChatTemplate {
            file: self.file.clone(),
            problem,
        }
    }
}

/// The time here and now as C writes it.
fn strftime_now(format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &jiff::ZonedDateTime::now()).map_err(|e| {
        let problem = format!("strftime_now(\"{format}\"): {e}");
        Error::new(ErrorKind::InvalidOperation, problem)
    })
}

/// A template in which the marks of what the model itself has said, which transformers' training reads, are blocks that say nothing.
fn without_marks(source: &str) -> String {
    let (mut left, mut rest) = (String::with_capacity(source.len()), source);
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        left.push_str(before);
        let end = tag.find("%}").unwrap_or(tag.len());
        let (inner, behind) = tag.split_at(end);
        left.push_str(
            &match inner.trim_matches(|c: char| c.is_whitespace() || "+-".contains(c)) {
                "generation" => inner.replace("generation", "if true"),
                "endgeneration" => inner.replace("endgeneration", "endif"),
                _ => inner.to_owned(),
            },
        );
        rest = behind;
    }
    left.push_str(rest);
    left
}

/// JSON as Python's `json.dumps` writes it, with what transformers take of its options: spaces behind commas and colons, nothing escaped
/// for HTML, fields in their order.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let wrong = |problem: String| Error::new(ErrorKind::BadSerialization, problem);
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let is_ascii: Option<bool> = options.get("ensure_ascii")?;
    let is_sorted: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let separated = match separators.as_deref() {
        None => Separated(", ".to_owned(), ": ".to_owned()),
        Some([item, key]) if indent.is_none() => Separated(item.clone(), key.clone()),
        Some(_) => return Err(wrong("separators are two, and without indent".to_owned())),
    };
    let written = match is_sorted {
        // Maps of serde_json have their keys in order.
        Some(true) => {
            serde_json::to_value(value).and_then(|sorted| written(&sorted, indent, separated))
        }
        _ => written(value, indent, separated),
    };
    let written = written.map_err(|e| wrong(e.to_string()))?;
    let text = String::from_utf8(written).map_err(|e| wrong(e.to_string()))?;
    Ok(Value::from_safe_string(match is_ascii {
        Some(true) => escaped(&text),
        _ => text,
    }))
}

/// What is between items, and behind keys.
struct Separated(String, String);

impl serde_json::ser::Formatter for Separated {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        to: &mut W,
        is_first: bool,
    ) -> std::io::Result<()> {
        to.write_all(if is_first { b"" } else { self.0.as_bytes() })
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        to: &mut W,
        is_first: bool,
    ) -> std::io::Result<()> {
        self.begin_array_value(to, is_first)
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        to: &mut W,
    ) -> std::io::Result<()> {
        to.write_all(self.1.as_bytes())
    }
}

fn written(
    value: &impl Serialize,
    indent: Option<usize>,
    separated: Separated,
) -> serde_json::Result<Vec<u8>> {
    let mut text = Vec::new();
    match indent {
        None => value.serialize(&mut serde_json::Serializer::with_formatter(
            &mut text, separated,
        ))?,
        Some(n) => {
            let spaces = vec![b' '; n.min(16)];
            let pretty = serde_json::ser::PrettyFormatter::with_indent(&spaces);
            value.serialize(&mut serde_json::Serializer::with_formatter(
                &mut text, pretty,
            ))?;
        }
    }
    Ok(text)
}

/// JSON with what is not ASCII as the units of UTF-16.
fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        match c.is_ascii() {
            true => text.push(c),
            false => {
                let units = c.encode_utf16(&mut [0; 2]).to_vec();
                text.extend(units.iter().map(|unit| format!("\\u{unit:04x}")));
            }
        }
    }
    text
}

/// The template in tokenizer_config.json: a text, or several by name.
fn template_of(settings: &serde_json::Value) -> Option<String> {
    match settings.get("chat_template")? {
        serde_json::Value::String(text) => Some(text.clone()),
        serde_json::Value::Array(several) => {
            let is_default = |one: &&serde_json::Value| one["name"] == "default";
            let one = several.iter().find(is_default)?;
            one["template"].as_str().map(str::to_owned)
        }
        _ => None,
    }
}

/// What an error says, with the line of the template.
fn say(error: &Error) -> String {
    let what = error
        .detail()
        .map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{what} (line {line} of the template)"),
        None => what,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    fn conversation() -> Vec<Message> {
        vec![
            Message::new("system", " Be brief. "),
            Message::new("user", "Hello"),
        ]
    }

    /// In the manner of published templates: whitespace control, methods of Python's strings, special tokens, loops.
    const TEMPLATE: &str = "{{- bos_token }}\n{%- for message in messages %}\n    {%- if message['role'] not in ['system', 'user', 'assistant'] %}\n        {{- raise_exception('no role ' + message['role']) }}\n    {%- endif %}\n{{ '<|' + message['role'] + '|>' + message['content'].strip() + eos_token }}\n{% endfor %}\n{% if add_generation_prompt %}\n<|assistant|>\n{% endif %}\n";

    #[test]
    fn a_template_of_either_file_writes_a_conversation_down() {
        let tokens = r#""bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}"#;
        let text = serde_json::to_string(TEMPLATE).unwrap();
        let want = "<s><|system|>Be brief.</s>\n<|user|>Hello</s>\n<|assistant|>\n";
        let one = format!("{{{tokens}, \"chat_template\": {text}}}");
        let several = format!(
            r#"{{{tokens}, "chat_template": [{{"name": "tool_use", "template": "x"}}, {{"name": "default", "template": {text}}}]}}"#
        );
        let beside = format!("{{{tokens}, \"chat_template\": \"not this\"}}");
        for files in [
            vec![("tokenizer_config.json", one.as_str())],
            vec![("tokenizer_config.json", several.as_str())],
            vec![
                ("tokenizer_config.json", beside.as_str()),
                ("chat_template.jinja", TEMPLATE),
            ],
        ] {
            let folder = folder(&files);
            let template = ChatTemplate::open(folder.path()).unwrap();
            assert_eq!(template.render(&conversation()).unwrap(), want);
        }
    }

    #[test]
    fn what_is_wrong_with_a_template_is_said_with_its_line() {
        let problem = |files: &[(&str, &str)]| {
            let folder = folder(files);
            let rendered = ChatTemplate::open(folder.path())
                .and_then(|template| template.render(&[Message::new("robot", "x")]));
            match rendered {
                Err(EngineError::ChatTemplate { problem, .. }) => problem,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(
            problem(&[]),
            "it has neither chat_template.jinja nor `chat_template` in tokenizer_config.json; its model was not made for conversations: give it a prompt as it is"
        );
        assert_eq!(
            problem(&[("chat_template.jinja", TEMPLATE)]),
            "no role robot (line 4 of the template)"
        );
        assert!(problem(&[("chat_template.jinja", "\n{% for %}")]).contains("line 2"));
        let endless =
            "{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}";
        assert!(problem(&[("chat_template.jinja", endless)]).contains("fuel"));
        assert!(problem(&[("tokenizer_config.json", "{")]).starts_with("it is no JSON"));
    }

    #[test]
    fn what_transformers_give_templates_is_there() {
        let rendered = |template: &str| {
            let folder = folder(&[("chat_template.jinja", template)]);
            let template = ChatTemplate::open(folder.path()).unwrap();
            template.render(&[Message::new("user", "é😀")]).unwrap()
        };
        let year = rendered("{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}");
        assert!(year.parse::<u32>().is_ok_and(|year| year > 2024), "{year}");
        let marked = "{% for m in messages %}\n  {%- generation %}\n{{ m.content }}\n  {%- endgeneration -%}\n.{% endfor %}";
        let plain = marked
            .replace("endgeneration", "endif")
            .replace("generation", "if true");
        assert_eq!(rendered(marked), rendered(&plain));
        let message = "{{ {'b': messages[0].content, 'a': [1, 2]}|tojson(";
        for (options, want) in [
            ("", r#"{"b": "é😀", "a": [1, 2]}"#),
            ("ensure_ascii=False", r#"{"b": "é😀", "a": [1, 2]}"#),
            (
                "ensure_ascii=True",
                r#"{"b": "\u00e9\ud83d\ude00", "a": [1, 2]}"#,
            ),
            ("sort_keys=True", r#"{"a": [1, 2], "b": "é😀"}"#),
            ("separators=(',', ':')", r#"{"b":"é😀","a":[1,2]}"#),
        ] {
            assert_eq!(rendered(&format!("{message}{options}) }}}}")), want);
        }
    }

    #[test]
    fn tools_are_written_down_as_python_does_where_the_template_takes_them() {
        let template = "{% if tools is not none and tools is defined %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}\
            {{ tools[0] | tojson(indent=2) }}\n{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}\
            {% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %};{% endfor %}";
        let folder = folder(&[("chat_template.jinja", template)]);
        let chat = ChatTemplate::open(folder.path()).unwrap();
        assert!(chat.takes_tools());
        let tools: Vec<Tool> = serde_json::from_str(
            r#"[{"type": "function", "function": {"name": "weather", "strict": false, "parameters": {"b": [1, 2.5], "a": "<é>"}}}]"#,
        )
        .unwrap();
        let mut messages = conversation();
        let call = serde_json::json!([{"function": {"name": "weather", "arguments": "{}"}}]);
        messages[1].others.insert("tool_calls".to_owned(), call);
        insta::assert_snapshot!(chat.render_with(&messages, &tools).unwrap());
        assert!(!chat.render(&messages).unwrap().contains("parameters"));
        let plain = self::folder(&[("chat_template.jinja", "{{ messages[0].content }}")]);
        assert!(!ChatTemplate::open(plain.path()).unwrap().takes_tools());
        // As Llama's and Mistral's ask.
        for template in [
            "{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools is not none %}{{ tools | length }}{% endif %}",
            "{% if tools is not none and tools | length > 0 %}{{ tools | length }}{% endif %}",
            "{% if tools %}{{ tools | length }}{% endif %}",
        ] {
            let folder = self::folder(&[("chat_template.jinja", template)]);
            let chat = ChatTemplate::open(folder.path()).unwrap();
            assert!(chat.takes_tools(), "{template}");
            assert_eq!(chat.render(&messages).unwrap(), "", "{template}");
            assert_eq!(
                chat.render_with(&messages, &tools).unwrap(),
                "1",
                "{template}"
            );
        }
        let wrong = serde_json::from_str::<Vec<Tool>>("[3]").unwrap_err();
        assert!(
            wrong
                .to_string()
                .contains("a tool is a number; expected an object")
        );
    }
}
