use super::{candidates::largest, log_sum};

/// How beams are searched, as transformers' `generate` names it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Beams {
    /// Sequences that go on at once, in all groups.
    pub n: usize,
    /// Groups that are searched one after another in each step, and keep apart (Vijayakumar et al. 2016).
    pub groups: usize,
    /// What a token costs for each beam of an earlier group that took it in this step.
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
    #[error("{n} beams in {groups} groups; expected groups of one number of beams each")]
    Groups { n: usize, groups: usize },
    #[error("the diversity is {found}; expected a number from 0 on")]
    Diversity { found: f32 },
    #[error("the length penalty is {found}; expected a finite number")]
    LengthPenalty { found: f32 },
}

impl Beams {
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

/// One group of beams of one request, as `_beam_search` of transformers 5 keeps it.
#[derive(Clone, Debug)]
struct Group {
    /// New tokens and summed log-probability of each beam.
    running: Vec<(Vec<u32>, f32)>,
    /// The best so far, in order, and whether each has ended.
    best: Vec<(Hypothesis, bool)>,
    can_improve: bool,
}

/// Where a beam goes on from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The beam whose tokens come before.
    pub parent: usize,
    pub token: u32,
}

/// The beams of one request.
#[derive(Clone, Debug)]
pub struct BeamSearch {
    options: Beams,
    groups: Vec<Group>,
    /// Groups that are done.
    done: Vec<bool>,
    n_new: usize,
}

/// A candidate for a beam: its score, the beam before, and its token.
type Candidate = (f32, usize, u32);

impl BeamSearch {
    pub fn new(options: Beams) -> Self {
        let of_group = options.n / options.groups.max(1);
        let group = Group {
            // Only the first beam's tokens count in the first step: the others are the same.
            running: (0..of_group)
                .map(|i| (Vec::new(), if i == 0 { 0.0 } else { NEVER }))
                .collect(),
            best: vec![
                (
                    Hypothesis {
                        tokens: Vec::new(),
                        score: NEVER
                    },
                    false
                );
                of_group
            ],
            can_improve: true,
        };
        Self {
            options,
            groups: vec![group; options.groups],
            done: vec![false; options.groups],
            n_new: 0,
        }
    }

    /// Takes the logits behind each beam, in the order of the beams, and says how each goes on; `None` when the search is at
    /// its end. `rules` changes log-probabilities behind a beam's new tokens before they count; `ends` are tokens that end a
    /// sequence, and `most` is how many tokens are new at most.
    pub fn step(
        &mut self,
        logits: &mut [&mut [f32]],
        rules: &dyn Fn(&mut [f32], &[u32]),
        ends: &[u32],
        most: usize,
    ) -> Option<Vec<Step>> {
        let of_group = self.options.n / self.options.groups;
        let n_new = self.n_new + 1;
        let mut steps = vec![
            Step {
                parent: 0,
                token: 0
            };
            self.options.n
        ];
        // Tokens of earlier groups in this step.
        let mut taken: Vec<u32> = Vec::new();
        for (nth, group) in self.groups.iter_mut().enumerate() {
            let first = nth * of_group;
            if self.done[nth] {
                // It stands still beside those that go on.
                for (i, step) in steps[first..first + of_group].iter_mut().enumerate() {
                    step.parent = first + i;
                }
                continue;
            }
            let kept = 2.max(1 + ends.len()) * of_group;
            let mut candidates: Vec<Candidate> = Vec::new();
            for (beam, (tokens, score)) in group.running.iter().enumerate() {
                let row = &mut *logits[first + beam];
                let sum = log_sum(row);
                row.iter_mut().for_each(|x| *x -= sum);
                rules(row, tokens);
                for &token in &taken {
                    row[token as usize] -= self.options.diversity;
                }
                let best = largest(row, kept).into_iter();
                candidates.extend(best.map(|(token, x)| (x + score, beam, token)));
            }
            by_score(&mut candidates);
            candidates.truncate(kept);
            if candidates.is_empty() {
                // The rules allow nothing: what has ended is all that there is.
                self.done[nth] = true;
                continue;
            }
            let next = group.advance(&candidates, &self.options, ends, n_new, most);
            self.done[nth] = !next.0;
            for (i, &(parent, token)) in next.1.iter().enumerate() {
                taken.push(token);
                steps[first + i] = Step {
                    parent: first + parent,
                    token,
                };
            }
        }
        self.n_new = n_new;
        (!self.done.iter().all(|&done| done)).then_some(steps)
    }

