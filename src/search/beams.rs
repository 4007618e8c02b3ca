use super::{candidates::largest, log_sum};

/// Beam search options, as in `generate` of the library transformers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Beams {
    /// Number of beams in all groups together.
    pub n: usize,
    /// Number of groups. In each step, the groups are searched in order, and each group avoids the tokens that earlier groups have chosen
    /// (Vijayakumar et al. 2016).
    pub groups: usize,
    /// Amount subtracted from a token's log-probability for each beam of an earlier group that chose the token in the same step. Finished
    /// groups choose no tokens.
    pub diversity: f32,
    /// Exponent of the length in the score: log-probability / length^`length_penalty`.
    pub length_penalty: f32,
    pub early_stopping: EarlyStopping,
}

/// Condition for ending the search once the number of finished hypotheses is the number of beams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EarlyStopping {
    /// End if the best beam, scored with its current length, does not beat the worst hypothesis.
    Heuristic,
    /// End at once.
    Yes,
    /// End if no beam can ever beat the worst hypothesis.
    Never,
}

/// Invalid beam search options.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BeamsError {
    #[error("{n} beams; expected at least one")]
    None { n: usize },
    #[error("{n} beams; expected at most {}", Beams::MAX)]
    TooMany { n: usize },
    #[error(
        "{n} beams do not divide into {groups} groups; expected a number of groups that divides the number of beams"
    )]
    Groups { n: usize, groups: usize },
    #[error("the diversity is {found}; expected a number of at least 0")]
    Diversity { found: f32 },
    #[error("the length penalty is {found}; expected a finite number")]
    LengthPenalty { found: f32 },
}

impl Default for Beams {
    /// Returns options with one beam.
    fn default() -> Self {
        Self::of(1)
    }
}

impl Beams {
    /// Maximum number of beams. It bounds memory, because a step of a search holds the logits of all beams.
    pub const MAX: usize = 256;

    /// Creates options with one group of `n` beams.
    pub fn of(n: usize) -> Self {
        Self {
            n,
            groups: 1,
            diversity: 0.0,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::Heuristic,
        }
    }

    /// Checks that every option is valid.
    ///
    /// # Errors
    /// Returns an error if an option is invalid. The error names the first invalid option.
    pub fn check(&self) -> Result<(), BeamsError> {
        let (n, groups) = (self.n, self.groups);
        if n == 0 {
            return Err(BeamsError::None { n });
        }
        if n > Self::MAX {
            return Err(BeamsError::TooMany { n });
        }
        if groups == 0 || !n.is_multiple_of(groups) {
            return Err(BeamsError::Groups { n, groups });
        }
        if !(self.diversity.is_finite() && self.diversity >= 0.0) {
            return Err(BeamsError::Diversity {
                found: self.diversity,
            });
        }
        match self.length_penalty.is_finite() {
            true => Ok(()),
            false => Err(BeamsError::LengthPenalty {
                found: self.length_penalty,
            }),
        }
    }
}

/// A finished hypothesis, or one still unfinished when the search stopped.
#[derive(Clone, Debug, PartialEq)]
pub struct Hypothesis {
    /// New tokens, including the end token.
    pub tokens: Vec<u32>,
    pub score: f32,
}

/// Added to a score, or used as a score, to rank a hypothesis below all others.
const NEVER: f32 = -1e9;

/// Continuation of a beam.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Index of the beam that is continued.
    pub parent: usize,
    pub token: u32,
}

/// Origin of one of the best hypotheses after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// The hypothesis was already one of the best, at this index.
    Before(usize),
    /// A beam continued by one token.
    New(Step),
}

