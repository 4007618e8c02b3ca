//! Limits of one rendering: live bytes, total steps and nesting depth.
//!
//! Every value that can grow holds a [`Charge`], which is taken before the memory is allocated and returned when the value is
//! dropped. [`Builder`] builds text and [`Items`] builds lists; both charge as they grow. Work on texts and lists counts as
//! steps, so the number of steps bounds the time.

use std::{cell::Cell, rc::Rc};

use super::error::{Error, Result};

/// Limits of one rendering.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of live bytes of values and text.
    pub bytes: usize,
    /// Maximum number of steps: evaluated nodes, visited elements, and 64-byte chunks of text read or written.
    pub steps: u64,
    /// Maximum nesting of evaluations, which bounds the stack.
    pub depth: usize,
}

/// Counts the resources of a rendering and refuses to exceed its limits.
#[derive(Debug)]
pub struct Meter {
    limits: Limits,
    live: Cell<usize>,
    steps: Cell<u64>,
    depth: Cell<usize>,
}

/// Bytes of an allocation besides its contents: the counts of `Rc`, the header of a `Vec` or `String`, and this charge.
const OVERHEAD: usize = 96;

impl Meter {
    pub fn new(limits: Limits) -> Rc<Self> {
        Rc::new(Self {
            limits,
            live: Cell::new(0),
            steps: Cell::new(0),
            depth: Cell::new(0),
        })
    }

    /// Counts `steps` steps.
    pub fn work(&self, steps: usize) -> Result<()> {
        let sum = self.steps.get().saturating_add(steps as u64);
        self.steps.set(sum);
        match sum <= self.limits.steps {
            true => Ok(()),
            false => Err(Error::limit(format!(
                "rendering takes more than {} steps, the limit for one conversation",
                self.limits.steps
            ))),
        }
    }

    /// Counts reading or writing `bytes` bytes of text.
    pub fn scan(&self, bytes: usize) -> Result<()> {
        self.work(1 + bytes / 64)
    }

    /// Charges an allocation of `bytes` bytes.
    pub fn hold(self: &Rc<Self>, bytes: usize) -> Result<Charge> {
        let mut charge = Charge {
            meter: Rc::clone(self),
            bytes: 0,
        };
        charge.grow(bytes.saturating_add(OVERHEAD))?;
        Ok(charge)
    }

    /// Enters a level of nesting, which ends when the result is dropped.
    pub fn enter(self: &Rc<Self>) -> Result<Level> {
        let depth = self.depth.get() + 1;
        if depth > self.limits.depth {
            return Err(Error::limit(format!(
                "rendering nests deeper than {} levels, the limit for one conversation",
                self.limits.depth
            )));
        }
        self.depth.set(depth);
        Ok(Level(Rc::clone(self)))
    }
}

/// A level of nesting.
pub struct Level(Rc<Meter>);

impl Drop for Level {
    fn drop(&mut self) {
        self.0.depth.set(self.0.depth.get().saturating_sub(1));
    }
}

/// Bytes that count as live until the charge is dropped.
#[derive(Debug)]
pub struct Charge {
    meter: Rc<Meter>,
    bytes: usize,
}

impl Charge {
    pub fn meter(&self) -> &Rc<Meter> {
        &self.meter
    }

    pub fn grow(&mut self, bytes: usize) -> Result<()> {
        let meter = &self.meter;
        let sum = meter.live.get().saturating_add(bytes);
        if sum > meter.limits.bytes {
            return Err(Error::limit(format!(
                "rendering takes more than {} MiB of memory, the limit for one conversation",
                meter.limits.bytes >> 20
            )));
        }
        meter.live.set(sum);
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let live = &self.meter.live;
        live.set(live.get().saturating_sub(self.bytes));
    }
}

/// Text under construction.
#[derive(Debug)]
pub struct Builder {
    text: String,
    charge: Charge,
}

impl Builder {
    pub fn new(meter: &Rc<Meter>) -> Result<Self> {
        Ok(Self {
            text: String::new(),
            charge: meter.hold(0)?,
        })
    }

    pub fn push_str(&mut self, text: &str) -> Result<()> {
        self.charge.meter.scan(text.len())?;
        self.make_room(text.len())?;
        self.text.push_str(text);
        Ok(())
    }

    pub fn push(&mut self, c: char) -> Result<()> {
        let mut bytes = [0; 4];
        self.push_str(c.encode_utf8(&mut bytes))
    }

    /// Appends `text` `n` times.
    pub fn repeat(&mut self, text: &str, n: usize) -> Result<()> {
        let bytes = text.len().saturating_mul(n);
        self.charge.meter.scan(bytes)?;
        self.make_room(bytes)?;
        (0..n.min(bytes)).for_each(|_| self.text.push_str(text));
        Ok(())
    }

    /// Makes room for `more` bytes. The capacity at least doubles, and is charged before the text is reallocated.
    fn make_room(&mut self, more: usize) -> Result<()> {
        let needed = self.text.len().saturating_add(more);
        let capacity = self.text.capacity();
        if needed > capacity {
            let larger = needed.max(capacity.saturating_mul(2)).max(16);
            self.charge.grow(larger - capacity)?;
            self.text.reserve_exact(larger - self.text.len());
        }
        Ok(())
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    pub fn into_parts(self) -> (String, Charge) {
        (self.text, self.charge)
    }
}

/// A list under construction.
pub struct Items<T> {
    items: Vec<T>,
    charge: Charge,
}

impl<T> Items<T> {
    pub fn new(meter: &Rc<Meter>) -> Result<Self> {
        Ok(Self {
            items: Vec::new(),
            charge: meter.hold(0)?,
        })
    }

    pub fn push(&mut self, value: T) -> Result<()> {
        self.charge.meter.work(1)?;
        if self.items.len() == self.items.capacity() {
            let more = self.items.capacity().max(4);
            self.charge.grow(more * size_of::<T>())?;
            self.items.reserve_exact(more);
        }
        self.items.push(value);
        Ok(())
    }

    pub fn extend(&mut self, values: impl IntoIterator<Item = T>) -> Result<()> {
        values.into_iter().try_for_each(|value| self.push(value))
    }

    pub fn as_slice(&self) -> &[T] {
        &self.items
    }

    pub fn as_mut(&mut self) -> &mut Vec<T> {
        &mut self.items
    }

    pub fn into_parts(self) -> (Vec<T>, Charge) {
        (self.items, self.charge)
    }
}
