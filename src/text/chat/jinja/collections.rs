//! Lists and dicts.

use std::rc::Rc;

use super::{
    error::Result,
    meter::{Items, Meter},
    value::{Dict, Seq, SeqKind, Value, depth_above},
};

impl SeqKind {
    pub fn type_name(self) -> &'static str {
        match self {
            Self::List => "list",
            Self::Tuple | Self::Group => "tuple",
            Self::Range { .. } => "range",
            Self::Keys => "dict_keys",
            Self::Values => "dict_values",
            Self::Items => "dict_items",
        }
    }

    /// Returns the kind to use in comparisons. Two sequences for which this kind differs are never equal.
    pub fn compared(self) -> Self {
        match self {
            Self::Group => Self::Tuple,
            // Ranges with different bounds or steps get the same kind, because ranges are equal if their elements are equal.
            Self::Range { .. } => Self::Range {
                start: 0,
                stop: 0,
                step: 1,
            },
            other => other,
        }
    }
}

impl Seq {
    pub fn new(kind: SeqKind, items: Items<Value>) -> Result<Self> {
        let depth = depth_above(items.as_slice())?;
        let (items, charge) = items.into_parts();
        Ok(Self {
            kind,
            items,
            depth,
            _charge: charge,
        })
    }

    /// Returns the element at `index`; a negative index counts from the end.
    pub fn at(&self, index: i128) -> Option<&Value> {
        let len = self.items.len() as i128;
        let index = if index < 0 { index + len } else { index };
        usize::try_from(index)
            .ok()
            .and_then(|at| self.items.get(at))
    }
}

impl Dict {
    pub fn get(&self, key: &Value, meter: &Rc<Meter>) -> Result<Option<&Value>> {
        if let Value::Str(key) = key {
            return self.field(key, meter);
        }
        meter.work(1 + self.entries.len())?;
        for (known, value) in &self.entries {
            if known.equals(key, meter)? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }

    /// Returns the value of a string key.
    pub fn field(&self, name: &str, meter: &Rc<Meter>) -> Result<Option<&Value>> {
        let n = self.entries.len();
        meter.work(1 + n / 8 + n.saturating_mul(name.len() / 64))?;
        let is_name = |key: &Value| key.as_text().is_some_and(|key| ***key == *name);
        let mut entries = self.entries.iter();
        Ok(entries
            .find(|(key, _)| is_name(key))
            .map(|(_, value)| value))
    }
}

/// Sets an entry as a Python dict does: if the key exists, its value is replaced and its position is kept.
pub fn insert(
    entries: &mut Vec<(Value, Value)>,
    key: Value,
    value: Value,
    meter: &Rc<Meter>,
) -> Result<()> {
    key.check_key(meter)?;
    for (known, old) in entries.iter_mut() {
        if known.equals(&key, meter)? {
            *old = value;
            return Ok(());
        }
    }
    entries.push((key, value));
    Ok(())
}
