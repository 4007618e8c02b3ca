//! Embeds the column `text` of a file without a model, and prints the speed. The vector of a text has the lengths of its words.
//!
//! ```sh
//! cargo run --release -p gemmule-corpus --example lengths -- corpus.jsonl vectors.parquet
//! ```

use std::{error::Error, time::Instant};

use gemmule_corpus::{Column, Function, Hooks, Job, Keep, Kind, Results, Texts, Value, run};

/// Number of values of a vector.
const WIDTH: usize = 384;

/// Returns the lengths in bytes of the first [`WIDTH`] words, padded with zeros.
fn vector(text: &str) -> Vec<f32> {
    let mut vector: Vec<f32> = text
        .split(' ')
        .take(WIDTH)
        .map(|word| word.len() as f32)
        .collect();
    vector.resize(WIDTH, 0.0);
    vector
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(input), Some(output)) = (arguments.next(), arguments.next()) else {
        return Err("expected an input and an output, then columns to keep or `all`".into());
    };
    let mut job = Job::new(input, output);
    job.keep = match arguments.next().as_deref() {
        None => Keep::None,
        Some("all") => Keep::All,
        Some(first) => Keep::Named([first.to_owned()].into_iter().chain(arguments).collect()),
    };
    let columns = vec![Column::new("embedding", Kind::Vector(WIDTH))];
    let mut model = Function::new("lengths of words", columns, |rows: &[Texts]| {
        let row = |texts: &Texts| Ok(vec![Value::Vector(vector(&texts[0]))]);
        let rows = rows.iter().map(row).collect();
        Ok(Results { rows, tokens: None })
    });
    let began = Instant::now();
    let report = run(&job, &mut model, Hooks::default())?;
    let seconds = began.elapsed().as_secs_f64();
    let rate = (report.rows - report.resumed) as f64 / seconds;
    println!("{report:?}");
    println!("{seconds:.1} s, {rate:.0} rows/s");
    Ok(())
}
