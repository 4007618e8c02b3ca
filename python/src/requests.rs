//! Generation requests. They run step by step, so that signals can be handled between steps.

use std::collections::{HashMap, VecDeque};

use gemmule::{
    Engine, EngineError,
    generate::{
        AdmitError, Event, Failure, GenerateError, Generator, Request, SamplingParams, Ticket,
    },
};

use crate::{
    error::{Error, Result},
    process,
};

/// The requests of one call. A request is admitted when the KV cache has room for it.
pub struct Requests {
    generator: Generator,
    waiting: VecDeque<(usize, Request)>,
    running: HashMap<Ticket, usize>,
    /// Index of each request in the caller's list, for error messages.
    numbers: Vec<usize>,
}

/// The result of a step for one request.
pub enum Step {
    Token(u32),
    Done,
}

impl Requests {
    /// Creates a generator for `requests`: pairs of a request's index in the caller's list and the request. The KV cache has room for all
    /// requests that can run concurrently. `options` are checked once for all requests, so their number of new tokens must be the maximum
    /// over all requests.
    ///
    /// # Errors
    /// Returns an error if an option is invalid regardless of the prompt, or if memory cannot be allocated.
    pub fn new(
        engine: &Engine,
        requests: Vec<(usize, Request)>,
        options: &SamplingParams,
    ) -> Result<Self> {
        process::check()?;
        let lens: Vec<usize> = requests.iter().map(|(_, one)| one.prompt.len()).collect();
        let (numbers, requests): (Vec<usize>, Vec<Request>) = requests.into_iter().unzip();
        let generator = engine.generator(engine.cache_bytes_at_most(&lens, options)?)?;
        generator
            .check_options(options)
            .map_err(GenerateError::from)?;
        Ok(Self {
            generator,
            numbers,
            waiting: requests.into_iter().enumerate().collect(),
            running: HashMap::new(),
        })
    }

    /// Returns whether all requests have ended.
    pub fn are_done(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Ends a request early.
    pub fn stop(&mut self, index: usize) {
        let found = self.running.iter().find(|&(_, &running)| running == index);
        if let Some(ticket) = found.map(|(&ticket, _)| ticket) {
            self.running.remove(&ticket);
            self.generator.cancel(ticket);
        }
    }

    /// Admits requests, computes one step, and returns its results with the indices of their requests.
    ///
    /// # Errors
    /// Returns an error if a request is refused or fails, or if the whole step fails.
    pub fn step(&mut self) -> Result<Vec<(usize, Step)>> {
        process::check()?;
        while let Some((index, request)) = self.waiting.front() {
            match self.generator.admit(request.clone()) {
                Ok(ticket) => {
                    self.running.insert(ticket, *index);
                    self.waiting.pop_front();
                }
                // The KV cache is full. The request is admitted after running requests have ended.
                Err(AdmitError::Full { .. }) => break,
                Err(refused) => {
                    let index = *index;
                    self.waiting.pop_front();
                    return Err(self.failed(index, refused.into()));
                }
            }
        }
        let mut steps = Vec::new();
        for event in self.generator.poll()? {
            let ticket = event.ticket();
            let Some(&index) = self.running.get(&ticket) else {
                continue;
            };
            match event {
                Event::Token { id, .. } => steps.push((index, Step::Token(id))),
                Event::Found { .. } => {}
                Event::Done { .. } => {
                    self.running.remove(&ticket);
                    steps.push((index, Step::Done));
                }
                Event::Failed { problem, .. } => {
                    self.running.remove(&ticket);
                    return Err(self.failed(index, problem));
                }
            }
        }
        Ok(steps)
    }

    fn failed(&self, index: usize, problem: Failure) -> Error {
        let error = EngineError::Generation(problem);
        match self.numbers.len() {
            1 => error.into(),
            _ => Error::Of(format!("text {}", self.numbers[index]), Box::new(error)),
        }
    }
}
