//! Fair sharing of text generation among tenants. A text is a request to generate text.

use std::{cmp::Reverse, collections::HashMap};

use super::Waiting;

/// Orders texts by start-time fair queueing (Goyal, Vin and Cheng 1996). The next text is from the highest class. Within the class, it is
/// from the tenant with the fewest tokens so far, and it is that tenant's oldest text. A tenant without waiting texts accumulates no
/// credit.
#[derive(Debug, Default)]
pub(super) struct FairShares {
    /// Tokens of each tenant so far. A tenant without an entry counts as having `now` tokens.
    tokens: HashMap<u32, u64>,
    /// Virtual time of the fair queue: the token count that the tenant of the most recently started text had before this text was charged.
    now: u64,
}

impl FairShares {
    fn tokens_of(&self, tenant: u32) -> u64 {
        let tokens = self.tokens.get(&tenant);
        tokens.map_or(self.now, |&n| n.max(self.now))
    }

    /// Returns the index of the text to start next; `None` if no text is waiting.
    pub(super) fn next(&self, waiting: &[Waiting]) -> Option<usize> {
        let each = waiting.iter().enumerate();
        let next =
            each.min_by_key(|(at, text)| (Reverse(text.class), self.tokens_of(text.tenant), *at))?;
        Some(next.0)
    }

    /// Charges the prompt and the new tokens of a starting text to its tenant.
    pub(super) fn started(&mut self, text: &Waiting) {
        let tokens = self.tokens_of(text.tenant);
        self.now = tokens;
        let own = u64::from(text.tokens) + u64::from(text.steps);
        self.tokens.insert(text.tenant, tokens + own);
        self.tokens.retain(|_, tokens| *tokens > self.now);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Micros, Scheduler, Settings, Waiting, scheduler};

    fn text(id: u64, class: u8, tenant: u32, steps: u32) -> Waiting {
        Waiting {
            id,
            class,
            tenant,
            steps,
            ..Waiting::new(1, Micros(id))
        }
    }

    /// Starts texts until the scheduler returns none, and returns their ids in order.
    fn started(scheduler: &mut dyn Scheduler, waiting: &mut Vec<Waiting>) -> Vec<u64> {
        let mut ids = Vec::new();
        while let Some(at) = scheduler.next_text(waiting, 0) {
            let text = waiting.remove(at);
            scheduler.text_started(&text);
            ids.push(text.id);
        }
        ids
    }

    fn named(name: &str) -> Box<dyn Scheduler> {
        scheduler(name, &Settings::default()).expect("it is known")
    }

    #[test]
    fn the_highest_class_goes_first_and_tenants_take_turns_by_tokens() {
        let mut packed = named("packed");
        // One tenant has many texts and an urgent text, another has two texts.
        let mut waiting: Vec<Waiting> = (0..5).map(|id| text(id, 0, 1, 9)).collect();
        waiting.extend([text(10, 0, 2, 9), text(11, 0, 2, 9), text(20, 3, 1, 9)]);
        // The urgent text is charged to its tenant.
        let order = started(&mut *packed, &mut waiting);
        assert_eq!(order, [20, 10, 0, 11, 1, 2, 3, 4]);
        // A tenant that comes back later has no credit: it takes turns with the first tenant.
        waiting = vec![text(25, 0, 1, 9), text(26, 0, 1, 9)];
        waiting.extend([text(30, 0, 2, 9), text(31, 0, 2, 9)]);
        let order = started(&mut *packed, &mut waiting);
        let of_first = order[..2].iter().filter(|&&id| id < 30).count();
        assert_eq!(of_first, 1, "{order:?}");
        // A text that is twice as long counts as two turns.
        let mut packed = named("packed");
        waiting = vec![text(0, 0, 1, 39), text(1, 0, 1, 39)];
        waiting.extend((10..14).map(|id| text(id, 0, 2, 19)));
        let order = started(&mut *packed, &mut waiting);
        assert_eq!(order, [0, 10, 11, 1, 12, 13]);
    }

    #[test]
    fn no_batch_starts_one_text_at_a_time_in_order_of_arrival() {
        let mut alone = named("no-batch");
        let mut waiting = vec![text(0, 0, 1, 9), text(1, 3, 2, 9)];
        assert_eq!(alone.next_text(&waiting, 1), None);
        assert_eq!(started(&mut *alone, &mut waiting), [0, 1]);
    }
}
