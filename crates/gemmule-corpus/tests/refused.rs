//! Bad rows and bad inputs.

mod common;

use std::{fs, io::Write as _, sync::Arc};

use arrow_array::{ArrayRef, BinaryArray, Int64Array, RecordBatch, StringArray};
use arrow_schema::{DataType, Field, Schema};
use common::{Place, embed, read_lines, refused};
use gemmule_corpus::{CorpusError, Job, Keep};
use parquet::{arrow::ArrowWriter, file::properties::WriterProperties};

#[test]
fn bad_lines_of_json() {
    let place = Place::new();
    let lines: [&[u8]; 14] = [
        b"{\"text\": \"good\"}",
        b"",
        b"{\"text\": \"cut",
        b"{\"other\": 1}",
        b"{\"text\": null}",
        b"{\"text\": 5}",
        b"[1]",
        b"{\"text\": \"\xff\"}",
        b"{\"text\": \"\\ud800\"}",
        b"{\"text\": \"a\"} x",
        b"{\"text\": \"too long\"}",
        b"{\"text\": \"not a number\"}",
        b"{\"text\": \"123456789012345678901234567890123456789012345678901234567890\"}",
        b"{\"text\": \"good\"}",
    ];
    let mut job = place.job("in.jsonl", lines.join(&b'\n'), "out.jsonl");
    job.limits.row_bytes = 60;
    let report = embed(&job).expect("embedded");
    assert_eq!((report.rows, report.written, report.refused), (14, 2, 12));
    assert_eq!(report.errors, Some(job.errors()));
    let reasons = refused(&job);
    assert_eq!(
        reasons.iter().map(|(row, _)| *row).collect::<Vec<_>>(),
        (1..13).collect::<Vec<_>>()
    );
    let parts = [
        "is empty",
        "EOF",
        "`text` is missing",
        "type null",
        "type number",
        "not a JSON object",
        "not UTF-8",
        "surrogate",
        "trailing",
        "600 tokens",
        "NaN",
        "the limit is 60",
    ];
    for ((_, reason), part) in reasons.iter().zip(parts) {
        assert!(reason.contains(part), "{reason}: {part}");
    }
    assert_eq!(read_lines(&job.output)[1]["row"], 13);
}

#[test]
fn deep_and_hostile_json() {
    let place = Place::new();
    let deep = "[".repeat(200_000);
    let content = format!("{{\"text\":\"a\"}}\n{{\"x\":{deep}\n{{\"text\":{deep}}}\n");
    let mut job = place.job("in.jsonl", content, "out.parquet");
    job.keep = Keep::All;
    let report = embed(&job).expect("embedded");
    assert_eq!((report.rows, report.refused), (3, 2));
}

#[test]
fn a_window_without_texts_is_an_error() {
    let place = Place::new();
    let content = "{\"txt\": \"a\", \"n\": 1}\n{\"txt\": \"b\", \"n\": \"x\", \"text\": 5}\n";
    let mut job = place.job("in.jsonl", content, "out.parquet");
    let error = embed(&job).expect_err("no texts").to_string();
    let columns = "its type is number, expected strings; the columns are \
        `txt` (string), `n` (number or string), `text` (number)";
    assert!(error.contains(columns), "{error}");
    job.columns = vec!["body".to_owned()];
    let error = embed(&job).expect_err("no column").to_string();
    assert!(
        error.contains("has no column `body`; it has `txt` (string)"),
        "{error}"
    );
    job.columns = vec!["txt".to_owned()];
    embed(&job).expect("embedded");
    let job = place.job("b.jsonl", "id,text\n1,a\n", "b.parquet");
    let error = embed(&job).expect_err("CSV").to_string();
    assert!(
        error.contains("none of the first 2 lines has a text"),
        "{error}"
    );
    let mut job = place.job("in.csv", "id,body\n1,a\n", "c.parquet");
    let error = embed(&job).expect_err("no column").to_string();
    assert!(error.contains("it has `id`, `body`"), "{error}");
    job.columns = vec!["body".to_owned()];
    job.keep = Keep::Named(vec!["title".to_owned()]);
    assert!(matches!(embed(&job), Err(CorpusError::NoColumn { column, .. }) if column == "title"));
    assert_eq!(
        place.names(),
        ["b.jsonl", "in.csv", "in.jsonl", "out.parquet"]
    );
}

