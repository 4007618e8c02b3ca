//! Executes the statements of a template.

use std::{borrow::Cow, cell::Cell, rc::Rc};

use super::{
    args::Args,
    ast::{self, ExprKind, Filter, For, Node, NodeKind, Target},
    error::{Error, Result},
    meter::{Builder, Charge, Items, Meter},
    value::{LoopState, MacroRef, Seq, SeqKind, Text, Value},
};

/// State of a rendering.
pub struct Machine<'t> {
    pub meter: Rc<Meter>,
    template: &'t ast::Template,
    scopes: Vec<Scope<'t>>,
    /// Indices of scopes that can be reused.
    free: Vec<usize>,
    scope: usize,
    next_id: u64,
    out: Builder,
    /// Namespaces, cyclers and joiners are the only mutable objects. Values refer to them by index, so no value can contain itself.
    pub namespaces: Vec<Namespace>,
    pub cyclers: Vec<(Rc<Seq>, usize)>,
    pub joiners: Vec<(Rc<Text>, bool)>,
    /// Memory charges for `cyclers` and `joiners`.
    pub kept: Vec<Items<Value>>,
    loops: Vec<LoopFrame<'t>>,
}

/// Variables of a block.
struct Scope<'t> {
    id: u64,
    parent: Option<usize>,
    names: Vec<(Cow<'t, str>, Value)>,
}

pub struct Namespace {
    pub entries: Vec<(Value, Value)>,
    pub charge: Charge,
}

struct LoopFrame<'t> {
    id: u64,
    of: &'t For,
    scope: usize,
    depth: usize,
    /// The last arguments of `loop.changed`.
    changed: Option<Value>,
}

/// Effect of a statement on the enclosing loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    Next,
    Break,
    Continue,
}

impl<'t> Machine<'t> {
    pub fn new(
        meter: &Rc<Meter>,
        template: &'t ast::Template,
        variables: Vec<(String, Value)>,
    ) -> Result<Self> {
        let names = variables.into_iter();
        Ok(Self {
            meter: Rc::clone(meter),
            template,
            scopes: vec![Scope {
                id: 0,
                parent: None,
                names: names
                    .map(|(name, value)| (Cow::Owned(name), value))
                    .collect(),
            }],
            free: Vec::new(),
            scope: 0,
            next_id: 1,
            out: Builder::new(meter)?,
            namespaces: Vec::new(),
            cyclers: Vec::new(),
            joiners: Vec::new(),
            kept: Vec::new(),
            loops: Vec::new(),
        })
    }

