//! Filters of sequences.

use std::rc::Rc;

use super::{
    args::{Args, int_or, is_true_or},
    error::{Error, Result},
    machine::Machine,
    meter::{Builder, Items, Meter},
    show::{escape, sort},
    value::{SeqKind, Value},
};

/// An attribute path; empty without an `attribute` argument.
type Path = Vec<Value>;

impl Machine<'_> {
    pub fn sequence_filter(&mut self, name: &str, value: Value, args: Args) -> Result<Value> {
        let meter = Rc::clone(&self.meter);
        match name {
            "list" => {
                args.none(name)?;
                let seq = value.elements(&meter)?;
                let mut items = Items::new(&meter)?;
                items.extend(seq.items.iter().cloned())?;
                Value::list(items)
            }
            "first" => {
                args.none(name)?;
                let first = match &value {
                    Value::Str(text) => text
                        .chars()
                        .next()
                        .map(|c| Value::text(&meter, c.encode_utf8(&mut [0; 4]))),
                    other => other.elements(&meter)?.items.first().cloned().map(Ok),
                };
                first.unwrap_or_else(|| {
                    Value::undefined(&meter, "No first item, sequence was empty.")
                })
            }
            "last" => {
                args.none(name)?;
                if let Value::Iter(_) = &value {
                    return Err(Error::failed("'generator' object is not reversible"));
                }
                let last = value.elements(&meter)?.items.last().cloned();
                last.map_or_else(
                    || Value::undefined(&meter, "No last item, sequence was empty."),
                    Ok,
                )
            }
            "join" => self.join(&value, args),
            "reverse" => {
                args.none(name)?;
                if let Value::Str(text) = &value {
                    let mut builder = Builder::new(&meter)?;
                    text.chars().rev().try_for_each(|c| builder.push(c))?;
                    return Ok(Value::built(builder));
                }
                let mut items = Items::new(&meter)?;
                items.extend(value.elements(&meter)?.items.iter().rev().cloned())?;
                Value::iter(items)
            }
            "map" => self.map(&value, args),
            "select" | "reject" => self.select(&value, args, name == "select", false),
            "selectattr" | "rejectattr" => self.select(&value, args, name == "selectattr", true),
            "sort" => {
                let names = ["reverse", "case_sensitive", "attribute"];
                let [reverse, is_case_sensitive, attribute] = args.bind(name, names, 0)?;
                let paths = paths(attribute, true, &meter)?;
                let items = value.elements(&meter)?;
                let sorted = self.sorted(
                    &items.items,
                    &paths,
                    is_true_or(is_case_sensitive.as_ref(), false),
                    is_true_or(reverse.as_ref(), false),
                )?;
                list(sorted, &meter)
            }
            "min" | "max" => {
                let [is_case_sensitive, attribute] =
                    args.bind(name, ["case_sensitive", "attribute"], 0)?;
                let paths = paths(attribute, false, &meter)?;
                let is_case_sensitive = is_true_or(is_case_sensitive.as_ref(), false);
                let mut best: Option<(Value, Value)> = None;
                for item in &value.elements(&meter)?.items {
                    let key = self.sort_key(item, &paths, is_case_sensitive)?;
                    let is_better = match &best {
                        None => true,
                        Some((_, old)) if name == "min" => key.is_less(old, &meter)?,
                        Some((_, old)) => old.is_less(&key, &meter)?,
                    };
                    if is_better {
                        best = Some((item.clone(), key));
                    }
                }
                best.map_or_else(
                    || Value::undefined(&meter, "No aggregated item, sequence was empty."),
                    |(item, _)| Ok(item),
                )
            }
            "sum" => {
                let [attribute, start] = args.bind(name, ["attribute", "start"], 0)?;
                let paths = paths(attribute, false, &meter)?;
                let mut sum = start.unwrap_or(Value::Int(0));
                if sum.as_text().is_some() {
                    return Err(Error::failed("sum() can't sum strings; use `join`"));
                }
                for item in &value.elements(&meter)?.items {
                    let item = self.along(item, paths.first().map_or(&[], |path| path), None)?;
                    sum = self.binary(super::ast::Operator::Add, &sum, &item)?;
                }
                Ok(sum)
            }
            "unique" => {
                let [is_case_sensitive, attribute] =
                    args.bind(name, ["case_sensitive", "attribute"], 0)?;
                let paths = paths(attribute, false, &meter)?;
                let is_case_sensitive = is_true_or(is_case_sensitive.as_ref(), false);
                let (mut keys, mut kept) = (Items::new(&meter)?, Items::new(&meter)?);
                for item in &value.elements(&meter)?.items {
                    let key = self.sort_key(item, &paths, is_case_sensitive)?;
                    key.check_key(&meter)?;
                    if !any_equals(keys.as_slice(), &key, &meter)? {
                        keys.push(key)?;
                        kept.push(item.clone())?;
                    }
                }
                Value::iter(kept)
            }
            "groupby" => self.group_by(&value, args),
            "dictsort" => self.dict_sort(&value, args),
            "batch" | "slice" => self.chunks(name, &value, args),
            other => Err(Error::failed(format!("No filter named '{other}'."))),
        }
    }

    fn join(&mut self, value: &Value, args: Args) -> Result<Value> {
        let meter = Rc::clone(&self.meter);
        let [separator, attribute] = args.bind("join", ["d", "attribute"], 0)?;
        let separator = match separator {
            Some(separator) => separator.to_text(&meter)?,
            None => Value::text(&meter, "")?.to_text(&meter)?,
        };
        let paths = paths(attribute, false, &meter)?;
        let items = value.elements(&meter)?;
        let mut parts = Items::new(&meter)?;
        for item in &items.items {
            let item = self.along(item, paths.first().map_or(&[], |path| path), None)?;
            parts.push(Value::Str(item.to_text(&meter)?))?;
        }
        let is_markup = |value: &Value| value.as_text().is_some_and(|text| text.is_markup);
        // Without autoescape, jinja2 treats markup among the items as plain text.
        let mut builder = Builder::new(&meter)?;
        for (at, part) in parts.as_slice().iter().enumerate() {
            if at > 0 {
                builder.push_str(&separator)?;
            }
            part.write(&mut builder, &meter)?;
        }
        match separator.is_markup && !parts.as_slice().iter().all(is_markup) {
            false => Ok(Value::built(builder)),
            // If the separator is markup, the items are escaped.
            true => {
                let mut escaped = Builder::new(&meter)?;
                for (at, part) in parts.as_slice().iter().enumerate() {
                    if at > 0 {
                        escaped.push_str(&separator)?;
                    }
                    match part.as_text() {
                        Some(text) if !text.is_markup => escape(text, &mut escaped)?,
                        _ => part.write(&mut escaped, &meter)?,
                    }
                }
                Ok(Value::markup(escaped))
            }
        }
    }

    fn map(&mut self, value: &Value, mut args: Args) -> Result<Value> {
        let meter = Rc::clone(&self.meter);
        let items = value.elements(&meter)?;
        let mut mapped = Items::new(&meter)?;
        if args.positional.as_slice().is_empty() {
            let [attribute, default] = args.bind("map", ["attribute", "default"], 0)?;
            if attribute.is_none() {
                return Err(Error::failed("map requires a filter argument"));
            }
            let paths = paths(attribute, false, &meter)?;
            let default = default.filter(|default| !matches!(default, Value::None));
            for item in &items.items {
                let path: &[Value] = paths.first().map_or(&[], |path| path);
                let found = self.along(item, path, default.as_ref())?;
                mapped.push(found)?;
            }
            return Value::iter(mapped);
        }
        let name = args.positional.as_mut().remove(0).to_text(&meter)?;
        for item in &items.items {
            let args = args.copy(&meter)?;
            let value = self.filter(&name, item.clone(), args)?;
            mapped.push(value)?;
        }
        Value::iter(mapped)
    }

    /// Implements `select`, `reject`, `selectattr` and `rejectattr`.
    fn select(
        &mut self,
        value: &Value,
        mut args: Args,
        keeps: bool,
        has_attribute: bool,
    ) -> Result<Value> {
        let meter = Rc::clone(&self.meter);
        let items = value.elements(&meter)?;
        let mut path = Path::new();
        if has_attribute {
            if args.positional.as_slice().is_empty() {
                return Err(Error::failed("Missing parameter for attribute name"));
            }
            let attribute = args.positional.as_mut().remove(0);
            path = paths(Some(attribute), false, &meter)?
                .pop()
                .unwrap_or_default();
        }
        let test = match args.positional.as_slice().is_empty() {
            true => None,
            false => Some(args.positional.as_mut().remove(0).to_text(&meter)?),
        };
        let mut kept = Items::new(&meter)?;
        for item in &items.items {
            let tested = self.along(item, &path, None)?;
            let is_true = match &test {
                None => tested.is_true(),
                Some(test) => {
                    let args = args.copy(&meter)?;
                    self.test(test, &tested, args)?
                }
            };
            if is_true == keeps {
                kept.push(item.clone())?;
            }
        }
        Value::iter(kept)
    }

    /// Follows a path of attributes and indices from `item`, and returns the value at its end. If `default` is given, it replaces each
    /// undefined value on the path.
    fn along(&mut self, item: &Value, path: &[Value], default: Option<&Value>) -> Result<Value> {
        let mut value = item.clone();
        for part in path {
            value = self.item(&value, part)?;
            if let (Value::Undefined(_), Some(default)) = (&value, default) {
                value = default.clone();
            }
        }
        Ok(value)
    }

    /// Returns the sort key of an element.
    fn sort_key(&mut self, item: &Value, paths: &[Path], is_case_sensitive: bool) -> Result<Value> {
        let meter = Rc::clone(&self.meter);
        let folded = |value: Value| match &value {
            Value::Str(text) if !is_case_sensitive => {
                meter.scan(text.len())?;
                Value::text(&meter, &text.to_lowercase())
            }
            _ => Ok(value),
        };
        match paths {
            [] => folded(item.clone()),
            [path] => folded(self.along(item, path, None)?),
            several => {
                let mut keys = Items::new(&meter)?;
                for path in several {
                    let key = self.along(item, path, None)?;
                    keys.push(folded(key)?)?;
                }
                Value::list(keys)
            }
        }
    }

    fn sorted(
        &mut self,
        items: &[Value],
        paths: &[Path],
        is_case_sensitive: bool,
        is_reversed: bool,
    ) -> Result<Vec<Value>> {
        let meter = Rc::clone(&self.meter);
        let _charge = meter.hold(items.len() * 3 * size_of::<(Value, Value)>())?;
        let mut keyed = Vec::with_capacity(items.len());
        for item in items {
            keyed.push((self.sort_key(item, paths, is_case_sensitive)?, item.clone()));
        }
        let sorted = sort(
            keyed,
            &mut |a: &(Value, Value), b: &(Value, Value)| match is_reversed {
                false => a.0.is_less(&b.0, &meter),
                true => b.0.is_less(&a.0, &meter),
            },
        )?;
        Ok(sorted.into_iter().map(|(_, item)| item).collect())
    }

    fn group_by(&mut self, value: &Value, args: Args) -> Result<Value> {
        let meter = Rc::clone(&self.meter);
        let names = ["attribute", "default", "case_sensitive"];
        let [attribute, default, is_case_sensitive] = args.bind("groupby", names, 1)?;
        let is_case_sensitive = is_true_or(is_case_sensitive.as_ref(), false);
        let path = paths(attribute, false, &meter)?.pop().unwrap_or_default();
        let items = value.elements(&meter)?;
        let mut keyed = Items::new(&meter)?;
        for item in &items.items {
            let key = self.along(item, &path, default.as_ref())?;
            keyed.push(Value::pair(&meter, key, item.clone())?)?;
        }
        let sorted = self.sorted(
            keyed.as_slice(),
            &[vec![Value::Int(0)]],
            is_case_sensitive,
            false,
        )?;
        let mut groups = Items::new(&meter)?;
        let mut open: Option<(Value, Value, Items<Value>)> = None;
        let close =
            |open: Option<(Value, Value, Items<Value>)>, groups: &mut Items<Value>| match open {
                None => Ok(()),
                Some((_, name, members)) => {
                    let mut group = Items::new(&meter)?;
                    group.extend([name, Value::list(members)?])?;
                    groups.push(Value::seq(SeqKind::Group, group)?)
                }
            };
        for pair in sorted {
            let name = self.item(&pair, &Value::Int(0))?;
            let member = self.item(&pair, &Value::Int(1))?;
            let key = self.sort_key(&name, &[], is_case_sensitive)?;
            let is_same = match &open {
                Some((last, ..)) => last.equals(&key, &meter)?,
                None => false,
            };
            if !is_same {
                close(open.take(), &mut groups)?;
                open = Some((key, name, Items::new(&meter)?));
            }
            if let Some((.., members)) = &mut open {
                members.push(member)?;
            }
        }
        close(open, &mut groups)?;
        Value::list(groups)
    }

    fn dict_sort(&mut self, value: &Value, args: Args) -> Result<Value> {
        let meter = Rc::clone(&self.meter);
        let names = ["case_sensitive", "by", "reverse"];
        let [is_case_sensitive, by, reverse] = args.bind("dictsort", names, 0)?;
        let by = match by.as_ref().and_then(Value::as_text).map(|by| &***by) {
            None | Some("key") => 0,
            Some("value") => 1,
            Some(_) => {
                return Err(Error::failed(
                    "You can only sort by either \"key\" or \"value\"",
                ));
            }
        };
        let Value::Dict(dict) = value.defined()? else {
            return Err(Error::failed(format!(
                "'{}' object has no attribute 'items'",
                value.type_name()
            )));
        };
        let mut pairs = Items::new(&meter)?;
        for (key, value) in &dict.entries {
            pairs.push(Value::pair(&meter, key.clone(), value.clone())?)?;
        }
        let sorted = self.sorted(
            pairs.as_slice(),
            &[vec![Value::Int(by)]],
            is_true_or(is_case_sensitive.as_ref(), false),
            is_true_or(reverse.as_ref(), false),
        )?;
        list(sorted, &meter)
    }

    /// Implements `batch`, which makes lists of `n` elements, and `slice`, which makes `n` lists.
    fn chunks(&mut self, name: &str, value: &Value, args: Args) -> Result<Value> {
        let meter = Rc::clone(&self.meter);
        let [n, fill] = args.bind(name, ["n", "fill_with"], 1)?;
        let n = usize::try_from(int_or(n.as_ref(), "n", 1)?).unwrap_or(0);
        if n == 0 {
            return Err(Error::failed(format!("`{name}` needs a number above 0")));
        }
        let fill = fill.filter(|fill| !matches!(fill, Value::None));
        let items = value.elements(&meter)?;
        let mut chunks = Items::new(&meter)?;
        if name == "batch" {
            for chunk in items.items.chunks(n) {
                let mut list = Items::new(&meter)?;
                list.extend(chunk.iter().cloned())?;
                for _ in chunk.len()..n {
                    let Some(fill) = &fill else { break };
                    list.push(fill.clone())?;
                }
                chunks.push(Value::list(list)?)?;
            }
            return Value::iter(chunks);
        }
        let (each, longer) = (items.items.len() / n, items.items.len() % n);
        let mut rest = items.items.iter();
        for nth in 0..n {
            let mut list = Items::new(&meter)?;
            let own = each + usize::from(nth < longer);
            list.extend(rest.by_ref().take(own).cloned())?;
            if let (Some(fill), true) = (&fill, nth >= longer) {
                list.push(fill.clone())?;
            }
            chunks.push(Value::list(list)?)?;
        }
        Value::iter(chunks)
    }
}

fn list(values: Vec<Value>, meter: &Rc<Meter>) -> Result<Value> {
    let mut items = Items::new(meter)?;
    items.extend(values)?;
    Value::list(items)
}

pub fn any_equals(all: &[Value], value: &Value, meter: &Rc<Meter>) -> Result<bool> {
    for one in all {
        if one.equals(value, meter)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Parses the paths of an `attribute` argument, such as `function.name`. If `is_multiple`, commas separate several paths.
fn paths(attribute: Option<Value>, is_multiple: bool, meter: &Rc<Meter>) -> Result<Vec<Path>> {
    let text = match attribute {
        None | Some(Value::None) => return Ok(Vec::new()),
        Some(Value::Str(text)) => text,
        Some(other) => return Ok(vec![vec![other]]),
    };
    meter.scan(text.len())?;
    let one = |path: &str| {
        let parts = path.split('.').map(|part| match part.parse::<u32>() {
            Ok(index) => Ok(Value::Int(index.into())),
            Err(_) => Value::text(meter, part),
        });
        parts.collect::<Result<Path>>()
    };
    match is_multiple {
        true => text.split(',').map(one).collect(),
        false => Ok(vec![one(&text)?]),
    }
}
