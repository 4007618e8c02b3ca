use std::{
    collections::BTreeMap,
    io::Write,
    ops::ControlFlow,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use miette::{Report, miette};
use serde_json::json;

use super::{
    Outcome,
    input::{self, Source},
    model::{Runnable, cache_of},
    numbers::up_to,
    print, print_json, say,
};
use crate::{
    generate::{Event, Generation, MAX_TOKENS, Reason, SamplingParams, Stop, generation_config_of},
    search::{Beams, EarlyStopping, Sampling},
    text::{ChatOptions, ChatTemplate, Folder, Json, Message, StreamDecoder, TextEncoder},
};

#[derive(clap::Args)]
#[command(allow_negative_numbers = true)]
pub(super) struct Args {
    #[command(flatten)]
    model: Runnable,
    /// A prompt (repeat for several)
    #[arg(
        long = "prompt",
        value_name = "TEXT",
        required_unless_present = "prompts_file",
        allow_hyphen_values = true
    )]
    prompts: Vec<String>,
    /// A file with one prompt per line
    #[arg(long, value_name = "FILE", conflicts_with = "prompts")]
    prompts_file: Option<PathBuf>,
    /// Treat each prompt as a user message of a conversation, rendered with the checkpoint's chat template, and print only the reply
    #[arg(long)]
    chat: bool,
    /// System message of the conversation
    #[arg(
        long,
        value_name = "TEXT",
        requires = "chat",
        allow_hyphen_values = true
    )]
    system: Option<String>,
    /// Variables for the chat template, as a JSON object such as '{"enable_thinking": false}'
    #[arg(long, value_name = "JSON", requires = "chat")]
    chat_template_kwargs: Option<String>,
    /// Max number of new tokens; by default the limit in generation_config.json, or else all remaining positions of the model and the KV
    /// cache
    #[arg(long, value_name = "N", value_parser = up_to(MAX_TOKENS))]
    max_new: Option<usize>,
    /// Sample tokens instead of taking the most probable token; implied by --top-k, --top-p, --min-p and --temperature
    #[arg(long)]
    sample: bool,
    /// Sample from the K most probable tokens; 0 for all
    #[arg(long, value_name = "K", value_parser = up_to(MAX_TOKENS))]
    top_k: Option<usize>,
    /// Sample from the most probable tokens whose probabilities add up to this
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Only sample tokens whose probability is at least P times that of the most probable token
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Sampling temperature: below 1 favors probable tokens, above 1 flattens the distribution
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Seed for sampling
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    seed: u64,
    /// Use beam search with N beams
    #[arg(long, value_name = "N", value_parser = up_to(Beams::MAX), conflicts_with_all = ["sample", "top_k", "top_p", "min_p", "temperature", "stream"])]
    beams: Option<usize>,
    /// Split the beams into N groups that differ from each other (diverse beam search)
    #[arg(long, value_name = "N", value_parser = up_to(Beams::MAX))]
    groups: Option<usize>,
    /// Penalty on the score of a token for each beam of an earlier group that chose the same token in this step
    #[arg(long, value_name = "X")]
    diversity: Option<f32>,
    /// Length penalty: a score is the log-probability divided by the length to this power
    #[arg(long, value_name = "A", allow_hyphen_values = true)]
    length_penalty: Option<f32>,
    /// When to end beam search once it has found as many finished texts as it has beams: yes (at once), no (if no unfinished beam, with its
    /// current score, beats the worst of these texts), or never (if no unfinished beam can ever beat the worst of these texts)
    #[arg(long, value_name = "yes|no|never", num_args = 0..=1, default_missing_value = "yes")]
    early_stopping: Option<Early>,
    /// Repetition penalty; a value above 1 makes tokens that have occurred less probable
    #[arg(long, value_name = "R")]
    repetition_penalty: Option<f32>,
    /// Force this first new token, for example a language token
    #[arg(long, value_name = "TOKEN")]
    forced_bos: Option<String>,
    /// Never repeat a sequence of N tokens
    #[arg(long, value_name = "N", value_parser = up_to(MAX_TOKENS))]
    no_repeat_ngram: Option<usize>,
    /// Stop before this text (repeat for several)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Print the text while it is generated; only for a single prompt
    #[arg(long)]
    stream: bool,
    /// Print the tokens and texts, and why each text ended, as JSON
    #[arg(long, conflicts_with = "stream")]
    json: bool,
}