/// Scores of the beams of one request, without their tokens. With one group, the search works as `_beam_search` in version 5 of the library
/// transformers. Version 5 does not support several groups, so a search with several groups ends by the rules of `BeamSearchScorer` in
/// version 4. In each list of beams or hypotheses, entry `i` belongs to beam `i` or to hypothesis `i`, and the entries of a group are
/// contiguous.
#[derive(Clone, Debug, PartialEq)]
pub struct BeamState {
    /// Sum of the log-probabilities of each beam.
    pub running: Vec<f32>,
    /// Score of each of the best hypotheses, and whether it is finished. The hypotheses of a group are contiguous, best first.
    pub best: Vec<(f32, bool)>,
    /// Whether each group is done.
    pub done: Vec<bool>,
}

/// Result of one step, for all groups.
#[derive(Clone, Debug, PartialEq)]
pub struct Stepped {
    /// Continuation of each beam. Beams of a finished group do not change.
    pub steps: Vec<Step>,
    /// Origin of each of the new best hypotheses.
    pub kept: Vec<Kept>,
}

/// Inputs of a step. They determine which beams end.
#[derive(Clone, Copy, Debug)]
pub struct Ending<'a> {
    /// End tokens.
    pub ends: &'a [u32],
    /// Number of new tokens after the step.
    pub n_new: usize,
    /// Maximum number of new tokens.
    pub most: usize,
}

/// A beam continued by one token: the score, the index of the continued beam, and the token.
type Candidate = (f32, usize, u32);

impl Beams {
    fn group_size(&self) -> usize {
        self.n / self.groups.max(1)
    }

    /// Returns the number of candidates that a group considers, for all of its beams together. `n_ends` is the number of end tokens.
    pub fn kept(&self, n_ends: usize) -> usize {
        2.max(1 + n_ends) * self.group_size()
    }

    /// Returns how many of the most probable tokens of each beam to examine before the diversity penalty is applied: [`kept`](Self::kept)
    /// tokens, plus one for each beam of the other groups, because each of those beams can penalize one token.
    pub fn candidates(&self, n_ends: usize) -> usize {
        self.kept(n_ends) + self.n - self.group_size()
    }
}

impl BeamState {
    pub fn new(options: &Beams) -> Self {
        let group_size = options.group_size();
        // In the first step, only the first beam of a group is used, because all beams are equal.
        let running = (0..options.n).map(|i| match i.is_multiple_of(group_size) {
            true => 0.0,
            false => NEVER,
        });
        Self {
            running: running.collect(),
            best: vec![(NEVER, false); options.n],
            done: vec![false; options.groups],
        }
    }

    /// Advances all beams by one token. `tokens(beam, taken)` returns the most probable tokens of a beam with their log-probabilities.
    /// `taken` has the tokens that earlier groups have chosen in the same step. Each group considers its best [`Beams::kept`] candidates.
    pub fn step(
        &mut self,
        options: &Beams,
        mut tokens: impl FnMut(usize, &[u32]) -> Vec<(u32, f32)>,
        ending: Ending,
    ) -> Stepped {
        let group_size = options.group_size();
        let stay = |parent| Step { parent, token: 0 };
        let mut stepped = Stepped {
            steps: (0..options.n).map(stay).collect(),
            kept: (0..options.n).map(Kept::Before).collect(),
        };
        // Tokens that earlier groups have chosen in the current step.
        let mut taken: Vec<u32> = Vec::new();
        for group in 0..options.groups {
            if self.done[group] {
                continue;
            }
            let mut candidates: Vec<Candidate> = Vec::new();
            for beam in group * group_size..(group + 1) * group_size {
                let of_beam = tokens(beam, &taken).into_iter();
                candidates.extend(of_beam.map(|(id, x)| (x + self.running[beam], beam, id)));
            }
            by_score(&mut candidates);
            candidates.truncate(options.kept(ending.ends.len()));
            if candidates.is_empty() {
                // The rules allow no token: only the finished hypotheses remain.
                self.done[group] = true;
                continue;
            }
            self.advance(group, &candidates, options, ending, &mut stepped);
            let steps = &stepped.steps[group * group_size..][..group_size];
            taken.extend(steps.iter().map(|step| step.token));
        }
        stepped
    }

