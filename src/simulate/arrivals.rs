//! Synthetic load: requests arrive at random at a given rate, and their lengths follow a
//! distribution.

use std::{fmt, str::FromStr};

use rand_distr::{Distribution, Exp1, StandardNormal, Uniform};
use rand_pcg::Pcg64;

use crate::schedule::{Micros, Waiting};

/// Distribution of the lengths of requests, in tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum Lengths {
    /// A normal distribution, rounded to whole tokens. A value outside `least..=most` is drawn again, up to 1000 times; then the mean is
    /// used.
    Normal {
        least: u32,
        most: u32,
        mean: f64,
        deviation: f64,
    },
    Uniform {
        least: u32,
        most: u32,
    },
    Fixed(u32),
}

/// Arrival rates to simulate, one after another, in requests per second.
#[derive(Clone, Debug, PartialEq)]
pub struct Rates(pub Vec<f64>);

/// An error in the description of a load.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LoadError {
    #[error(
        "`{text}` is not a distribution of lengths: {problem}; expected normal:MIN,MAX,MEAN,DEVIATION, uniform:MIN,MAX or fixed:N, in tokens"
    )]
    Lengths { text: String, problem: String },
    #[error(
        "`{text}` is not a list of rates: {problem}; expected A..B, A..B/N for N rates, or a list such as 20,60,98, in requests a second"
    )]
    Rates { text: String, problem: String },
}

/// Maximum length of a simulated request, in tokens.
const LONGEST: u32 = 1 << 20;
const MAX_RATES: usize = 256;
const MAX_RATE: f64 = 1e7;
/// Number of rates in `A..B` without `/N`.
const DEFAULT_RATES: usize = 12;

impl FromStr for Lengths {
    type Err = LoadError;

    fn from_str(text: &str) -> Result<Self, LoadError> {
        let wrong = |problem: String| LoadError::Lengths {
            text: text.to_owned(),
            problem,
        };
        let (kind, numbers) = text
            .split_once(':')
            .ok_or_else(|| wrong("it has no colon".to_owned()))?;
        let numbers: Vec<f64> = numbers
            .split(',')
            .map(|number| number.trim().parse().ok().filter(|n: &f64| n.is_finite()))
            .collect::<Option<_>>()
            .ok_or_else(|| wrong(format!("`{numbers}` is not a list of numbers")))?;
        let length = |n: f64| match n.fract() == 0.0 && (1.0..=f64::from(LONGEST)).contains(&n) {
            true => Ok(n as u32),
            false => Err(wrong(format!(
                "{n} is not a whole number from 1 to {LONGEST}"
            ))),
        };
        let range = |least, most| match (length(least)?, length(most)?) {
            (least, most) if least <= most => Ok((least, most)),
            (least, most) => Err(wrong(format!(
                "the minimum {least} is above the maximum {most}"
            ))),
        };
        match (kind, numbers.as_slice()) {
            ("fixed", &[n]) => Ok(Self::Fixed(length(n)?)),
            ("uniform", &[least, most]) => {
                let (least, most) = range(least, most)?;
                Ok(Self::Uniform { least, most })
            }
            ("normal", &[least, most, mean, deviation]) => {
                let (least, most) = range(least, most)?;
                if !(f64::from(least)..=f64::from(most)).contains(&mean) {
                    return Err(wrong(format!("the mean {mean} is outside the range")));
                }
                if deviation < 0.0 {
                    return Err(wrong(format!("the deviation {deviation} is negative")));
                }
                Ok(Self::Normal {
                    least,
                    most,
                    mean,
                    deviation,
                })
            }
            ("normal" | "uniform" | "fixed", numbers) => {
                Err(wrong(format!("it has {} numbers", numbers.len())))
            }
            _ => Err(wrong(format!("`{kind}` is not a distribution"))),
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(n) => write!(f, "fixed:{n}"),
            Self::Uniform { least, most } => write!(f, "uniform:{least},{most}"),
            Self::Normal {
                least,
                most,
                mean,
                deviation,
            } => write!(f, "normal:{least},{most},{mean},{deviation}"),
        }
    }
}

impl FromStr for Rates {
    type Err = LoadError;

