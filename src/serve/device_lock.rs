//! Fair sharing of a device by several models. While several models have batches waiting, each model gets its share of the device's time,
//! regardless of how many batches are waiting for the other models.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use crate::schedule::Micros;

/// Max number of permits, for all models of a device together: one for the running batch and one for the next batch.
const PLACES: u32 = 2;

/// Fair lock of a device. A model acquires a permit for each batch.
///
/// The lock uses start-time fair queueing (Goyal, Vin and Cheng 1996). The virtual time of a model advances by the time of its batches
/// divided by its share. Among the waiting models, the one with the smallest virtual time comes next. A model that was idle starts at the
/// current virtual time, so it accumulates no credit.
#[derive(Default)]
pub struct FairDeviceLock {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    models: BTreeMap<u64, Clock>,
    next: u64,
    running: u32,
    /// Virtual time of the model that got the last permit, before the time of its batch was added.
    now: f64,
}

struct Clock {
    at: f64,
    share: f64,
    /// Number of threads of the model that wait for a permit. `running` is the number of permits that the model holds.
    waiting: u32,
    running: u32,
}

/// Handle with which a model acquires the lock of a device.
pub struct ModelHandle {
    turns: Arc<FairDeviceLock>,
    model: u64,
}

/// Permit to run a batch on the device. It is released when it is dropped.
pub struct DevicePermit {
    turns: Arc<FairDeviceLock>,
    model: u64,
}

impl FairDeviceLock {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a model. A model with twice the share of another model gets twice as much time.
    pub fn join(self: &Arc<Self>, share: f64) -> ModelHandle {
        let mut state = self.lock();
        let model = state.next;
        state.next += 1;
        let clock = Clock {
            at: state.now,
            share,
            waiting: 0,
            running: 0,
        };
        state.models.insert(model, clock);
        ModelHandle {
            turns: Arc::clone(self),
            model,
        }
    }
}

impl State {
    /// Returns the waiting model with the smallest virtual time.
    fn next(&self) -> Option<u64> {
        let waiting = self.models.iter().filter(|(_, clock)| clock.waiting > 0);
        let next = waiting.min_by(|a, b| a.1.at.total_cmp(&b.1.at));
        next.map(|(&model, _)| model)
    }
}

impl ModelHandle {
    /// Waits for a permit for a batch whose estimated time is `cost`.
    pub fn take(&self, cost: Micros) -> DevicePermit {
        let mut state = self.turns.lock();
        let now = state.now;
        if let Some(clock) = state.models.get_mut(&self.model) {
            if clock.waiting + clock.running == 0 {
                clock.at = clock.at.max(now);
            }
            clock.waiting += 1;
        }
        while state.running >= PLACES || state.next().is_some_and(|next| next != self.model) {
            let waited = self.turns.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        state.running += 1;
        if let Some(clock) = state.models.get_mut(&self.model) {
            clock.waiting -= 1;
            clock.running += 1;
            let began = clock.at;
            clock.at += cost.seconds() / clock.share;
            state.now = began;
        }
        drop(state);
        // Another permit may be available for another model.
        self.turns.changed.notify_all();
        DevicePermit {
            turns: Arc::clone(&self.turns),
            model: self.model,
        }
    }
}

impl Drop for ModelHandle {
    fn drop(&mut self) {
        self.turns.lock().models.remove(&self.model);
        self.turns.changed.notify_all();
    }
}

impl Drop for DevicePermit {
    fn drop(&mut self) {
        let mut state = self.turns.lock();
        state.running -= 1;
        // The model may have been unregistered in the meantime.
        if let Some(clock) = state.models.get_mut(&self.model) {
            clock.running -= 1;
        }
        drop(state);
        self.turns.changed.notify_all();
    }
}

/// Fair locks of all devices, by device name.
#[derive(Default)]
pub struct Devices(Mutex<HashMap<String, Arc<FairDeviceLock>>>);

impl Devices {
    pub fn turns(&self, device: &str) -> Arc<FairDeviceLock> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(device.to_owned()).or_default())
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, sync::mpsc::channel, thread};

    use super::*;

    /// Returns the number of threads that wait for a permit, plus the number of permits held.
    fn there(turns: &FairDeviceLock) -> u32 {
        let state = turns.lock();
        state.models.values().map(|c| c.waiting + c.running).sum()
    }

    #[test]
    fn each_model_has_its_share_of_the_time() {
        const BATCHES: usize = 20;
        let turns = Arc::new(FairDeviceLock::default());
        // Hold all permits until all threads are waiting.
        let others = turns.join(1.0);
        let held = [others.take(Micros(0)), others.take(Micros(0))];
        let (sender, granted) = channel();
        // The models have equal shares of the time. The batches of the first model are four times as long, so it gets a fifth of the
        // permits. Each model has three threads: two may hold the permits, and the third waits.
        let mut n_threads = 0;
        for (model, cost) in [4_000, 1_000].into_iter().enumerate() {
            let handle = Arc::new(turns.join(1.0));
            for _ in 0..=PLACES {
                let (handle, sender) = (Arc::clone(&handle), sender.clone());
                thread::spawn(move || {
                    for batch in 1..=BATCHES {
                        let permit = handle.take(Micros(cost));
                        let (release, released) = channel::<()>();
                        let _ = sender.send((model, batch == BATCHES, release));
                        // Hold the permit until the main thread drops `release`.
                        let _ = released.recv();
                        drop(permit);
                    }
                });
                n_threads += 1;
            }
        }
        while there(&turns) < n_threads + PLACES {
            thread::yield_now();
        }
        drop(held);
        let (mut order, mut permits) = (Vec::new(), VecDeque::new());
        while n_threads > 0 {
            while permits.len() < n_threads.min(PLACES) as usize {
                let (model, is_last, release) = granted.recv().expect("a permit");
                order.push(model);
                permits.push_back((is_last, release));
            }
            // Release the next permit only when all threads wait for a permit or hold one.
            while there(&turns) != n_threads {
                thread::yield_now();
            }
            let (is_last, release) = permits.pop_front().expect("a permit");
            n_threads -= u32::from(is_last);
            drop(release);
        }
        let first = order.iter().take(30).filter(|&&model| model == 0).count();
        assert!((5..=7).contains(&first), "{order:?}");
        assert_eq!(order.len(), 6 * BATCHES);
    }

    #[test]
    fn an_idle_model_accumulates_no_credit_and_a_dropped_one_blocks_no_others() {
        let turns = Arc::new(FairDeviceLock::default());
        let (busy, idle) = (turns.join(1.0), turns.join(1.0));
        for _ in 0..100 {
            drop(busy.take(Micros(1_000)));
        }
        drop(idle.take(Micros(1_000)));
        let at = |seat: &ModelHandle| turns.lock().models[&seat.model].at;
        assert!((at(&idle) - at(&busy)).abs() < 2e-3);
        let turn = idle.take(Micros(1));
        drop(idle);
        drop(busy.take(Micros(1)));
        drop(turn);
        let state = turns.lock();
        assert_eq!((state.running, state.models.len()), (0, 1));
    }
}
