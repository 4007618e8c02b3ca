//! Arguments of calls, filters and tests.

use std::rc::Rc;

use super::{
    error::{Error, Result},
    meter::{Charge, Items, Meter},
    value::Value,
};

/// Evaluated arguments.
pub struct Args {
    pub positional: Items<Value>,
    pub named: Vec<(String, Value)>,
    /// Memory charge for the named arguments.
    charge: Charge,
}

impl Args {
    pub fn new(meter: &Rc<Meter>) -> Result<Self> {
        Ok(Self {
            positional: Items::new(meter)?,
            named: Vec::new(),
            charge: meter.hold(0)?,
        })
    }

    /// Returns a copy of the arguments.
    pub fn copy(&self, meter: &Rc<Meter>) -> Result<Self> {
        let mut copy = Self::new(meter)?;
        copy.positional
            .extend(self.positional.as_slice().iter().cloned())?;
        for (name, value) in &self.named {
            copy.name(name, value.clone())?;
        }
        Ok(copy)
    }

    /// Adds a named argument.
    pub fn name(&mut self, name: &str, value: Value) -> Result<()> {
        if self.named.iter().any(|(known, _)| known == name) {
            return Err(Error::failed(format!(
                "got multiple values for keyword argument '{name}'"
            )));
        }
        let meter = self.charge.meter();
        meter.work(1 + self.named.len() / 4)?;
        meter.scan(name.len())?;
        self.charge
            .grow(2 * size_of::<(String, Value)>() + name.len())?;
        self.named.push((name.to_owned(), value));
        Ok(())
    }

    /// Assigns the arguments to the parameters `names`. The first `required` parameters must have
    /// an argument.
    pub fn bind<const N: usize>(
        self,
        callee: &str,
        names: [&str; N],
        required: usize,
    ) -> Result<[Option<Value>; N]> {
        let (positional, _charge) = self.positional.into_parts();
        if positional.len() > N {
            return Err(Error::failed(format!(
                "{callee} takes at most {N} arguments, and {} were given",
                positional.len()
            )));
        }
        let mut bound = [const { None }; N];
        for (place, value) in bound.iter_mut().zip(positional) {
            *place = Some(value);
        }
        for (name, value) in self.named {
            match names.iter().position(|known| *known == name) {
                Some(at) if bound[at].is_none() => bound[at] = Some(value),
                Some(_) => {
                    return Err(Error::failed(format!(
                        "{callee} got multiple values for argument '{name}'"
                    )));
                }
                None => {
                    return Err(Error::failed(format!(
                        "{callee} got an unexpected keyword argument '{name}'"
                    )));
                }
            }
        }
        let missing = bound.iter().take(required).position(Option::is_none);
        match missing {
            None => Ok(bound),
            Some(at) => Err(Error::failed(format!(
                "{callee} needs the argument '{}'",
                names[at]
            ))),
        }
    }

    /// Returns an error if there is any argument.
    pub fn none(self, callee: &str) -> Result<()> {
        self.bind(callee, [], 0).map(|[]| ())
    }

    /// Returns the named arguments as a dict.
    pub fn named_dict(self, meter: &Rc<Meter>) -> Result<Value> {
        let mut entries = Vec::new();
        for (name, value) in self.named {
            entries.push((Value::text(meter, &name)?, value));
        }
        Value::dict(meter, entries)
    }
}

/// Returns an integer argument, or `default` if the argument is missing.
pub fn int_or(value: Option<&Value>, name: &str, default: i128) -> Result<i128> {
    match value {
        None => Ok(default),
        Some(value) => value.defined()?.int().ok_or_else(|| {
            Error::failed(format!(
                "`{name}` is '{}'; expected a whole number",
                value.type_name()
            ))
        }),
    }
}

/// Returns whether an argument is true, or `default` if the argument is missing.
pub fn is_true_or(value: Option<&Value>, default: bool) -> bool {
    value.map_or(default, Value::is_true)
}