    fn from_str(text: &str) -> Result<Self, LoadError> {
        let wrong = |problem: String| LoadError::Rates {
            text: text.to_owned(),
            problem,
        };
        let rate = |text: &str| {
            let rate = text.trim().parse::<f64>().ok();
            rate.filter(|rate| (1e-3..=MAX_RATE).contains(rate))
                .ok_or_else(|| wrong(format!("`{text}` is not a number from 0.001 to {MAX_RATE}")))
        };
        let Some((from, to)) = text.split_once("..") else {
            let rates = text.split(',').map(rate).collect::<Result<Vec<_>, _>>()?;
            return match rates.len() <= MAX_RATES {
                true => Ok(Self(rates)),
                false => Err(wrong(format!("there are more than {MAX_RATES}"))),
            };
        };
        let (to, n) = match to.split_once('/') {
            None => (to, DEFAULT_RATES),
            Some((to, n)) => {
                let n = n.parse().ok().filter(|n| (2..=MAX_RATES).contains(n));
                let n = n.ok_or_else(|| wrong(format!("N must be from 2 to {MAX_RATES}")))?;
                (to, n)
            }
        };
        let (from, to) = (rate(from)?, rate(to)?);
        if from >= to {
            return Err(wrong(format!("{from} is not below {to}")));
        }
        let step = (to / from).ln() / (n as f64 - 1.0);
        // The first and the last rate are exact. The rates between them continue a geometric sequence, and are rounded to three significant
        // digits.
        let between = (1..n - 1).map(|i| three_digits(from * (step * i as f64).exp()));
        Ok(Self(
            [from].into_iter().chain(between).chain([to]).collect(),
        ))
    }
}

fn three_digits(value: f64) -> f64 {
    let unit = 10_f64.powf(value.log10().floor() - 2.0);
    (value / unit).round() * unit
}

/// Parameters of a synthetic load: requests of one class and tenant, whose arrivals are a Poisson process.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Arrival rate, in requests per second.
    pub rate: f64,
    /// Number of requests.
    pub requests: usize,
    pub lengths: Lengths,
    /// Number of forward passes of each request.
    pub steps: u32,
    /// Range of the random time (uniform distribution) from a request's arrival to its deadline; `None` for requests without deadlines.
    pub deadlines: Option<(Micros, Micros)>,
    /// Seed of the random streams. Equal seeds give equal arrivals on any machine.
    pub seed: u64,
}

impl Load {
    /// Generates the requests, in order of arrival.
    pub fn arrivals(&self) -> Vec<Waiting> {
        // Times, lengths and deadlines have separate streams, so that a change of one does not
        // change the others.
        let stream = |n: u128| Pcg64::new(u128::from(self.seed), n);
        let (mut times, mut lengths, mut deadlines) = (stream(1), stream(2), stream(3));
        let mut now = 0.0;
        let draw = |_| {
            let gap: f64 = Exp1.sample(&mut times);
            now += gap / self.rate;
            let arrived = Micros::of_seconds(now);
            let within = self.deadlines.map(|(least, most)| {
                let span = Uniform::new_inclusive(least.0.min(most.0), most.0);
                span.map_or(least, |span| Micros(span.sample(&mut deadlines)))
            });
            Waiting {
                deadline: within.map(|span| arrived.plus(span)),
                steps: self.steps,
                ..Waiting::new(self.lengths.draw(&mut lengths), arrived)
            }
        };
        (0..self.requests).map(draw).collect()
    }
}

impl Lengths {
    fn draw(&self, source: &mut Pcg64) -> u32 {
        match *self {
            Self::Fixed(n) => n,
            Self::Uniform { least, most } => {
                let lengths = Uniform::new_inclusive(least, most);
                lengths.map_or(least, |lengths| lengths.sample(source))
            }
            Self::Normal {
                least,
                most,
                mean,
                deviation,
            } => {
                // The mean is within the range, so usually at least about half of the draws are accepted. Limit the number of draws,
                // because far fewer are accepted if the range is narrow.
                for _ in 0..1000 {
                    let normal: f64 = StandardNormal.sample(source);
                    let drawn = (mean + deviation * normal).round();
                    if (f64::from(least)..=f64::from(most)).contains(&drawn) {
                        return drawn as u32;
                    }
                }
                mean.round() as u32
            }
        }
    }
}