#[test]
fn bad_records_of_csv() {
    let place = Place::new();
    let content = b"id,text\n1,good\n2\n3,a,b\n4,\xff\xfe\n5,\"quoted\n\n6,lost\n";
    let job = place.job("in.csv", content, "out.jsonl");
    let report = embed(&job).expect("embedded");
    assert_eq!((report.rows, report.written), (5, 1));
    let reasons = refused(&job);
    let parts = ["1 fields", "3 fields", "UTF-8", "quote"];
    for ((_, reason), part) in reasons.iter().zip(parts) {
        assert!(reason.contains(part), "{reason}: {part}");
    }
    // A record with an unclosed quote swallows lines only up to the limit, even if another quote follows.
    let lines = "7,x\n".repeat(1000);
    let content = format!("id,text\n1,good\n2,\"open\n{lines}9,\"shut\n10,good\n");
    let mut job = place.job("b.csv", content, "b.jsonl");
    job.limits.row_bytes = 100;
    let report = embed(&job).expect("embedded");
    assert_eq!((report.rows, report.written), (3, 2));
    assert!(refused(&job)[0].1.contains("more than 100 bytes"));
}

fn parquet(path: &std::path::Path, columns: Vec<(&str, ArrayRef)>) {
    let batch = RecordBatch::try_from_iter(columns).expect("a batch");
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(100))
        .build();
    let file = fs::File::create(path).expect("created");
    let writer = ArrowWriter::try_new(file, batch.schema(), Some(properties));
    let mut writer = writer.expect("a writer");
    writer.write(&batch).expect("written");
    writer.close().expect("closed");
}

#[test]
fn bad_columns_and_files_of_parquet() {
    let place = Place::new();
    let mut job = Job::new(place.path("in.parquet"), place.path("out.jsonl"));
    let texts: Vec<&[u8]> = vec![b"good", b"\xff", b"good"];
    parquet(
        &job.input,
        vec![
            ("id", Arc::new(Int64Array::from_iter_values(0..3)) as _),
            ("text", Arc::new(BinaryArray::from(texts)) as _),
        ],
    );
    job.columns = vec!["id".to_owned()];
    let error = embed(&job).expect_err("integers").to_string();
    assert!(error.contains("type is Int64"), "{error}");
    assert!(error.contains("`id` (Int64), `text` (Binary)"), "{error}");
    job.columns = vec!["txt".to_owned()];
    assert!(matches!(embed(&job), Err(CorpusError::NoColumn { .. })));
    job.columns = vec!["text".to_owned()];
    job.keep = Keep::Named(vec!["text".to_owned()]);
    assert!(matches!(embed(&job), Err(CorpusError::KeptType { .. })));
    job.keep = Keep::All;
    embed(&job).expect("embedded");
    assert_eq!(refused(&job)[0].0, 1);
}