    /// The best sequences of all groups, the best first.
    pub fn hypotheses(&self) -> Vec<Hypothesis> {
        let all = self.groups.iter().flat_map(|group| &group.best);
        let mut all: Vec<Hypothesis> = all.map(|(h, _)| h.clone()).collect();
        all.retain(|h| !h.tokens.is_empty());
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        all
    }
}

/// The largest scores first; of equal ones the earlier beam's, then the lower token's.
fn by_score(candidates: &mut [Candidate]) {
    candidates.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
}

impl Group {
    /// Whether the search goes on, and the beam and token that each beam goes on with.
    fn advance(
        &mut self,
        candidates: &[Candidate],
        options: &Beams,
        ends: &[u32],
        n_new: usize,
        most: usize,
    ) -> (bool, Vec<(usize, u32)>) {
        let n = self.running.len();
        let stops: Vec<bool> = candidates
            .iter()
            .map(|(_, _, token)| ends.contains(token) || n_new == most)
            .collect();
        let behind = |&(_, beam, token): &Candidate| -> Vec<u32> {
            let tokens = self.running[beam].0.iter().copied();
            tokens.chain([token]).collect()
        };
        // What stops now does not go on.
        let mut going: Vec<(f32, usize)> = candidates
            .iter()
            .zip(&stops)
            .enumerate()
            .map(|(i, ((score, ..), &stop))| (if stop { score + NEVER } else { *score }, i))
            .collect();
        going.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        going.truncate(n);
        // Where fewer tokens may come than there are beams, the rest are dead.
        let dead = (f32::NEG_INFINITY, going[0].1);
        going.resize(n, dead);
        let running: Vec<(Vec<u32>, f32)> = going
            .iter()
            .map(|&(score, i)| (behind(&candidates[i]), score))
            .collect();
        let steps = going
            .iter()
            .map(|&(_, i)| (candidates[i].1, candidates[i].2))
            .collect();
        // Only the first n candidates may end; the others are there to go on.
        let all_ended = self.best.iter().all(|(_, ended)| *ended);
        let is_full = all_ended && options.early_stopping == EarlyStopping::Yes;
        let length = (n_new as f32).powf(options.length_penalty);
        let ended = candidates.iter().enumerate().map(|(i, candidate)| {
            let just_ended = stops[i] && i < n;
            let mut score = candidate.0 / length;
            for never in [is_full, !self.can_improve, !just_ended] {
                score += if never { NEVER } else { 0.0 };
            }
            let tokens = behind(candidate);
            (Hypothesis { tokens, score }, just_ended)
        });
        let mut best: Vec<(Hypothesis, bool)> = self.best.iter().cloned().chain(ended).collect();
        best.sort_by(|a, b| b.0.score.total_cmp(&a.0.score));
        best.truncate(n);
        self.best = best;
        self.running = running;
        let longest = match options.early_stopping {
            EarlyStopping::Never if options.length_penalty > 0.0 => most,
            _ => n_new,
        };
        let possible = self.running[0].1 / (longest as f32).powf(options.length_penalty);
        let worst = self
            .best
            .iter()
            .map(|(h, _)| h.score)
            .fold(f32::INFINITY, f32::min);
        let is_beaten =
            |(_, ended): &(Hypothesis, bool)| possible <= if *ended { worst } else { NEVER };
        self.can_improve &= !self.best.iter().all(is_beaten);
        let all_ended = self.best.iter().all(|(_, ended)| *ended);
        let is_open = !(all_ended && options.early_stopping == EarlyStopping::Yes);
        let goes_on = !stops.iter().all(|&stop| stop);
        (self.can_improve && is_open && goes_on, steps)
    }
}
