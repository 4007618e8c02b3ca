use std::{
    fmt::Display, fs::canonicalize, ops::ControlFlow, path::PathBuf, process::ExitCode,
    time::Instant,
};

use miette::miette;
use serde_json::{Value, json};

use super::{
    Outcome,
    generate::{beams_or_sampling, check_needs, forced},
    model::Runnable,
    numbers::up_to,
    print,
    progress::Bars,
    say, write_file,
};
use crate::{
    EngineError,
    files::{self, Kind},
    generate::{
        Event, GenerateError, Generation, MAX_TOKENS, Request, SamplingParams, generation_config_of,
    },
    search::{Beams, Hypothesis},
    text::{Folder, LanguagePair, TargetPrefix, TextEncoder},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: Runnable,
    /// A file with one text per line
    #[arg(long, value_name = "FILE")]
    source_file: PathBuf,
    /// File for the translations, one per line, in the order of the texts; by default standard output
    #[arg(long, value_name = "FILE")]
    output_file: Option<PathBuf>,
    /// Language of the texts, as named by the model's tokenizer. By default `src_lang` in tokenizer_config.json
    #[arg(long, value_name = "LANG")]
    source_lang: Option<String>,
    /// Language of the translations, as named by the model's tokenizer. By default the language in the settings of the model's folder
    #[arg(long, value_name = "LANG", conflicts_with = "forced_bos")]
    target_lang: Option<String>,
    /// Begin each translation with this text, after the language token
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    target_prefix: Option<String>,
    /// Use beam search with N beams; 1 selects greedy search. By default the value in generation_config.json
    #[arg(long, value_name = "N", value_parser = up_to(Beams::MAX))]
    beams: Option<usize>,
    /// Length penalty: a score is the log-probability divided by the length to this power
    #[arg(long, value_name = "A", allow_hyphen_values = true)]
    length_penalty: Option<f32>,
    /// Force this first token of each translation, for example a language token
    #[arg(long, value_name = "TOKEN")]
    forced_bos: Option<String>,
    /// Number of translations per text, from the best beams; needs --json
    #[arg(long, value_name = "N", requires = "json", default_value_t = 1, value_parser = up_to(Beams::MAX))]
    num_hypotheses: usize,
    /// Print one JSON document per line: the translations of a text with their scores, best first
    #[arg(long)]
    json: bool,
    /// Max new tokens per text; by default twice the tokens of the longest text plus 16, limited by generation_config.json and the model's
    /// positions
    #[arg(long, value_name = "N", value_parser = up_to(MAX_TOKENS))]
    max_new: Option<usize>,
    /// Max total number of source tokens of the texts that are translated at the same time
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u64).range(1..))]
    batch_tokens: u64,
}

impl Args {
    /// Returns the generation settings of the folder, overridden by the arguments. `longest` is the length of the longest text in tokens.
    /// `positions` is the model's number of positions, if it is limited.
    fn options(
        &self,
        encoder: &TextEncoder,
        pair: &LanguagePair,
        longest: usize,
        positions: Option<u32>,
    ) -> Result<SamplingParams, miette::Report> {
        let mut options = generation_config_of(encoder.folder().files())?;
        let prefix = match &self.target_prefix {
            Some(text) => TargetPrefix::Text(text.clone()),
            None => TargetPrefix::None,
        };
        (options.rules.forced_first, options.rules.prefix) = encoder.target(&prefix, pair)?;
        options.decoder_start = pair.decoder_start.or(options.decoder_start);
        // The decoder start token takes the first position, so one position fewer is left.
        let most = positions.map_or(usize::MAX, |n| n.saturating_sub(1) as usize);
        let n_forced = options.rules.prefix.len();
        options.rules.max_new_tokens = (2 * longest + 16 + n_forced)
            .min(most)
            .min(options.rules.max_new_tokens);
        if let Some(n) = self.max_new {
            (options.rules.max_new_tokens, options.max_length) = (n, None);
        }
        if let Some(token) = &self.forced_bos {
            options.rules.forced_first = Some(forced(encoder, token)?);
        }
        if let Some(n) = self.beams {
            options.sampling = None;
            let asked = Beams {
                n,
                ..options.default_beams
            };
            options.beams = (n != 1).then_some(asked);
        }
        beams_or_sampling(&options, encoder.folder(), "--beams decides")?;
        let has_penalty = self.length_penalty.is_some();
        let has_beams = options.beams.is_some();
        check_needs("--length-penalty", has_penalty, "--beams", has_beams)?;
        if let (Some(beams), Some(penalty)) = (&mut options.beams, self.length_penalty) {
            beams.length_penalty = penalty;
        }
        let n_beams = options.beams.map_or(1, |beams| beams.n.max(1));
        match self.num_hypotheses {
            n if (1..=n_beams).contains(&n) => Ok(options),
            n => Err(miette!(
                "--num-hypotheses is {n}; expected a number from 1 to {n_beams}, the number of beams (--beams)"
            )),
        }
    }

