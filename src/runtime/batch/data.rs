//! Arrays of a batch that kernels read.

use super::{Batch, Sources};

impl Batch {
    /// Token ids in packed order, `[tokens]`.
    pub fn token_ids(&self) -> Vec<i32> {
        filled(self.token_ids.len(), |to| self.write_token_ids(to))
    }

    /// Segment ids in packed order, `[tokens]`.
    pub fn type_ids(&self) -> Vec<i32> {
        filled(self.token_ids.len(), |to| self.write_type_ids(to))
    }

    /// Index of each token in its sequence, `[tokens]`.
    pub fn positions(&self) -> Vec<i32> {
        filled(self.token_ids.len(), |to| self.write_positions(to))
    }

    /// Index of the first token of each sequence in packed order, followed by the number of tokens, `[batch + 1]`.
    pub fn cu_lens(&self) -> Vec<i32> {
        filled(self.lens.len() + 1, |to| self.write_cu_lens(to))
    }

    /// Number of leading tokens of each sequence that tokens attend to, `[batch]`. It excludes padding and the tokens that
    /// [`with_attended`](Self::with_attended) excludes.
    pub fn valid_lens(&self) -> Vec<i32> {
        filled(self.lens.len(), |to| self.write_valid_lens(to))
    }

    /// For each sequence, the index of its first score among the attention scores of one head. The last element is the number of these
    /// scores, `[batch + 1]`.
    pub fn pair_offsets(&self) -> Vec<i64> {
        filled(self.lens.len() + 1, |to| self.write_pair_offsets(to))
    }

    // The `write_*` functions write an array of the batch to a slice, which must have exactly the length of the array.

    pub(in crate::runtime) fn write_token_ids(&self, to: &mut [i32]) {
        to.copy_from_slice(bytemuck::cast_slice(&self.token_ids));
    }

    pub(in crate::runtime) fn write_previous_ids(&self, first: u32, to: &mut [i32]) {
        let (mut to, mut ids) = (to, self.token_ids.as_slice());
        for &n in &self.lens {
            let (own, after) = to.split_at_mut(n as usize);
            let (own_ids, ids_after) = ids.split_at(n as usize);
            let shifted = [first].into_iter().chain(own_ids.iter().copied());
            for (to, id) in own.iter_mut().zip(shifted) {
                *to = id as i32;
            }
            (to, ids) = (after, ids_after);
        }
    }

    pub(in crate::runtime) fn write_pooled_tokens(&self, to: &mut [i32]) {
        to.fill(0);
        let (mut start, mut to) = (0, to.iter_mut());
        for (sequence, &n) in self.lens.iter().enumerate() {
            let pooled = start + self.left_out_of(sequence)..start + n;
            // The array is longer than the number of pooled tokens. The entries at the end remain zero.
            for (token, to) in pooled.zip(to.by_ref()) {
                *to = token as i32;
            }
            start += n;
        }
    }

    pub(in crate::runtime) fn write_pooled_cu_lens(&self, to: &mut [i32]) {
        let mut next = 0;
        for (sequence, to) in to.iter_mut().enumerate() {
            *to = next as i32;
            let n = self.lens.get(sequence).copied();
            next += n.map_or(0, |n| n - self.left_out_of(sequence));
        }
    }

    /// Number of leading tokens of a sequence that pooling leaves out.
    fn left_out_of(&self, sequence: usize) -> u32 {
        self.left_out().map_or(0, |all| all[sequence])
    }

    pub(in crate::runtime) fn write_type_ids(&self, to: &mut [i32]) {
        match &self.type_ids {
            Some(ids) => to.copy_from_slice(bytemuck::cast_slice(ids)),
            None => to.fill(0),
        }
    }

    pub(in crate::runtime) fn write_positions(&self, to: &mut [i32]) {
        let mut rest = to;
        for (i, &n) in self.lens.iter().enumerate() {
            let (sequence, after) = rest.split_at_mut(n as usize);
            for (to, position) in sequence.iter_mut().zip(self.cached(i) as i32..) {
                *to = position;
            }
            rest = after;
        }
    }

    /// Number of keys of each sequence: its tokens and its cached tokens.
    pub fn key_lens(&self) -> impl Iterator<Item = u64> {
        let lens = self.lens.iter().enumerate();
        lens.map(|(i, &n)| u64::from(n) + u64::from(self.cached(i)))
    }

