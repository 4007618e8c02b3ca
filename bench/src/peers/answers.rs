//! Parsing of the lines that a peer script prints. Lines that are not valid results are rejected
//! with a remark, and the others are kept.

use std::io::{BufRead, BufReader, Read};

use serde::Deserialize;

/// Maximum length of a line, and maximum number of remarks.
const MAX_LINE: u64 = 4096;
const MAX_REMARKS: usize = 50;
/// Maximum time in microseconds, which is one hour. No operator or encoder takes that long.
const MAX_US: f64 = 3.6e9;

/// Results of the peers.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    pub times: Vec<PeerTime>,
    /// Messages about peers that failed, and about invalid lines.
    pub remarks: Vec<String>,
}

/// Time of one peer for one item of the request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PeerTime {
    pub item: usize,
    pub who: String,
    pub us: f64,
}

#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Line {
    Time {
        item: usize,
        who: String,
        us: f64,
    },
    Failed {
        item: usize,
        who: String,
        error: String,
    },
    Done {
        done: usize,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Probe {
    device: String,
    torch: String,
}

impl Answers {
    /// Reads lines to the end of the stream. `items` describes the requested items, and `progress`
    /// receives the number of finished items.
    pub fn read(stream: impl Read, items: &[String], progress: &dyn Fn(usize)) -> Self {
        let mut answers = Self::default();
        let mut stream = BufReader::new(stream);
        let mut line = Vec::new();
        let mut n_dropped = 0;
        loop {
            line.clear();
            match stream.by_ref().take(MAX_LINE).read_until(b'\n', &mut line) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) => {
                    answers
                        .remarks
                        .push(format!("the output ended early: {error}"));
                    break;
                }
            }
            let text = String::from_utf8_lossy(&line);
            if text.trim().is_empty() {
                continue;
            }
            match answer(&text, items.len()) {
                Ok(Line::Time { item, who, us }) => {
                    let who = printable(&who);
                    answers.times.push(PeerTime { item, who, us });
                }
                Ok(Line::Done { done }) => progress(done),
                refused if answers.remarks.len() >= MAX_REMARKS => {
                    n_dropped += 1;
                    drop(refused);
                }
                Ok(Line::Failed { item, who, error }) => answers.remarks.push(format!(
                    "no time of `{}` for {}: {}",
                    printable(&who),
                    items[item],
                    printable(&error)
                )),
                Err(why) => answers.remarks.push(format!(
                    "a line of the peers is invalid ({why}): {}",
                    printable(&text)
                )),
            }
        }
        if n_dropped > 0 {
            answers.remarks.push(format!("and {n_dropped} more"));
        }
        answers
    }
}

fn answer(text: &str, n_items: usize) -> Result<Line, String> {
    if text.len() as u64 >= MAX_LINE {
        return Err(format!("longer than {MAX_LINE} bytes"));
    }
    let line: Line = serde_json::from_str(text).map_err(|error| error.to_string())?;
    match &line {
        Line::Time { item, .. } | Line::Failed { item, .. } if *item >= n_items => {
            Err(format!("item {item} of {n_items}"))
        }
        Line::Done { done } if *done > n_items => Err(format!("{done} of {n_items} items done")),
        Line::Time { us, .. } if !(*us > 0.0 && *us < MAX_US) => Err(format!(
            "a time of {us} us; expected more than 0, less than an hour"
        )),
        Line::Time { who, .. } | Line::Failed { who, .. } if who.trim().is_empty() => {
            Err("no peer is named".to_owned())
        }
        _ => Ok(line),
    }
}

/// Parses the device and the version of PyTorch from the response to a probe.
pub(super) fn probe_line(text: &str) -> Option<String> {
    let probe: Probe = serde_json::from_str(text.lines().next()?).ok()?;
    let (torch, device) = (printable(&probe.torch), printable(&probe.device));
    Some(format!("PyTorch {torch} on {device}"))
}

/// Prepares the output of another program for a terminal: one line without control characters, truncated if it is long.
pub(super) fn printable(text: &str) -> String {
    const MAX: usize = 400;
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    let mut shown: String = text.trim().chars().map(clean).take(MAX).collect();
    if text.trim().chars().nth(MAX).is_some() {
        shown.push('…');
    }
    shown
}