    /// Returns the JSON document of a text: its translations with their scores.
    fn document(&self, encoder: &TextEncoder, written: &Generation) -> Result<Value, EngineError> {
        let whole = [Hypothesis {
            tokens: written.tokens.clone(),
            score: 0.0,
        }];
        let found = match written.hypotheses.as_slice() {
            [] => &whole,
            found => found,
        };
        let found = Hypothesis::best(found, self.num_hypotheses);
        let each = found.iter().map(|one| {
            let mut document = json!({"text": encoder.decode(&one.tokens)?, "tokens": one.tokens});
            if written.score.is_some() {
                document["score"] = json!(one.score);
            }
            Ok(document)
        });
        let translations = each.collect::<Result<Vec<Value>, EngineError>>()?;
        Ok(json!({"translations": translations}))
    }
}

pub(super) fn run(args: Args) -> Outcome {
    let folder = args.model.tokenizer_folder("texts")?;
    let encoder = TextEncoder::for_prompts(Folder::open(folder)?)?;
    let file = &args.source_file;
    // A terminal may be both the source and the output, so only regular files are compared.
    let is_source = |output: &PathBuf| match (canonicalize(output), canonicalize(file)) {
        (Ok(output), Ok(source)) => output == source && source.is_file(),
        _ => false,
    };
    if args.output_file.as_ref().is_some_and(is_source) {
        return Err(miette!(
            "`{}` is both the source and the output; choose another file with --output-file",
            file.display()
        ));
    }
    let text = files::text(file, Kind::Batch).map_err(EngineError::from)?;
    let lines: Vec<&str> = text.lines().collect();
    // A blank line has a blank translation.
    let mut waiting: Vec<usize> = (0..lines.len())
        .filter(|&i| !lines[i].trim().is_empty())
        .collect();
    if waiting.is_empty() {
        let file = file.display();
        return Err(miette!("`{file}` has no text; expected one per line"));
    }
    let engine = Runnable::build(args.model.builder_of_own_outputs()?.generating())?;
    if !engine.has_source() {
        return Err(miette!(
            "the model continues a prompt and does not translate; use `gemmule generate`"
        ));
    }
    let mut failed = 0;
    let mut fail = |line: usize, problem: &dyn Display| {
        say(&format!("line {} failed: {problem}", line + 1));
        failed += 1;
    };
    let source = args.source_lang.as_deref();
    let pair = encoder.language_pair(source, args.target_lang.as_deref())?;
    let each = lines.iter().enumerate();
    let read: Vec<_> = each
        .map(|(at, line)| encoder.source(at, line, &pair))
        .collect();
    waiting.retain(|&i| match &read[i] {
        Ok(_) => true,
        Err(problem) => {
            fail(i, problem);
            false
        }
    });
    let read = read.into_iter().map(Result::unwrap_or_default);
    let ids: Vec<Vec<u32>> = read.collect();
    // Sort by length, because texts of similar lengths end at about the same time. Start with the longest texts, which determine the total
    // time.
    waiting.sort_by_key(|&i| std::cmp::Reverse(ids[i].len()));
    // Texts that exceed the model's positions fail later, so reserve no room in the KV cache for them.
    let positions = engine.limits().longest;
    let fits = |n: &usize| positions.is_none_or(|most| *n <= most as usize);
    let lens = waiting.iter().map(|&i| ids[i].len()).filter(fits);
    let lens: Vec<usize> = lens.collect();
    let longest = lens.first().map_or(1, |&n| n.max(1));
    let options = args.options(&encoder, &pair, longest, positions)?;
    // Reserve room in the KV cache for a batch of the longest texts. --batch-tokens limits the number of texts in it.
    let most = usize::try_from(args.batch_tokens).unwrap_or(usize::MAX);
    let at_once = (most / longest).clamp(1, lens.len().max(1));
    let room = lens.get(..at_once).unwrap_or(&[1]);
    let mut generator = engine.generator(engine.cache_bytes_needed(room, &options)?)?;
    let checked = generator.check_options(&options);
    checked.map_err(GenerateError::from)?;
    generator.prompt_tokens_per_step(most);
    let bars = Bars::new();
    let (began, total) = (Instant::now(), waiting.len());
    let (mut done, mut tokens) = (0, 0);
    let requests = waiting.iter().map(|&i| Request {
        prompt: ids[i].clone(),
        options: options.clone(),
    });
    let written = generator.write_all(requests, |_, event| {
        match event {
            Event::Token { .. } => tokens += 1,
            Event::Found { .. } => {}
            Event::Done { .. } | Event::Failed { .. } => done += 1,
        }
        bars.show("translate", done, total);
        ControlFlow::Continue(())
    })?;
    let mut translated: Vec<Generation> = vec![Generation::default(); lines.len()];
    for (i, written) in waiting.into_iter().zip(written) {
        if let Some(problem) = &written.problem {
            fail(i, problem);
        }
        translated[i] = written;
    }
    let took = began.elapsed().as_secs_f64();
    let mut out = String::new();
    for written in &translated {
        match args.json {
            true => out.push_str(&args.document(&encoder, written)?.to_string()),
            // Replace line breaks, so that each translation is on one line.
            false => out.push_str(&encoder.decode(&written.tokens)?.replace(['\n', '\r'], " ")),
        }
        out.push('\n');
    }
    match &args.output_file {
        Some(file) => write_file(file, out.as_bytes())?,
        None => print(&out)?,
    }
    say(&format!(
        "{}, {}: {total} texts, {tokens} tokens in {took:.1} s, {:.0} tokens/s",
        engine.device(),
        engine.precision(),
        f64::from(tokens) / took.max(1e-9)
    ));
    Ok(match failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}
