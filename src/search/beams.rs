use super::{candidates::largest, log_sum};

/// How beams are searched, as transformers' `generate` names it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Beams {
    /// Sequences that go on at once, in all groups.
    pub n: usize,
    /// Groups that are searched one after another in each step, and keep apart (Vijayakumar et al. 2016).
    pub groups: usize,
    /// What a token costs for each beam of an earlier group that took it in this step. A group that is done takes none.
    pub diversity: f32,
    /// A sequence's score is its log-probability over its length to this power.
    pub length_penalty: f32,
    pub early_stopping: EarlyStopping,
}

/// When the search ends that has as many ended sequences as beams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EarlyStopping {
    /// When the best beam, were it to end now, is no better than the worst of them.
    Heuristic,
    /// At once.
    Yes,
    /// When no beam can become better than the worst of them.
    Never,
}

/// Settings that search nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BeamsError {
    #[error("{n} beams; expected at least one")]
    None { n: usize },
    #[error("{n} beams; expected at most {}", Beams::MAX)]
    TooMany { n: usize },
    #[error("{n} beams in {groups} groups; expected groups of one number of beams each")]
    Groups { n: usize, groups: usize },
    #[error("the diversity is {found}; expected a number from 0 on")]
    Diversity { found: f32 },
    #[error("the length penalty is {found}; expected a finite number")]
    LengthPenalty { found: f32 },
}

impl Default for Beams {
    /// One beam.
    fn default() -> Self {
        Self::of(1)
    }
}

impl Beams {
    /// Maximum number of beams: a step of a search holds the logits of all.
    pub const MAX: usize = 256;

    /// One group of `n` beams.
    pub fn of(n: usize) -> Self {
        Self {
            n,
            groups: 1,
            diversity: 0.0,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::Heuristic,
        }
    }

    /// Whether every setting can be.
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

/// A sequence that ended, or did not when the search did.
#[derive(Clone, Debug, PartialEq)]
pub struct Hypothesis {
    /// New tokens, the one that ended it included.
    pub tokens: Vec<u32>,
    pub score: f32,
}

/// What is far below every score.
const NEVER: f32 = -1e9;

/// Where a beam goes on from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The beam whose tokens come before.
    pub parent: usize,
    pub token: u32,
}

/// Where one of the best sequences comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// It was there before, in this place.
    Before(usize),
    /// It is a beam's tokens and one more.
    New(Step),
}

/// The scores of one request's beams, without their tokens, as `_beam_search` of transformers 5 keeps them. What belongs to beam
/// `i` and to the best sequence in place `i` lies at `i`; groups lie one behind another. Transformers 5 has no groups: several end
/// as the `BeamSearchScorer` of transformers 4 lets them.
#[derive(Clone, Debug, PartialEq)]
pub struct Standing {
    /// Summed log-probability of each beam.
    pub running: Vec<f32>,
    /// The best so far of each group, in order, and whether each has ended.
    pub best: Vec<(f32, bool)>,
    /// Groups that are done.
    pub done: Vec<bool>,
}

/// What a step of all groups gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Stepped {
    /// How each beam goes on. Those of a group that is done stand still.
    pub steps: Vec<Step>,
    /// What is in each place of the best now.
    pub kept: Vec<Kept>,
}

/// What a step knows besides the candidates.
#[derive(Clone, Copy, Debug)]
pub struct Ending<'a> {
    /// Tokens that end a sequence.
    pub ends: &'a [u32],
    /// New tokens, with this step's.
    pub n_new: usize,
    /// New tokens at most.
    pub most: usize,
}

/// A candidate for a beam: its score, the beam before, and its token.
type Candidate = (f32, usize, u32);

impl Beams {
    fn of_group(&self) -> usize {
        self.n / self.groups.max(1)
    }

    /// Candidates of all beams of a group that count.
    pub fn kept(&self, n_ends: usize) -> usize {
        2.max(1 + n_ends) * self.of_group()
    }

    /// The most probable tokens of a beam, by what they are without the diversity, among which all are that can count: so many of
    /// them can be less probable by it as other groups have beams.
    pub fn candidates(&self, n_ends: usize) -> usize {
        self.kept(n_ends) + self.n - self.of_group()
    }
}

impl Standing {
    pub fn new(options: &Beams) -> Self {
        let of_group = options.of_group();
        // Only the first beam's tokens count in the first step: the others are the same.
        let running = (0..options.n).map(|i| match i.is_multiple_of(of_group) {
            true => 0.0,
            false => NEVER,
        });
        Self {
            running: running.collect(),
            best: vec![(NEVER, false); options.n],
            done: vec![false; options.groups],
        }
    }