    /// Returns whether all groups are done.
    pub fn is_done(&self) -> bool {
        self.done.iter().all(|&done| done)
    }

    /// Advances one group.
    fn advance(
        &mut self,
        group: usize,
        candidates: &[Candidate],
        options: &Beams,
        ending: Ending,
        stepped: &mut Stepped,
    ) {
        let Ending { ends, n_new, most } = ending;
        let n = options.group_size();
        let first = group * n;
        let is_end = |&(_, _, token): &Candidate| ends.contains(&token);
        let is_end: Vec<bool> = candidates.iter().map(is_end).collect();
        let is_last = n_new == most;
        let to_step = |&(_, parent, token): &Candidate| Step { parent, token };
        // A candidate with an end token is ranked last, so that it is not continued.
        let mut going: Vec<(f32, usize)> = candidates
            .iter()
            .zip(&is_end)
            .enumerate()
            .map(|(i, ((score, ..), &end))| (if end { score + NEVER } else { *score }, i))
            .collect();
        going.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        going.truncate(n);
        // If there are fewer candidates than beams, the remaining beams have the score −∞.
        let dead = (f32::NEG_INFINITY, going[0].1);
        going.resize(n, dead);
        for (i, &(score, candidate)) in going.iter().enumerate() {
            self.running[first + i] = score;
            stepped.steps[first + i] = to_step(&candidates[candidate]);
        }
        let places = first..first + n;
        let n_ended = self.best[places.clone()].iter().filter(|(_, e)| *e).count();
        let stops_when_full = options.early_stopping == EarlyStopping::Yes;
        let is_full = n_ended == n && stops_when_full;
        let n_ends = is_end.iter().take(n).filter(|&&end| end).count();
        let becomes_full = n_ended + n_ends >= n && stops_when_full;
        let n_open = |i: usize| is_end[..i].iter().filter(|&&end| !end).count();
        let just_ended = |i: usize| match is_end[i] || options.groups == 1 {
            // Only the first `n` candidates may become finished hypotheses. The others may only continue beams.
            true => (is_end[i] || is_last) && i < n,
            // With several groups, the first `n` candidates without an end token become finished hypotheses in the last step, unless
            // candidates with end tokens already complete the group (`becomes_full`).
            false => is_last && n_open(i) < n && !becomes_full,
        };
        let length = (n_new as f32).powf(options.length_penalty);
        let ended = candidates.iter().enumerate().map(|(i, candidate)| {
            let just_ended = just_ended(i);
            let mut score = candidate.0 / length;
            for never in [is_full, !just_ended] {
                score += if never { NEVER } else { 0.0 };
            }
            (score, just_ended, Kept::New(to_step(candidate)))
        });
        let before = places.clone().map(|place| {
            let (score, ended) = self.best[place];
            (score, ended, Kept::Before(place))
        });
        let mut best: Vec<(f32, bool, Kept)> = before.chain(ended).collect();
        best.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (place, (score, ended, kept)) in places.clone().zip(best) {
            self.best[place] = (score, ended);
            stepped.kept[place] = kept;
        }
        let best = &self.best[places];
        let longest = match options.early_stopping {
            EarlyStopping::Never if options.length_penalty > 0.0 => most,
            _ => n_new,
        };
        let highest = match options.groups {
            1 => self.running[first],
            // Like `BeamSearchScorer`, uses the best candidate even if its token is an end token.
            _ => candidates[0].0,
        };
        let possible = highest / (longest as f32).powf(options.length_penalty);
        let worst = best.iter().map(|b| b.0).fold(f32::INFINITY, f32::min);
        let is_beaten = |(_, ended): &(f32, bool)| possible <= if *ended { worst } else { NEVER };
        let can_improve = !best.iter().all(is_beaten);
        let all_ended = best.iter().all(|(_, ended)| *ended);
        let is_open = !(all_ended && stops_when_full);
        let goes_on = !is_last && !is_end.iter().all(|&end| end);
        self.done[group] = !(can_improve && is_open && goes_on);
    }
}

