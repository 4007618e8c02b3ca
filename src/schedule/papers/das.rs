//! TCB's online scheduling for rows shared by several requests: DAS (5.2, algorithm 1) and slotted DAS (5.3, algorithm 2).

use super::index::Index;
use crate::schedule::Micros;

/// A selected request: its number of tokens and its key in the [`Index`].
pub(in crate::schedule) type Chosen = (u32, (Micros, u64));

/// Requests selected for one row.
#[derive(Debug, Default)]
pub(in crate::schedule) struct Row {
    /// Requests in order of selection.
    pub chosen: Vec<Chosen>,
    /// Number of requests at the start of `chosen` that were selected by utility alone (TCB's set Ñᵁ).
    pub dominant: usize,
}

/// Fills rows of `length` tokens with requests and removes the selected requests from the index. The listing in the paper does not remove
/// them, so it would select the same requests again for the next row. The utility of a request is the reciprocal of its length. Each row
/// receives
///
/// 1. all waiting requests if they fit; otherwise
/// 2. the first `⌈η·s⌉` of the `s` requests with the highest utility that fit together;
/// 3. requests whose utility is at least `q = 1 − η` times the mean utility of step 2, by earliest deadline, while they fit; and
/// 4. the remaining requests that still fit, by utility.
pub(in crate::schedule) fn das(
    index: &mut Index,
    rows: u32,
    length: u32,
    dominance: f64,
) -> Vec<Row> {
    let mut filled = Vec::new();
    while filled.len() < rows as usize && index.n() > 0 {
        let row = fill(index, length, dominance);
        if row.chosen.is_empty() {
            break;
        }
        filled.push(row);
    }
    filled
}

fn fill(index: &mut Index, length: u32, dominance: f64) -> Row {
    let everything = index.tokens() <= u64::from(length);
    let s = match everything {
        true => index.n(),
        false => index.n_that_fit(u64::from(length)),
    };
    let mut row = Row {
        chosen: Vec::with_capacity(s),
        dominant: 0,
    };
    let mut room = length;
    let mut take = |index: &mut Index, room: &mut u32, (tokens, entry): Chosen| {
        index.remove(tokens, entry);
        *room -= tokens;
        row.chosen.push((tokens, entry));
    };
    let p = match everything {
        true => s,
        false => (dominance * s as f64).ceil() as usize,
    };
    let mut utility = 0.0;
    for _ in 0..p {
        if let Some(shortest) = index.shortest() {
            utility += 1.0 / f64::from(shortest.0);
            take(index, &mut room, shortest);
        }
    }
    if p > 0 && !everything {
        // Maximum length of a request whose utility (1 / length) is at least `1 − η` times the mean utility `utility / p`.
        let longest = (p as f64 / ((1.0 - dominance) * utility)).floor() as u32;
        while let Some(soonest) = index.soonest_to(longest.min(room)) {
            take(index, &mut room, soonest);
        }
        // No remaining request of at most `longest` tokens fits. Continue with longer requests, shortest first.
        while let Some(next) = index.shortest_from(longest.saturating_add(1))
            && next.0 <= room
        {
            take(index, &mut room, next);
        }
    }
    row.dominant = p;
    row
}

/// Rows that are cut into slots. `slot` is the slot length in tokens, and `rows[row][slot]` has the requests of one slot. `left` has the
/// selected requests that fit in no slot of their row and therefore keep waiting.
pub(in crate::schedule) struct Slotted {
    pub slot: u32,
    pub rows: Vec<Vec<Vec<Chosen>>>,
    pub left: Vec<Chosen>,
}

/// Cuts rows filled by [`das`] into slots. A slot is as long as the longest request that was selected by utility, so each request
/// selected by utility fits. Longer requests wait for a later batch; the paper discards them.
pub(in crate::schedule) fn slotted(rows: Vec<Row>, length: u32) -> Slotted {
    let dominant = rows.iter().flat_map(|row| &row.chosen[..row.dominant]);
    let slot = dominant.map(|&(tokens, _)| tokens).max().unwrap_or(length);
    let slot = slot.clamp(1, length.max(1));
    let n_slots = (length / slot) as usize;
    let mut left = Vec::new();
    let rows = rows.into_iter().map(|row| {
        let mut slots: Vec<Vec<Chosen>> = vec![Vec::new(); n_slots];
        let mut rooms = vec![slot; n_slots];
        // The first slot that may have room. Earlier slots have less room than the shortest request of the row needs.
        let shortest = row.chosen.iter().map(|chosen| chosen.0).min().unwrap_or(0);
        let mut first = 0;
        for chosen in row.chosen {
            while rooms.get(first).is_some_and(|&room| room < shortest) {
                first += 1;
            }
            let after = rooms[first..].iter().position(|&room| room >= chosen.0);
            match after.map(|after| first + after) {
                Some(at) => {
                    rooms[at] -= chosen.0;
                    slots[at].push(chosen);
                }
                None => left.push(chosen),
            }
        }
        slots
    });
    let rows = rows.collect();
    Slotted { slot, rows, left }
}

/// Puts each request, in order, into the first row with enough room. Stops at the first request that fits no row.
pub(in crate::schedule) fn first_fit<T>(
    order: impl Iterator<Item = (u32, T)>,
    rows: usize,
    length: u32,
) -> Vec<Vec<(u32, T)>> {
    let mut filled: Vec<Vec<(u32, T)>> = Vec::new();
    let mut rooms: Vec<u32> = Vec::new();
    for (tokens, request) in order {
        let at = match rooms.iter().position(|&room| room >= tokens) {
            Some(at) => at,
            None if rooms.len() < rows && tokens <= length => {
                rooms.push(length);
                filled.push(Vec::new());
                rooms.len() - 1
            }
            None => break,
        };
        rooms[at] -= tokens;
        filled[at].push((tokens, request));
    }
    filled
}