    /// Cache slots of all keys, one sequence after another, `[slots]`. Without a cache, no kernel reads this array, and it is zero.
    pub(in crate::runtime) fn write_slots(&self, to: &mut [i32]) {
        match &self.past {
            Some(past) => to.copy_from_slice(bytemuck::cast_slice(&past.slots)),
            None => to.fill(0),
        }
    }

    /// For each sequence, the index of its first cache slot in the array that [`write_slots`](Self::write_slots) writes, `[batch]`.
    pub(in crate::runtime) fn write_slot_starts(&self, to: &mut [i32]) {
        let mut next = 0;
        for (to, n) in to.iter_mut().zip(self.key_lens()) {
            *to = next;
            next += n as i32;
        }
    }

    pub(in crate::runtime) fn write_key_lens(&self, to: &mut [i32]) {
        for (to, n) in to.iter_mut().zip(self.key_lens()) {
            *to = n as i32;
        }
    }

    /// Low and high 32 bits of each sequence's seed, `[2·batch]`.
    pub(in crate::runtime) fn write_seeds(&self, to: &mut [i32]) {
        to.fill(0);
        let seeds = self.seeds.iter().flatten();
        for (to, &seed) in to.chunks_exact_mut(2).zip(seeds) {
            to.copy_from_slice(&[seed as u32 as i32, (seed >> 32) as u32 as i32]);
        }
    }

    fn sources(&self) -> Option<&Sources> {
        self.past.as_ref().and_then(|past| past.sources.as_ref())
    }

    /// Cache slots of the keys of all source texts, one sequence after another, `[source_slots]`.
    pub(in crate::runtime) fn write_source_slots(&self, to: &mut [i32]) {
        match self.sources() {
            Some(sources) => to.copy_from_slice(bytemuck::cast_slice(&sources.slots)),
            None => to.fill(0),
        }
    }

    /// For each sequence, the index of the first cache slot of its source text in the array that
    /// [`write_source_slots`](Self::write_source_slots) writes, `[batch]`.
    pub(in crate::runtime) fn write_source_starts(&self, to: &mut [i32]) {
        to.fill(0);
        let lens = self.sources().map_or(&[][..], |sources| &sources.lens);
        let mut next = 0;
        for (to, &n) in to.iter_mut().zip(lens) {
            *to = next;
            next += n as i32;
        }
    }

    /// Number of keys of each sequence's source text, `[batch]`.
    pub(in crate::runtime) fn write_source_lens(&self, to: &mut [i32]) {
        match self.sources() {
            Some(sources) => to.copy_from_slice(bytemuck::cast_slice(&sources.lens)),
            None => to.fill(0),
        }
    }

    /// Cache slot of each token of the batch, `[tokens]`.
    pub(in crate::runtime) fn write_token_slots(&self, to: &mut [i32]) {
        let Some(past) = &self.past else {
            return to.fill(0);
        };
        let (mut rest, mut slots) = (to, past.slots.as_slice());
        for (&n, &cached) in self.lens.iter().zip(&past.cached) {
            let (own, later) = slots.split_at((n + cached) as usize);
            let (to, after) = rest.split_at_mut(n as usize);
            to.copy_from_slice(bytemuck::cast_slice(&own[cached as usize..]));
            (rest, slots) = (after, later);
        }
    }

    pub(in crate::runtime) fn write_cu_lens(&self, to: &mut [i32]) {
        let mut next = 0;
        for (to, &n) in to.iter_mut().zip(self.lens.iter().chain(&[0])) {
            *to = next;
            next += n as i32;
        }
    }

    pub(in crate::runtime) fn write_valid_lens(&self, to: &mut [i32]) {
        let lens = self.attended().unwrap_or(self.own_lens());
        to.copy_from_slice(bytemuck::cast_slice(lens));
    }

    /// Length of each sequence without padding.
    pub(crate) fn own_lens(&self) -> &[u32] {
        self.valid_lens.as_deref().unwrap_or(&self.lens)
    }

    pub(in crate::runtime) fn write_pair_offsets(&self, to: &mut [i64]) {
        let mut next = 0;
        for (to, &n) in to.iter_mut().zip(self.lens.iter().chain(&[0])) {
            *to = next;
            next += i64::from(n) * i64::from(n);
        }
    }
}

fn filled<T: Clone + Default>(len: usize, fill: impl FnOnce(&mut [T])) -> Vec<T> {
    let mut values = vec![T::default(); len];
    fill(&mut values);
    values
}