    pub fn run(mut self) -> Result<String> {
        self.nodes(&self.template.body)?;
        Ok(self.out.into_parts().0)
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Runs `f` in a new scope with the parent scope `parent`.
    fn scoped<T>(&mut self, parent: usize, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let _level = self.meter.enter()?;
        let id = self.new_id();
        let scope = Scope {
            id,
            parent: Some(parent),
            names: Vec::new(),
        };
        let place = match self.free.pop() {
            Some(place) => {
                self.scopes[place] = scope;
                place
            }
            None => {
                self.scopes.push(scope);
                self.scopes.len() - 1
            }
        };
        let before = std::mem::replace(&mut self.scope, place);
        let result = f(self);
        self.scope = before;
        self.scopes[place].id = 0;
        self.scopes[place].names.clear();
        self.free.push(place);
        result
    }

    /// Returns the text that `f` writes.
    fn captured<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<Value> {
        let inner = Builder::new(&self.meter)?;
        let outer = std::mem::replace(&mut self.out, inner);
        let result = f(self);
        let inner = std::mem::replace(&mut self.out, outer);
        result.map(|_| Value::built(inner))
    }

    /// Returns the value of a variable.
    pub fn variable(&self, name: &str) -> Result<Option<Value>> {
        let mut scope = Some(self.scope);
        while let Some(place) = scope {
            let Scope { names, parent, .. } = &self.scopes[place];
            self.meter.work(1 + names.len() / 16)?;
            if let Some((_, value)) = names.iter().find(|(known, _)| known == name) {
                return Ok(Some(value.clone()));
            }
            scope = *parent;
        }
        Ok(None)
    }

    fn set_variable(&mut self, name: &'t str, value: Value) {
        let names = &mut self.scopes[self.scope].names;
        match names.iter_mut().find(|(known, _)| known == name) {
            Some((_, old)) => *old = value,
            None => names.push((Cow::Borrowed(name), value)),
        }
    }

    fn assign(&mut self, target: &'t Target, value: Value) -> Result<()> {
        match target {
            Target::Name(name) => self.set_variable(name, value),
            Target::Attribute(name, attribute) => match self.variable(name)? {
                Some(Value::Namespace(place)) => {
                    let name = Value::text(&self.meter, attribute)?;
                    self.set_attribute(place, name, value)?;
                }
                _ => {
                    return Err(Error::failed(
                        "cannot assign attribute on non-namespace object",
                    ));
                }
            },
            Target::Tuple(targets) => {
                let seq = value.elements(&self.meter)?;
                let (found, expected) = (seq.items.len(), targets.len());
                if found > expected {
                    return Err(Error::failed(format!(
                        "too many values to unpack (expected {expected}, got {found})"
                    )));
                }
                if found < expected {
                    return Err(Error::failed(format!(
                        "not enough values to unpack (expected {expected}, got {found})"
                    )));
                }
                for (target, value) in targets.iter().zip(&seq.items) {
                    self.assign(target, value.clone())?;
                }
            }
        }
        Ok(())
    }

    /// Sets an attribute of a namespace.
    pub fn set_attribute(&mut self, place: usize, name: Value, value: Value) -> Result<()> {
        if name.as_text().is_some_and(|name| name.starts_with('_')) {
            return Err(Error::failed(
                "chat templates cannot store attributes on a namespace that begin with an underscore",
            ));
        }
        let Namespace { entries, charge } = &mut self.namespaces[place];
        let before = entries.len();
        super::collections::insert(entries, name, value, &self.meter)?;
        if entries.len() > before {
            charge.grow(2 * size_of::<(Value, Value)>())?;
        }
        Ok(())
    }

    fn nodes(&mut self, nodes: &'t [Node]) -> Result<Flow> {
        for node in nodes {
            match self.node(node).map_err(|error| error.at(node.line))? {
                Flow::Next => {}
                other => return Ok(other),
            }
        }
        Ok(Flow::Next)
    }

    fn node(&mut self, node: &'t Node) -> Result<Flow> {
        self.meter.work(1)?;
        let _level = self.meter.enter()?;
        match &node.kind {
            NodeKind::Data(text) => self.out.push_str(text)?,
            NodeKind::Output(expr) => {
                let value = self.evaluate(expr)?;
                value.write(&mut self.out, &self.meter)?;
            }
            NodeKind::If {
                branches,
                otherwise,
            } => {
                for (condition, body) in branches {
                    if self.evaluate(condition)?.is_true() {
                        return self.nodes(body);
                    }
                }
                return self.nodes(otherwise);
            }
            NodeKind::For(of) => {
                let iterable = self.evaluate(&of.iterable)?;
                self.for_loop(of, &iterable, self.scope, 1)?;
            }
            NodeKind::Set { target, value } => {
                let value = self.evaluate(value)?;
                self.assign(target, value)?;
            }
            NodeKind::SetBlock {
                target,
                filters,
                body,
            } => {
                let value = self.captured_body(body, filters)?;
                self.assign(target, value)?;
            }
            NodeKind::FilterBlock { filters, body } => {
                let value = self.captured_body(body, filters)?;
                value.write(&mut self.out, &self.meter)?;
            }
            NodeKind::With { values, body } => {
                let found = values.iter().map(|(_, value)| self.evaluate(value));
                let found = found.collect::<Result<Vec<Value>>>()?;
                return self.scoped(self.scope, |machine| {
                    for ((target, _), value) in values.iter().zip(found) {
                        machine.assign(target, value)?;
                    }
                    machine.nodes(body)
                });
            }
            NodeKind::Scope(body) => {
                return self.scoped(self.scope, |machine| machine.nodes(body));
            }
            NodeKind::Macro(index) => {
                let value = self.macro_here(*index);
                self.set_variable(&self.template.macros[*index].name, value);
            }
            NodeKind::CallBlock { call, body } => {
                let ExprKind::Call(callee, arguments) = &*call.kind else {
                    return Err(Error::failed("a `call` block needs a call"));
                };
                let callee = self.evaluate(callee)?;
                let mut args = self.arguments(arguments)?;
                args.name("caller", self.macro_here(*body))?;
                let value = self.call(&callee, args)?;
                value.write(&mut self.out, &self.meter)?;
            }
            NodeKind::Break => return Ok(Flow::Break),
            NodeKind::Continue => return Ok(Flow::Continue),
            NodeKind::Unsupported(reason) => return Err(Error::failed(reason.clone())),
        }
        Ok(Flow::Next)
    }

    fn captured_body(&mut self, body: &'t [Node], filters: &'t [Filter]) -> Result<Value> {
        let mut value =
            self.captured(|machine| machine.scoped(machine.scope, |machine| machine.nodes(body)))?;
        for filter in filters {
            let args = self.arguments(&filter.arguments)?;
            value = self.filter(&filter.name, value, args)?;
        }
        Ok(value)
    }

    fn for_loop(
        &mut self,
        of: &'t For,
        iterable: &Value,
        parent: usize,
        depth: usize,
    ) -> Result<()> {
        let mut items = iterable.elements(&self.meter)?;
        if let Some(condition) = &of.condition {
            let mut kept = Items::new(&self.meter)?;
            for item in &items.items {
                let is_kept = self.scoped(parent, |machine| {
                    machine.assign(&of.target, item.clone())?;
                    Ok(machine.evaluate(condition)?.is_true())
                })?;
                if is_kept {
                    kept.push(item.clone())?;
                }
            }
            items = Rc::new(Seq::new(SeqKind::List, kept)?);
        }
        if items.items.is_empty() {
            self.scoped(parent, |machine| machine.nodes(&of.otherwise))?;
            return Ok(());
        }
        let id = self.new_id();
        let state = Rc::new(LoopState {
            items: Rc::clone(&items),
            index: Cell::new(0),
            depth,
            place: self.loops.len(),
            id,
            _charge: self.meter.hold(size_of::<LoopState>())?,
        });
        self.loops.push(LoopFrame {
            id,
            of,
            scope: parent,
            depth,
            changed: None,
        });
        let result = self.iterations(of, &state, parent);
        self.loops.pop();
        result
    }

    fn iterations(&mut self, of: &'t For, state: &Rc<LoopState>, parent: usize) -> Result<()> {
        for (at, item) in state.items.items.iter().enumerate() {
            state.index.set(at);
            let flow = self.scoped(parent, |machine| {
                machine.set_variable("loop", Value::Loop(Rc::clone(state)));
                machine.assign(&of.target, item.clone())?;
                machine.nodes(&of.body)
            })?;
            if flow == Flow::Break {
                break;
            }
        }
        Ok(())
    }

    /// Evaluates `loop(iterable)` in a recursive loop: renders the loop over `iterable`.
    pub fn recurse(&mut self, state: &LoopState, iterable: &Value) -> Result<Value> {
        let frame = self.loop_frame(state)?;
        let (of, scope, depth) = (frame.of, frame.scope, frame.depth);
        if !of.is_recursive {
            return Err(Error::failed(
                "the loop must have the `recursive` marker to be called recursively",
            ));
        }
        self.captured(|machine| machine.for_loop(of, iterable, scope, depth + 1))
    }

    /// Evaluates `loop.changed(…)`: whether the values differ from those of the last call.
    pub fn changed(&mut self, state: &LoopState, values: Value) -> Result<bool> {
        let meter = Rc::clone(&self.meter);
        let frame = self.loop_frame(state)?;
        let is_same = match &frame.changed {
            Some(last) => last.equals(&values, &meter)?,
            None => false,
        };
        if !is_same {
            frame.changed = Some(values);
        }
        Ok(!is_same)
    }

    fn loop_frame(&mut self, state: &LoopState) -> Result<&mut LoopFrame<'t>> {
        let frame = self.loops.get_mut(state.place);
        frame
            .filter(|frame| frame.id == state.id)
            .ok_or_else(|| Error::failed("`loop` is used after its loop has ended"))
    }

