//! Kernels raced in the whole program that they are launched in: one choice is exchanged at a time, and the
//! whole is timed. A kernel's time by itself is not what it adds to a chain of layers, where the next one begins
//! while it still runs and the card may be at the limit of its power.

use super::{Choice, Counted, Problem, Range, choice_at};

/// Tokens of the batches that whole programs are timed on: from where the kernels for few rows end to where the card is at the limit
/// of its power, and a race of some milliseconds does not say what a longer run takes. Each is a quarter of an octave
/// from the one before, and no multiple of a tile.
const FIRST_TOKENS: f64 = 226.0;
const LAST_TOKENS: f64 = 4000.0;
/// Sequences of a batch, unless they would be longer than the model takes or shorter than a sentence.
const SEQUENCES: u64 = 16;
const SHORTEST_MEAN: u64 = 40;
/// Candidates of a GEMM, by the cost model, that are raced at a number of tokens, and how much slower than the
/// best they may be estimated.
const RIVALS: usize = 7;
const HOPELESS: f64 = 1.5;
/// With LayerNorm in a launch of its own, so many kernels of the GEMM are tried.
const RIVALS_APART: usize = 4;
/// A change stays where it saves so much of a run's time, twice.
pub const WORTH_A_CHANGE: f64 = 0.007;
/// Rounds over all choices: a change may make room for another.
const ROUNDS: usize = 3;
/// In a later round what was so much slower is not tried again.
const STILL_OPEN: f64 = 1.015;

/// Choices that are made as one: a linear layer and the LayerNorm behind it in one launch or two, and
/// the linear layer's kernel if they are two.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Indices of its problems.
    pub problems: Vec<usize>,
    /// What its problems may be served by: of each a choice.
    pub moves: Vec<Vec<Choice>>,
}

/// The choice that serves each problem.
pub type Lineup = Vec<Choice>;

/// Numbers of tokens that programs are timed at, ascending.
pub fn bucket_tokens() -> Vec<u64> {
    let size = |quarters: i32| FIRST_TOKENS * 2f64.powf(f64::from(quarters) / 4.0);
    let sizes = (0..).map(size).take_while(|&size| size <= LAST_TOKENS);
    sizes.map(|size| size.round() as u64).collect()
}

/// The lengths of a batch of so many tokens: evenly spread from a fifth of the longest to the longest, 0.6 of it in the
/// mean as in ByteTransformer IV, of at most `limit` tokens each.
pub fn bucket_lens(tokens: u64, limit: u64) -> Vec<u32> {
    let few = (tokens / SHORTEST_MEAN).clamp(1, SEQUENCES);
    let n = few.max((tokens * 5).div_ceil(limit.max(1) * 3)).min(tokens);
    if n == 1 {
        return vec![tokens as u32];
    }
    let mean = tokens as f64 / n as f64;
    // Sums of rounded ends, so that what is left over by one sequence is another one's.
    let end = |i: u64| {
        let i = i as f64;
        let (last, n) = ((n - 1) as f64, n as f64);
        let before = i * (5.0 - 4.0 * (i - 1.0) / (2.0 * last)) / 3.0 * mean;
        (before + 0.5) as u64 * u64::from(i < n) + tokens * u64::from(i >= n)
    };
    (0..n).map(|i| (end(i + 1) - end(i)) as u32).collect()
}

/// What of a batch a problem's sizes count.
pub fn size_of(problem: &Problem, lens: &[u32]) -> u64 {
    match problem.counted() {
        Counted::Rows => lens.iter().copied().map(u64::from).sum(),
        Counted::Longest => lens.iter().copied().max().unwrap_or(0).into(),
    }
}

impl Group {
    /// What is worth trying at a size of each problem. The first problem of several is the one that decides whether
    /// the others are launched.
    pub fn new(problems: &[(usize, &Problem, u64)], n_sms: u32) -> Self {
        let hopeful = |&(_, problem, size): &(usize, &Problem, u64), most: usize| {
            let mut all = problem.ranked(size, n_sms);
            // Of attention only what is of the kind that is launched: tiles.
            let guess = choice_at(&problem.guess(), size);
            if let Some(Choice::MhaWgmma(_)) = guess {
                all.retain(|choice| matches!(choice, Choice::MhaWgmma(_)));
            }
            if guess.is_some_and(|choice| problem.cycles(choice, size, n_sms).is_some()) {
                let cost = |choice: Choice| problem.cost(choice, size, n_sms);
                all.sort_by(|&a, &b| cost(a).total_cmp(&cost(b)));
                let least = all.first().map_or(0.0, |&choice| cost(choice));
                all.retain(|&choice| cost(choice) <= HOPELESS * least);
                all.truncate(most);
            }
            all
        };
        let moves = match problems {
            [one] => hopeful(one, RIVALS).into_iter().map(|c| vec![c]).collect(),
            [pair, alone] => {
                let joined = hopeful(pair, RIVALS).into_iter();
                let joined = joined.filter(|&choice| choice != Choice::Apart);
                let idle = hopeful(alone, 1);
                let joined = joined.map(|choice| vec![choice, idle[0]]);
                let apart = hopeful(alone, RIVALS_APART).into_iter();
                let apart = apart.map(|choice| vec![Choice::Apart, choice]);
                joined.chain(apart).collect()
            }
            _ => Vec::new(),
        };
        Self {
            problems: problems.iter().map(|p| p.0).collect(),
            moves,
        }
    }

