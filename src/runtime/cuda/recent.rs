//! A bounded map that keeps what was used last.

use std::{collections::HashMap, hash::Hash, num::NonZeroUsize};

/// At most so many values; one more takes the place of the one unused for longest.
pub(super) struct Recent<K, V> {
    capacity: NonZeroUsize,
    entries: HashMap<K, Entry<V>>,
    /// Uses so far; tells which entry was used longest ago.
    clock: u64,
}

struct Entry<V> {
    value: V,
    used_at: u64,
}

impl<K: Copy + Eq + Hash, V> Recent<K, V> {
    pub(super) fn new(capacity: NonZeroUsize) -> Self {
        Self {
            capacity,
            entries: HashMap::new(),
            clock: 0,
        }
    }

    /// The value of `key`, which counts as a use.
    pub(super) fn get(&mut self, key: &K) -> Option<&V> {
        self.clock += 1;
        let entry = self.entries.get_mut(key)?;
        entry.used_at = self.clock;
        Some(&entry.value)
    }

    /// Puts a value in, which counts as a use.
    pub(super) fn insert(&mut self, key: K, value: V) {
        self.clock += 1;
        if self.entries.len() >= self.capacity.get() && !self.entries.contains_key(&key) {
            // A scan is small beside what makes a value.
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used_at);
            if let Some((&oldest, _)) = oldest {
                self.entries.remove(&oldest);
            }
        }
        let used_at = self.clock;
        self.entries.insert(key, Entry { value, used_at });
    }

    pub(super) fn remove(&mut self, key: &K) {
        self.entries.remove(key);
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(recent: &Recent<u32, &'static str>) -> Vec<u32> {
        let mut keys: Vec<u32> = recent.entries.keys().copied().collect();
        keys.sort_unstable();
        keys
    }

    #[test]
    fn the_value_unused_for_longest_makes_room() {
        let mut recent = Recent::new(NonZeroUsize::new(3).expect("not zero"));
        for key in [1, 2, 3] {
            recent.insert(key, "first");
        }
        assert_eq!(recent.get(&1), Some(&"first"));
        recent.insert(4, "fourth");
        assert_eq!(keys(&recent), [1, 3, 4]);
        assert_eq!(recent.get(&2), None);
        // A value that replaces another needs no room.
        recent.insert(3, "again");
        assert_eq!(keys(&recent), [1, 3, 4]);
        assert_eq!(recent.get(&3), Some(&"again"));
        recent.insert(5, "fifth");
        assert_eq!(keys(&recent), [3, 4, 5]);
    }

    #[test]
    fn what_was_removed_leaves_room() {
        let mut recent = Recent::new(NonZeroUsize::new(2).expect("not zero"));
        recent.insert(1, "first");
        recent.insert(2, "second");
        recent.remove(&2);
        recent.insert(3, "third");
        assert_eq!(keys(&recent), [1, 3]);
        recent.clear();
        assert_eq!(keys(&recent), [] as [u32; 0]);
    }
}