#[test]
fn cut_and_damaged_parquet() {
    let place = Place::new();
    let job = Job::new(place.path("in.parquet"), place.path("out.jsonl"));
    let texts = (0..300).map(|i| format!("text {i} {}", "x".repeat(i % 50)));
    let ids = Arc::new(Int64Array::from_iter_values(0..300));
    let texts = Arc::new(StringArray::from_iter_values(texts));
    parquet(&job.input, vec![("text", texts as _), ("id", ids as _)]);
    let whole = fs::read(&job.input).expect("read");
    for len in [0, 3, 4, 12, whole.len() / 2, whole.len() - 1] {
        fs::write(&job.input, &whole[..len]).expect("written");
        assert!(
            matches!(embed(&job), Err(CorpusError::BadInput { .. })),
            "{len}"
        );
    }
    // If any single byte is changed, a run returns an error or writes an output. It does not panic.
    let (mut n_errors, mut n_outputs) = (0, 0);
    for at in (0..whole.len()).step_by(whole.len() / 150) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x55;
        fs::write(&job.input, &damaged).expect("written");
        let mut job = job.clone();
        job.overwrite = true;
        job.keep = Keep::All;
        match embed(&job) {
            Ok(_) => n_outputs += 1,
            Err(CorpusError::Panicked { .. }) => panic!("byte {at}"),
            Err(_) => n_errors += 1,
        }
    }
    assert!(n_errors > 0 && n_outputs > 0, "{n_errors} {n_outputs}");
}

#[test]
fn cut_gzip() {
    let place = Place::new();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let lines: String = (0..5000u32)
        .map(|i| format!("{}\n", i.wrapping_mul(2_654_435_761)))
        .collect();
    encoder.write_all(lines.as_bytes()).expect("compressed");
    let whole = encoder.finish().expect("compressed");
    let mut job = place.job("in.txt.gz", &whole[..whole.len() / 2], "out.npy");
    job.limits.window_rows = 100;
    let error = embed(&job).expect_err("cut");
    assert!(matches!(error, CorpusError::Stopped { .. }), "{error}");
    assert!(error.to_string().contains("ends in the middle"), "{error}");
}

#[test]
fn names_that_are_taken() {
    let place = Place::new();
    let content = "{\"text\": \"a\", \"row\": 1}\n{\"text\": \"b\"}\n";
    let mut job = place.job("in.jsonl", content, "out.parquet");
    job.keep = Keep::All;
    assert!(matches!(embed(&job), Err(CorpusError::NameTaken { column }) if column == "row"));
    job.row_column = "number".to_owned();
    embed(&job).expect("embedded");
    job.output = place.path("out.jsonl");
    job.row_column = "row".to_owned();
    let report = embed(&job).expect("embedded");
    assert_eq!(report.refused, 1);
}

#[test]
fn columns_with_equal_names() {
    let place = Place::new();
    let content = "text,id,text,id,n\na,1,b,2,3\n";
    let csv = place.job("in.csv", content, "out.jsonl");
    let mut job = Job::new(place.path("in.parquet"), place.path("out.jsonl"));
    let field = |name: &str| Field::new(name, DataType::Utf8, true);
    let names = ["text", "id", "text", "id", "n"];
    let schema = Arc::new(Schema::new(names.map(field).to_vec()));
    let column = |value: &str| Arc::new(StringArray::from(vec![value])) as ArrayRef;
    let columns = ["a", "1", "b", "2", "3"].map(column).to_vec();
    let batch = RecordBatch::try_new(schema.clone(), columns).expect("a batch");
    let file = fs::File::create(&job.input).expect("created");
    let mut writer = ArrowWriter::try_new(file, schema, None).expect("a writer");
    writer.write(&batch).expect("written");
    writer.close().expect("closed");
    for input in [csv.input, job.input.clone()] {
        job.input = input;
        let several = |job: &Job, name: &str| match embed(job) {
            Err(CorpusError::SeveralColumns { column, .. }) => assert_eq!(column, name),
            other => panic!("{other:?}"),
        };
        (job.columns, job.keep) = (vec!["text".to_owned()], Keep::None);
        several(&job, "text");
        job.columns = vec!["n".to_owned()];
        job.keep = Keep::All;
        several(&job, "text");
        job.keep = Keep::Named(vec!["id".to_owned()]);
        several(&job, "id");
        // Columns that are not read may have equal names.
        (job.keep, job.overwrite) = (Keep::None, true);
        assert_eq!(embed(&job).expect("embedded").written, 1);
    }
}