/// Sorts by descending score; ties by beam, then by token.
fn by_score(candidates: &mut [Candidate]) {
    candidates.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
}

/// Beam search for one request.
#[derive(Clone, Debug)]
pub struct BeamSearch {
    options: Beams,
    standing: BeamState,
    /// New tokens of each beam.
    running: Vec<Vec<u32>>,
    /// New tokens of each of the best hypotheses; empty if there is no hypothesis at this index.
    best: Vec<Vec<u32>>,
    n_new: usize,
}

impl BeamSearch {
    pub fn new(options: Beams) -> Self {
        Self {
            standing: BeamState::new(&options),
            running: vec![Vec::new(); options.n],
            best: vec![Vec::new(); options.n],
            options,
            n_new: 0,
        }
    }

    /// Advances the search by one token, given the logits of each beam in order. Returns the continuation of each beam, or `None` when the
    /// search is done. `rules` modifies a beam's log-probabilities after the diversity penalty; its second argument is the beam's new
    /// tokens. `ends` are the end tokens, and `most` is the maximum number of new tokens.
    pub fn step(
        &mut self,
        logits: &mut [&mut [f32]],
        rules: &dyn Fn(&mut [f32], &[u32]),
        ends: &[u32],
        most: usize,
    ) -> Option<Vec<Step>> {
        self.n_new += 1;
        let n_kept = self.options.kept(ends.len());
        let diversity = self.options.diversity;
        let running = &self.running;
        let of_beam = |beam: usize, taken: &[u32]| {
            let row = &mut *logits[beam];
            let sum = log_sum(row);
            row.iter_mut().for_each(|x| *x -= sum);
            taken.iter().for_each(|&id| row[id as usize] -= diversity);
            rules(row, &running[beam]);
            largest(row, n_kept)
        };
        let ending = Ending {
            ends,
            n_new: self.n_new,
            most,
        };
        let stepped = self.standing.step(&self.options, of_beam, ending);
        let extended = |step: &Step| -> Vec<u32> {
            let tokens = self.running[step.parent].iter().copied();
            tokens.chain([step.token]).collect()
        };
        let best = stepped.kept.iter().map(|kept| match kept {
            Kept::Before(place) => self.best[*place].clone(),
            Kept::New(step) => extended(step),
        });
        let best = best.collect();
        let running = stepped.steps.iter().map(extended).collect();
        (self.best, self.running) = (best, running);
        (!self.standing.is_done()).then_some(stepped.steps)
    }

    /// Returns the best hypotheses of all groups, the best first.
    pub fn hypotheses(&self) -> Vec<Hypothesis> {
        let all = self.best.iter().zip(&self.standing.best);
        let all = all.map(|(tokens, &(score, _))| Hypothesis {
            tokens: tokens.clone(),
            score,
        });
        Hypothesis::sorted(all.collect())
    }
}

impl Hypothesis {
    /// Returns up to `n` of the sorted hypotheses `all`: the first one, and the finished ones among the others. Unfinished hypotheses are
    /// the last ones of `all`. They exist if the rules allow fewer texts than there are beams.
    pub fn best(all: &[Self], n: usize) -> &[Self] {
        let rest = all.iter().skip(1).take(n.saturating_sub(1));
        let is_text = |one: &&Self| one.score > NEVER / 2.0;
        let n_rest = rest.take_while(is_text).count();
        &all[..all.len().min(1 + n_rest)]
    }

    /// Removes hypotheses without tokens and sorts the others, the best first.
    pub fn sorted(mut all: Vec<Self>) -> Vec<Self> {
        all.retain(|h| !h.tokens.is_empty());
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        all
    }
}