    /// A lineup with a move made.
    fn after(&self, lineup: &Lineup, made: &[Choice]) -> Lineup {
        let mut after = lineup.clone();
        for (&problem, &choice) in self.problems.iter().zip(made) {
            after[problem] = choice;
        }
        after
    }

    fn of(&self, lineup: &Lineup) -> Vec<Choice> {
        self.problems.iter().map(|&p| lineup[p]).collect()
    }
}

/// Where whole programs are raced.
pub trait Course {
    type Error;

    /// Whether two lineups launch the same.
    fn is_same(&mut self, a: &Lineup, b: &Lineup) -> Result<bool, Self::Error>;

    /// The time of each lineup over the first one's, in turns: a quick look, or a long one. `None` of what is not right
    /// or was given up.
    fn race(&mut self, lineups: &[Lineup], long: bool) -> Result<Vec<Option<f64>>, Self::Error>;
}

/// What was found at a number of tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    pub lineup: Lineup,
    /// For each group, what its moves took, as parts of a run's time with the lineup.
    pub times: Vec<Vec<(Vec<Choice>, f64)>>,
}

/// From a lineup to one that no single move makes faster: of each group the fastest move is made, if it is faster
/// in a quick look and in two long ones.
pub fn descend<C: Course>(
    start: Lineup,
    groups: &[Group],
    course: &mut C,
) -> Result<Found, C::Error> {
    let mut lineup = start;
    let mut times: Vec<Vec<(Vec<Choice>, f64)>> = vec![Vec::new(); groups.len()];
    for round in 0..ROUNDS {
        let mut changed = false;
        for (group, times) in groups.iter().zip(&mut times) {
            let mut lineups = vec![lineup.clone()];
            let mut moves = vec![group.of(&lineup)];
            for made in &group.moves {
                let known = times.iter().find(|(known, _)| known == made);
                if round > 0 && known.is_none_or(|&(_, time)| time > STILL_OPEN) {
                    continue;
                }
                let after = group.after(&lineup, made);
                if !course.is_same(&after, &lineup)? {
                    lineups.push(after);
                    moves.push(made.clone());
                }
            }
            if lineups.len() < 2 {
                continue;
            }
            let raced = course.race(&lineups, false)?;
            for (made, ratio) in moves.iter().zip(&raced) {
                let Some(ratio) = *ratio else { continue };
                match times.iter_mut().find(|(known, _)| known == made) {
                    Some(known) => known.1 = ratio,
                    None => times.push((made.clone(), ratio)),
                }
            }
            let ratios = raced.iter().enumerate().skip(1);
            let ratios = ratios.filter_map(|(at, ratio)| ratio.map(|ratio| (at, ratio)));
            let Some((best, ratio)) = ratios.min_by(|a, b| a.1.total_cmp(&b.1)) else {
                continue;
            };
            let mut is_faster = ratio < 1.0 - WORTH_A_CHANGE;
            let mut least = ratio;
            for _ in 0..2 {
                if is_faster {
                    let duel = [lineup.clone(), lineups[best].clone()];
                    let ratio = course.race(&duel, true)?[1];
                    is_faster = ratio.is_some_and(|ratio| ratio < 1.0 - WORTH_A_CHANGE);
                    least = ratio.unwrap_or(least);
                }
            }
            // What the long looks say of it holds, whether it is taken or not.
            if let Some(known) = times.iter_mut().find(|(known, _)| *known == moves[best]) {
                known.1 = least;
            }
            if is_faster {
                for (_, time) in times.iter_mut() {
                    *time /= least;
                }
                lineup = lineups[best].clone();
                changed = true;
            }
        }
        if !changed {
            break;
        }
    }
    Ok(Found { lineup, times })
}

/// What a run takes with each choice of a group's problem, the others of the group as they then are best.
pub fn times_of(found: &Found, group: usize, place: usize) -> Vec<(Choice, f64)> {
    let mut times: Vec<(Choice, f64)> = Vec::new();
    for (made, time) in &found.times[group] {
        // Of two launches the kernel does not matter where both are one.
        if place > 0 && made[0] != Choice::Apart {
            continue;
        }
        match times.iter_mut().find(|(choice, _)| *choice == made[place]) {
            Some(known) => known.1 = known.1.min(*time),
            None => times.push((made[place], *time)),
        }
    }
    times
}

/// Ranges by which one choice serves all sizes that it can, and another the rest.
pub fn alone(problem: &Problem, choice: Choice) -> Vec<Range> {
    let range = Range {
        up_to: choice.most(),
        choice,
    };
    if range.up_to.is_none() {
        return vec![range];
    }
    let rest = problem.guess().into_iter().next_back();
    [Some(range), rest].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests;