    /// Goes on by the most probable tokens of each beam, with their log-probabilities: `tokens` gives them for a beam, of which
    /// [`Beams::kept`] count, when it is known what earlier groups have taken in this step.
    pub fn step(
        &mut self,
        options: &Beams,
        mut tokens: impl FnMut(usize, &[u32]) -> Vec<(u32, f32)>,
        ending: Ending,
    ) -> Stepped {
        let of_group = options.of_group();
        let stay = |parent| Step { parent, token: 0 };
        let mut stepped = Stepped {
            steps: (0..options.n).map(stay).collect(),
            kept: (0..options.n).map(Kept::Before).collect(),
        };
        // Tokens of earlier groups in this step.
        let mut taken: Vec<u32> = Vec::new();
        for group in 0..options.groups {
            if self.done[group] {
                continue;
            }
            let mut candidates: Vec<Candidate> = Vec::new();
            for beam in group * of_group..(group + 1) * of_group {
                let of_beam = tokens(beam, &taken).into_iter();
                candidates.extend(of_beam.map(|(id, x)| (x + self.running[beam], beam, id)));
            }
            by_score(&mut candidates);
            candidates.truncate(options.kept(ending.ends.len()));
            if candidates.is_empty() {
                // The rules allow nothing: what has ended is all that there is.
                self.done[group] = true;
                continue;
            }
            self.advance(group, &candidates, options, ending, &mut stepped);
            let steps = &stepped.steps[group * of_group..][..of_group];
            taken.extend(steps.iter().map(|step| step.token));
        }
        stepped
    }

    /// Whether all groups are done.
    pub fn is_done(&self) -> bool {
        self.done.iter().all(|&done| done)
    }

    /// One group's part of a step.
    fn advance(
        &mut self,
        group: usize,
        candidates: &[Candidate],
        options: &Beams,
        ending: Ending,
        stepped: &mut Stepped,
    ) {
        let Ending { ends, n_new, most } = ending;
        let n = options.of_group();
        let first = group * n;
        let is_end = |&(_, _, token): &Candidate| ends.contains(&token);
        let is_end: Vec<bool> = candidates.iter().map(is_end).collect();
        let is_last = n_new == most;
        let behind = |&(_, parent, token): &Candidate| Step { parent, token };
        // What ends now does not go on.
        let mut going: Vec<(f32, usize)> = candidates
            .iter()
            .zip(&is_end)
            .enumerate()
            .map(|(i, ((score, ..), &end))| (if end { score + NEVER } else { *score }, i))
            .collect();
        going.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        going.truncate(n);
        // Where fewer tokens may come than there are beams, the rest are dead.
        let dead = (f32::NEG_INFINITY, going[0].1);
        going.resize(n, dead);
        for (i, &(score, candidate)) in going.iter().enumerate() {
            self.running[first + i] = score;
            stepped.steps[first + i] = behind(&candidates[candidate]);
        }
        let places = first..first + n;
        let n_ended = self.best[places.clone()].iter().filter(|(_, e)| *e).count();
        let stops_when_full = options.early_stopping == EarlyStopping::Yes;
        let is_full = n_ended == n && stops_when_full;
        let n_ends = is_end.iter().take(n).filter(|&&end| end).count();
        let becomes_full = n_ended + n_ends >= n && stops_when_full;
        let n_open = |i: usize| is_end[..i].iter().filter(|&&end| !end).count();
        let just_ended = |i: usize| match is_end[i] || options.groups == 1 {
            // Only the first n candidates may end; the others are there to go on.
            true => (is_end[i] || is_last) && i < n,
            // In the last step of one of several groups, all that goes on ends, too, unless the group is full without.
            false => is_last && n_open(i) < n && !becomes_full,
        };
        let length = (n_new as f32).powf(options.length_penalty);
        let ended = candidates.iter().enumerate().map(|(i, candidate)| {
            let just_ended = just_ended(i);
            let mut score = candidate.0 / length;
            for never in [is_full, !just_ended] {
                score += if never { NEVER } else { 0.0 };
            }
            (score, just_ended, Kept::New(behind(candidate)))
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
            // `BeamSearchScorer` takes the best candidate, even if it ends.
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

/// The largest scores first; of equal ones the earlier beam's, then the lower token's.
fn by_score(candidates: &mut [Candidate]) {
    candidates.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
}

/// The beams of one request.
#[derive(Clone, Debug)]
pub struct BeamSearch {
    options: Beams,
    standing: Standing,
    /// New tokens of each beam.
    running: Vec<Vec<u32>>,
    /// Those of the best, by place; empty where there is none yet.
    best: Vec<Vec<u32>>,
    n_new: usize,
}

impl BeamSearch {
    pub fn new(options: Beams) -> Self {
        Self {
            standing: Standing::new(&options),
            running: vec![Vec::new(); options.n],
            best: vec![Vec::new(); options.n],
            options,
            n_new: 0,
        }
    }

    /// Takes the logits behind each beam, in the order of the beams, and says how each goes on; `None` when the search is at
    /// its end. `rules` changes log-probabilities behind a beam's new tokens before they count, and after the diversity; `ends` are
    /// tokens that end a sequence, and `most` is how many tokens are new at most.
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
        let behind = |step: &Step| -> Vec<u32> {
            let tokens = self.running[step.parent].iter().copied();
            tokens.chain([step.token]).collect()
        };
        let best = stepped.kept.iter().map(|kept| match kept {
            Kept::Before(place) => self.best[*place].clone(),
            Kept::New(step) => behind(step),
        });
        let best = best.collect();
        let running = stepped.steps.iter().map(behind).collect();
        (self.best, self.running) = (best, running);
        (!self.standing.is_done()).then_some(stepped.steps)
    }

    /// The best sequences of all groups, the best first.
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
    /// Those that have tokens, the best first.
    pub fn sorted(mut all: Vec<Self>) -> Vec<Self> {
        all.retain(|h| !h.tokens.is_empty());
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        all
    }
}