    /// Returns a macro that sees the variables of the current scope.
    fn macro_here(&self, index: usize) -> Value {
        Value::Macro(MacroRef {
            index,
            scope: self.scope,
            id: self.scopes[self.scope].id,
        })
    }

    pub fn macro_name(&self, of: MacroRef) -> &'t str {
        &self.template.macros[of.index].name
    }

    pub fn call_macro(&mut self, of: MacroRef, mut args: Args) -> Result<Value> {
        let found = &self.template.macros[of.index];
        let name = &found.name;
        if self.scopes[of.scope].id != of.id {
            return Err(Error::failed(format!(
                "the macro `{name}` is called after the block that defines it has ended"
            )));
        }
        let n = found.parameters.len();
        if args.positional.as_slice().len() > n && !found.reads_varargs {
            return Err(Error::failed(format!(
                "macro '{name}' takes not more than {n} argument(s)"
            )));
        }
        let positional = std::mem::take(args.positional.as_mut());
        let (mut bound, mut positional) = (Vec::new(), positional.into_iter());
        for (parameter, _) in &found.parameters {
            let by_name = args.named.iter().position(|(known, _)| known == parameter);
            bound.push(match (positional.next(), by_name) {
                (Some(_), Some(_)) => {
                    return Err(Error::failed(format!(
                        "macro '{name}' got multiple values for argument '{parameter}'"
                    )));
                }
                (None, Some(at)) => Some(args.named.remove(at).1),
                (value, None) => value,
            });
        }
        let mut extra = Items::new(&self.meter)?;
        extra.extend(positional)?;
        let caller = args.named.iter().position(|(known, _)| known == "caller");
        let caller = caller
            .filter(|_| found.reads_caller)
            .map(|at| args.named.remove(at).1);
        if let (Some((unknown, _)), false) = (args.named.first(), found.reads_kwargs) {
            return Err(Error::failed(format!(
                "macro '{name}' takes no keyword argument '{unknown}'"
            )));
        }
        self.captured(|machine| {
            machine.scoped(of.scope, |machine| {
                if found.reads_caller {
                    let caller = match caller {
                        Some(caller) => caller,
                        None => Value::undefined(&machine.meter, "No caller defined")?,
                    };
                    machine.set_variable("caller", caller);
                }
                if found.reads_varargs {
                    let extra = Value::seq(SeqKind::Tuple, extra)?;
                    machine.set_variable("varargs", extra);
                }
                if found.reads_kwargs {
                    let kwargs = args.named_dict(&machine.meter)?;
                    machine.set_variable("kwargs", kwargs);
                }
                for ((parameter, default), value) in found.parameters.iter().zip(bound) {
                    let value = match (value, default) {
                        (Some(value), _) => value,
                        (None, Some(default)) => machine.evaluate(default)?,
                        (None, None) => {
                            let message = format!("parameter '{parameter}' was not provided");
                            Value::undefined(&machine.meter, &message)?
                        }
                    };
                    machine.set_variable(parameter, value);
                }
                machine.nodes(&found.body)
            })
        })
    }
}