impl Args {
    /// Returns the generation settings of the folder, overridden by the arguments.
    fn options(&self, folder: &Folder) -> Result<SamplingParams, Report> {
        let mut options = generation_config_of(folder.files())?;
        let rules = &mut options.rules;
        if let Some(n) = self.max_new {
            (rules.max_new_tokens, options.max_length) = (n, None);
        }
        rules.repetition_penalty = self.repetition_penalty.unwrap_or(rules.repetition_penalty);
        rules.no_repeat_ngram = self.no_repeat_ngram.unwrap_or(rules.no_repeat_ngram);
        let reals = [self.top_p, self.min_p, self.temperature];
        let draws = self.sample || self.top_k.is_some() || reals.iter().any(Option::is_some);
        // Arguments override the folder's choice between sampling and beam search.
        if draws {
            options.beams = None;
            let asked = options.default_sampling;
            options.sampling = Some(Sampling {
                temperature: self.temperature.unwrap_or(asked.temperature),
                top_k: self.top_k.unwrap_or(asked.top_k),
                top_p: self.top_p.unwrap_or(asked.top_p),
                min_p: self.min_p.unwrap_or(asked.min_p),
            });
        }
        if let Some(n) = self.beams {
            options.sampling = None;
            options.beams = Some(Beams {
                n,
                ..options.default_beams
            });
        }
        beams_or_sampling(&options, folder, "--beams or --sample decides")?;
        let asked = [
            ("--groups", self.groups.is_some()),
            ("--length-penalty", self.length_penalty.is_some()),
            ("--early-stopping", self.early_stopping.is_some()),
        ];
        for (option, is_given) in asked {
            check_needs(option, is_given, "--beams", options.beams.is_some())?;
        }
        if let Some(beams) = &mut options.beams {
            beams.groups = self.groups.unwrap_or(beams.groups);
            beams.length_penalty = self.length_penalty.unwrap_or(beams.length_penalty);
            let early_stopping = self.early_stopping.map(Into::into);
            beams.early_stopping = early_stopping.unwrap_or(beams.early_stopping);
        }
        let has_groups = options.beams.is_some_and(|beams| beams.groups > 1);
        check_needs(
            "--diversity",
            self.diversity.is_some(),
            "--groups",
            has_groups,
        )?;
        if let (Some(beams), Some(diversity)) = (&mut options.beams, self.diversity) {
            beams.diversity = diversity;
        }
        options.seed = self.seed;
        Ok(options)
    }
}

/// Parses variables for the chat template.
fn kwargs(text: Option<&str>) -> Result<Vec<(String, Json)>, Report> {
    let Some(text) = text else {
        return Ok(Vec::new());
    };
    let expected = "expected a JSON object such as '{\"enable_thinking\": false}'";
    match serde_json::from_str(text) {
        Ok(Json::Object(fields)) => Ok(fields),
        Ok(other) => Err(miette!(
            "--chat-template-kwargs is {}; {expected}",
            other.kind()
        )),
        Err(e) => Err(miette!(
            "--chat-template-kwargs is not JSON ({e}); {expected}"
        )),
    }
}

/// Returns an error if the settings combine beam search with sampling. The settings in a checkpoint's folder may combine them, and the user
/// must then choose one of the two. `advice` is the end of the message, which names the options for this choice.
pub(super) fn beams_or_sampling(
    options: &SamplingParams,
    folder: &Folder,
    advice: &str,
) -> Result<(), Report> {
    match options.beams.is_some() && options.sampling.is_some() {
        true => Err(miette!(
            "`{}` combines beam search with sampling (`num_beams` with `do_sample`), which is not supported; {advice}",
            folder.trunk().display()
        )),
        false => Ok(()),
    }
}

/// Returns an error if an option is given without the setting that it needs. `is_given` is whether the option is given, and `is_there` is
/// whether the setting is in use. `option` and `needed` are the names of the option and of the setting in the message.
pub(super) fn check_needs(
    option: &str,
    is_given: bool,
    needed: &str,
    is_there: bool,
) -> Result<(), Report> {
    match is_given && !is_there {
        true => Err(miette!(
            "{option} has an effect only with {needed}, which neither the arguments nor the checkpoint's folder select; give {needed}, or leave {option} out"
        )),
        false => Ok(()),
    }
}

