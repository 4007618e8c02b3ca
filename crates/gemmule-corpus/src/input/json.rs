//! Reads the requested members of a JSON object.

use std::{collections::HashMap, fmt};

use serde::{
    Deserializer as _,
    de::{IgnoredAny, MapAccess, Visitor},
};
use serde_json::value::RawValue;

use crate::Keep;

/// The requested members of an object.
#[derive(Debug, Default)]
pub(super) struct Members<'l> {
    /// For each column of texts, the value of the member with the column's name, if the object has it.
    pub texts: Vec<Option<&'l RawValue>>,
    /// Kept members in the order of the object. If a name occurs several times, its last value is used, at the position of the first.
    pub kept: Vec<(String, &'l RawValue)>,
}

/// Chooses the members of an object that are texts or are kept.
pub(super) struct Chooser<'k> {
    pub columns: &'k [String],
    pub keep: &'k Keep,
}

impl Chooser<'_> {
    fn keeps(&self, name: &str) -> bool {
        match self.keep {
            Keep::None => false,
            Keep::All => !self.columns.iter().any(|column| column == name),
            Keep::Named(names) => names.iter().any(|n| n == name),
        }
    }

    /// Parses a line. Returns its requested members, or the reason why the line cannot be used.
    pub fn read<'l>(&self, line: &'l str) -> Result<Members<'l>, String> {
        let mut json = serde_json::Deserializer::from_str(line);
        let members = json.deserialize_map(self).and_then(|members| {
            json.end()?;
            Ok(members)
        });
        members.map_err(|e| match line.trim_start().as_bytes().first() {
            None => "the line is empty; expected a JSON object".to_owned(),
            _ => format!("the line is not a JSON object: {e}"),
        })
    }
}

impl<'l> Visitor<'l> for &Chooser<'_> {
    type Value = Members<'l>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'l>>(self, mut map: A) -> Result<Members<'l>, A::Error> {
        let mut members = Members {
            texts: vec![None; self.columns.len()],
            kept: Vec::new(),
        };
        let mut places = HashMap::new();
        while let Some(name) = map.next_key::<String>()? {
            let text = self.columns.iter().position(|column| *column == name);
            let is_kept = self.keeps(&name);
            if text.is_none() && !is_kept {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let value = map.next_value::<&RawValue>()?;
            if let Some(text) = text {
                members.texts[text] = Some(value);
            }
            if is_kept {
                match places.get(&name) {
                    Some(&place) => {
                        let member: &mut (String, &RawValue) = &mut members.kept[place];
                        member.1 = value;
                    }
                    None => {
                        places.insert(name.clone(), members.kept.len());
                        members.kept.push((name, value));
                    }
                }
            }
        }
        Ok(members)
    }
}

/// Returns the name of a JSON value's type.
pub(super) fn type_name(raw: &str) -> &'static str {
    match raw.as_bytes().first() {
        Some(b'"') => "string",
        Some(b'{') => "object",
        Some(b'[') => "array",
        Some(b't' | b'f') => "boolean",
        Some(b'n') => "null",
        _ => "number",
    }
}