/// Argument for [`EarlyStopping`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Early {
    Yes,
    No,
    Never,
}

impl From<Early> for EarlyStopping {
    fn from(early: Early) -> Self {
        match early {
            Early::Yes => Self::Yes,
            Early::No => Self::Heuristic,
            Early::Never => Self::Never,
        }
    }
}

pub(super) fn run(args: Args) -> Outcome {
    let (prompts, source) = Source::texts("prompt", &args.prompts, args.prompts_file.as_deref())?;
    if prompts.is_empty() {
        return Err(miette!(
            "there is no prompt; give --prompt, or a file with one prompt per line"
        ));
    }
    if args.stream && prompts.len() > 1 {
        return Err(miette!(
            "--stream prints one text while it is generated, but there are {} prompts; give a single prompt",
            prompts.len()
        ));
    }
    if args.stop.iter().any(String::is_empty) {
        return Err(miette!(
            "an empty --stop would end every text at once; expected at least one character"
        ));
    }
    let folder = args.model.tokenizer_folder("prompts")?;
    let encoder = TextEncoder::for_prompts(Folder::open(folder)?)?;
    let mut options = args.options(encoder.folder())?;
    if let Some(token) = &args.forced_bos {
        options.rules.forced_first = Some(forced(&encoder, token)?);
    }
    let read = match args.chat {
        true => {
            let template = ChatTemplate::of(encoder.folder().files())?;
            let options = ChatOptions {
                kwargs: kwargs(args.chat_template_kwargs.as_deref())?,
                ..ChatOptions::default()
            };
            let each = prompts.iter().enumerate();
            let read = each.map(|(index, prompt)| {
                let system = args.system.iter().map(|text| Message::new("system", text));
                let messages: Vec<Message> = system.chain([Message::new("user", prompt)]).collect();
                let ids = encoder.prompt_as_written(&template.render_with(&messages, &options)?);
                ids.map_err(|e| e.of_text(index))
            });
            read.collect()
        }
        false => input::prompts(&encoder, &prompts),
    };
    let (mut ids, mut of_prompt, mut problems) = (Vec::new(), Vec::new(), BTreeMap::new());
    for (index, read) in read.into_iter().enumerate() {
        match read {
            Ok(read) => {
                ids.push(read);
                of_prompt.push(index);
            }
            Err(problem) => _ = problems.insert(index, problem.to_string()),
        }
    }
    let engine = Runnable::build(args.model.builder_of_own_outputs()?.generating())?;
    let lens: Vec<usize> = ids.iter().map(Vec::len).collect();
    let cache = engine.cache_bytes_at_most(&lens, &options)?;
    let mut problem: Option<Report> = None;
    // New text that continues a plain prompt is decoded in the prompt's context. Translations and replies are decoded on their own.
    let goes_on = !engine.has_source() && !args.chat;
    let mut texts = vec![StreamDecoder::default(); prompts.len()];
    if goes_on {
        for (&index, ids) in of_prompt.iter().zip(&ids) {
            texts[index] = StreamDecoder::after(ids, |tokens| encoder.decode(tokens))?;
        }
    }
    if args.stream && goes_on {
        print(&prompts[0])?;
    }
    let began = Instant::now();
    let mut first = Duration::ZERO;
    let answers = engine.generate(&ids, &options, |at, event| {
        let Event::Token { id, .. } = event else {
            return ControlFlow::Continue(());
        };
        if first.is_zero() {
            first = began.elapsed();
        }
        let text = &mut texts[of_prompt[at]];
        let pushed = text.push(*id, |tokens| encoder.decode(tokens));
        let shown = pushed.map_err(Report::from).and_then(|()| {
            text.cut(&args.stop);
            match args.stream {
                true => show(text, &args.stop),
                false => Ok(()),
            }
        });
        match shown {
            Err(error) => {
                problem = Some(error);
                ControlFlow::Break(Stop::All)
            }
            Ok(()) if text.stopped => ControlFlow::Break(Stop::One),
            Ok(()) => ControlFlow::Continue(()),
        }
    })?;
    let took = began.elapsed();
    if let Some(problem) = problem {
        return Err(problem);
    }
    let mut written = vec![Generation::default(); prompts.len()];
    for (index, answer) in of_prompt.into_iter().zip(answers) {
        if let Some(problem) = &answer.problem {
            problems.insert(index, problem.to_string());
        }
        written[index] = answer;
    }
    // Report failures after the texts of the other prompts.
    for (&index, problem) in &problems {
        say(&format!("{} failed: {problem}", source.name(index)));
    }
    let code = match problems.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    };
    let reason = |index: usize| match (texts[index].stopped, written[index].reason) {
        (true, _) => "stop",
        (_, Some(Reason::End)) => "end",
        (_, Some(Reason::Length)) => "length",
        _ if problems.contains_key(&index) => "failed",
        _ => "broken off",
    };
    if args.json {
        let all: Vec<_> = (0..prompts.len())
            .map(|i| {
                json!({
                    "prompt": prompts[i], "text": texts[i].text, "tokens": texts[i].tokens,
                    "reason": reason(i), "score": written[i].score, "problem": problems.get(&i),
                })
            })
            .collect();
        print_json(&json!({
            "device": engine.device().to_string(),
            "dtype": engine.precision().name(),
            "kv_dtype": engine.program().cache_format().to_string(),
            "texts": all,
            "seconds": {"first": first.as_secs_f64(), "all": took.as_secs_f64()},
            "bytes": {"cache": cache, "all": engine.generator_bytes(&lens, &options, cache)?.all()},
        }))?;
        return Ok(code);
    }
    match args.stream {
        true => show_rest(&texts[0])?,
        false => {
            // A prompt that failed before its first token has no text to print.
            let shown = |&i: &usize| !problems.contains_key(&i) || !texts[i].tokens.is_empty();
            let shown = (0..prompts.len()).filter(shown);
            for (nth, i) in shown.enumerate() {
                let (prompt, text) = (&prompts[i], &texts[i]);
                let gap = if nth > 0 { "\n" } else { "" };
                let before = if goes_on { prompt.as_str() } else { "" };
                print(&format!("{gap}{before}{}\n", text.text))?;
            }
        }
    }
    let tokens: usize = texts.iter().map(|text| text.tokens.len()).sum();
    let ms = |time: Duration| format!("{:.1} ms", time.as_secs_f64() * 1e3);
    let speed = match tokens.saturating_sub(prompts.len()) {
        // Beam search returns all tokens at the end.
        _ if options.beams.is_some() => format!("after {}", ms(took)),
        0 => format!("after {}", ms(first)),
        n => {
            let rest = took.saturating_sub(first).as_secs_f64().max(1e-9);
            let rate = n as f64 / rest;
            format!("the first after {}, then {rate:.1} tokens/s", ms(first))
        }
    };
    let mut ends: BTreeMap<&str, usize> = BTreeMap::new();
    (0..prompts.len()).for_each(|i| *ends.entry(reason(i)).or_default() += 1);
    let ends = ends.into_iter().map(|(reason, n)| match prompts.len() {
        1 => reason.to_owned(),
        _ => format!("{n} {reason}"),
    });
    say(&format!(
        "{}, {}: {tokens} tokens, {speed}; KV cache {}; {}",
        engine.device(),
        engine.precision(),
        cache_of(cache, engine.program()),
        ends.collect::<Vec<_>>().join(", "),
    ));
    Ok(code)
}

/// Prints the part of a text that can no longer change.
fn show(text: &mut StreamDecoder, stops: &[String]) -> Result<(), Report> {
    let to = match text.stopped {
        true => text.text.len().max(text.shown),
        false => text.ready(stops),
    };
    if to > text.shown {
        print(text.text.get(text.shown..to).unwrap_or_default())?;
        let _ = std::io::stdout().flush();
        text.shown = to;
    }
    Ok(())
}

fn show_rest(text: &StreamDecoder) -> Result<(), Report> {
    print(text.text.get(text.shown..).unwrap_or_default())?;
    print("\n")
}

/// Returns the id of the token whose text is `token`, for `--forced-bos`.
pub(super) fn forced(encoder: &TextEncoder, token: &str) -> Result<u32, miette::Report> {
    encoder.token_id(token).ok_or_else(|| {
        miette!(
            "the tokenizer has no token `{token}`; --forced-bos expects a token as written in the checkpoint's files"
        )
    })
}
