//! Tests each input format and each output format.

mod common;

use std::{fs, io::Write as _, sync::Arc};

use arrow_array::{
    Array as _, ArrayRef, BinaryArray, Float64Array, Int64Array, LargeStringArray, ListArray,
    RecordBatch, StringArray,
    cast::AsArray as _,
    types::{Float16Type, Float32Type, Float64Type, Int8Type, Int32Type, Int64Type, UInt8Type},
};
use common::{Place, WIDTH, embed, read_arrow, read_lines, read_parquet, refused, vector};
use gemmule_corpus::{
    Column, CorpusError, Function, Hooks, InputFormat, Job, Keep, Kind, Results, Texts, Value,
    Vectors, run,
};
use parquet::{arrow::ArrowWriter, basic::Compression, file::properties::WriterProperties};
use proptest::prelude::*;

const TEXTS: [&str; 5] = ["one", "two words", "", "Grüße", "last"];

/// Checks that a Parquet or Arrow output contains the vectors of the texts.
fn check_table(batches: &[RecordBatch], rows: &[i64], texts: &[&str]) {
    let (mut found_rows, mut found) = (Vec::new(), Vec::new());
    for batch in batches {
        found_rows.extend_from_slice(batch["row"].as_primitive::<Int64Type>().values());
        let list = batch["embedding"].as_fixed_size_list();
        assert_eq!(list.value_length() as usize, WIDTH);
        found.extend_from_slice(list.values().as_primitive::<Float32Type>().values());
    }
    assert_eq!(found_rows, rows);
    assert_eq!(
        found,
        texts
            .iter()
            .flat_map(|text| vector(text))
            .collect::<Vec<_>>()
    );
}

fn jsonl() -> String {
    let line = |(i, text): (usize, &&str)| {
        serde_json::json!({"id": i, "other": {"x": [1, 2.5]}, "text": text}).to_string() + "\n"
    };
    TEXTS.iter().enumerate().map(line).collect()
}

/// Writes a Parquet file with row groups of 2 rows.
fn write_parquet(path: &std::path::Path, batch: &RecordBatch, compression: Compression) {
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(2))
        .set_compression(compression)
        .build();
    let file = fs::File::create(path).expect("created");
    let writer = ArrowWriter::try_new(file, batch.schema(), Some(properties));
    let mut writer = writer.expect("a writer");
    writer.write(batch).expect("written");
    writer.close().expect("closed");
}

fn compressed(content: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(content.as_bytes()).expect("compressed");
    encoder.finish().expect("compressed")
}

#[test]
fn inputs_of_text() {
    let csv = "id,text\n1,one\n2,\"two words\"\r\n3,\n4,Grüße\n5,\"last\"";
    let tsv = csv.replace(',', "\t");
    let lines = TEXTS.join("\n");
    let inputs = [
        ("a.jsonl", jsonl().into_bytes()),
        ("a.ndjson", [b"\xef\xbb\xbf", jsonl().as_bytes()].concat()),
        ("a.jsonl.gz", compressed(&jsonl())),
        ("a.csv", csv.as_bytes().to_vec()),
        ("b.csv.gz", compressed(csv)),
        ("c.csv", format!("\u{feff}{csv}").into_bytes()),
        ("a.tsv", tsv.into_bytes()),
        ("a.txt", lines.clone().into_bytes()),
        ("b.txt", (lines.replace('\n', "\r\n") + "\r\n").into_bytes()),
    ];
    for (name, content) in inputs {
        for window_rows in [1, 2, 100] {
            let place = Place::new();
            let mut job = place.job(name, &content, "out.parquet");
            job.limits.window_rows = window_rows;
            let report = embed(&job).expect(name);
            assert_eq!((report.rows, report.written, report.refused), (5, 5, 0));
            assert_eq!(report.tokens, Some(3 + 9 + 7 + 4));
            check_table(&read_parquet(&job.output), &[0, 1, 2, 3, 4], &TEXTS);
            assert_eq!(place.names(), [name, "out.parquet"]);
        }
    }
}

#[test]
fn a_format_that_the_name_does_not_tell() {
    let place = Place::new();
    let mut job = place.job("data", jsonl(), "out.npy");
    assert!(matches!(
        embed(&job),
        Err(CorpusError::UnknownFormat { .. })
    ));
    job.input_format = Some("jsonl".parse::<InputFormat>().expect("a format"));
    embed(&job).expect("embedded");
}

#[test]
fn parquet_input() {
    let texts: Vec<Option<&str>> = TEXTS.iter().map(|&text| Some(text)).chain([None]).collect();
    let bytes: Vec<Option<&[u8]>> = texts.iter().map(|t| t.map(str::as_bytes)).collect();
    let dictionary: arrow_array::DictionaryArray<Int32Type> = texts.iter().copied().collect();
    let columns: [ArrayRef; 4] = [
        Arc::new(StringArray::from(texts.clone())),
        Arc::new(LargeStringArray::from(texts.clone())),
        Arc::new(BinaryArray::from(bytes)),
        Arc::new(dictionary),
    ];
    let compressions = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(Default::default()),
        #[cfg(feature = "zstd")]
        Compression::ZSTD(Default::default()),
    ];
    let list = |i| Some(vec![Some(i), None]);
    let lists = ListArray::from_iter_primitive::<Int32Type, _, _>((0..6).map(list));
    for (column, compression) in columns.into_iter().zip(compressions) {
        for window_rows in [1, 4, 100] {
            let place = Place::new();
            let mut job = Job::new(place.path("in.parquet"), place.path("out.parquet"));
            let batch = RecordBatch::try_from_iter([
                (
                    "score",
                    Arc::new(Float64Array::from_iter_values((0..6).map(f64::from))) as _,
                ),
                ("text", column.clone()),
                ("tags", Arc::new(lists.clone()) as _),
                ("id", Arc::new(Int64Array::from_iter_values(10..16)) as _),
            ]);
            write_parquet(&job.input, &batch.expect("a batch"), compression);
            job.limits.window_rows = window_rows;
            job.keep = Keep::Named(vec!["id".to_owned(), "tags".to_owned(), "score".to_owned()]);
            let report = embed(&job).expect("embedded");
            assert_eq!((report.rows, report.refused), (6, 1));
            assert_eq!(refused(&job), [(5, "the text is null".to_owned())]);
            let batches = read_parquet(&job.output);
            check_table(&batches, &[0, 1, 2, 3, 4], &TEXTS);
            let names = batches[0].schema();
            let names: Vec<_> = names.fields().iter().map(|field| field.name()).collect();
            assert_eq!(names, ["row", "id", "tags", "score", "embedding"]);
            let ids = batches
                .iter()
                .flat_map(|b| b["id"].as_primitive::<Int64Type>().values());
            assert_eq!(ids.copied().collect::<Vec<_>>(), [10, 11, 12, 13, 14]);
            let last = batches.last().expect("a batch");
            let tags = last["tags"].as_list::<i32>().value(last.num_rows() - 1);
            assert_eq!(tags.as_primitive::<Int32Type>().value(0), 4);
            assert!(tags.is_null(1));
        }
    }
}

#[test]
fn keep_all_of_parquet_to_arrow_and_json() {
    let place = Place::new();
    let mut job = Job::new(place.path("in.parquet"), place.path("out.arrow"));
    let batch = RecordBatch::try_from_iter([
        (
            "text",
            Arc::new(StringArray::from(TEXTS.to_vec())) as ArrayRef,
        ),
        (
            "id",
            Arc::new(Int64Array::from(vec![
                Some(1),
                None,
                Some(3),
                Some(4),
                Some(5),
            ])) as _,
        ),
        (
            "score",
            Arc::new(Float64Array::from(vec![0.5, f64::NAN, 2.0, 3.0, 4.0])) as _,
        ),
    ]);
    write_parquet(&job.input, &batch.expect("a batch"), Compression::SNAPPY);
    job.keep = Keep::All;
    job.limits.window_rows = 3;
    embed(&job).expect("embedded");
    let batches = read_arrow(&job.output);
    check_table(&batches, &[0, 1, 2, 3, 4], &TEXTS);
    assert_eq!(
        batches[1]["score"].as_primitive::<Float64Type>().values(),
        &[3.0, 4.0]
    );
    let schema = batches[0].schema();
    assert_eq!(schema.metadata()["gemmule:model"], "known");
    job.output = place.path("out.jsonl");
    embed(&job).expect("embedded");
    let lines = read_lines(&job.output);
    let expected = serde_json::json!(
        {"row": 1, "id": null, "score": null, "embedding": vector(TEXTS[1])}
    );
    assert_eq!(lines[1], expected);
    assert_eq!(lines.len(), 5);
}

#[test]
fn fields_of_json_lines() {
    let place = Place::new();
    let content = "{\"id\":1,\"b\":true,\"f\":1,\"s\":\"x\",\"j\":[1],\"text\":\"one\"}\n\
        {\"id\":null,\"f\":2.5,\"j\":\"y\",\"text\":\"two words\"}\n\
        {\"id\":\"3\",\"text\":\"\"}\n\
        {\"id\":4,\"new\":1,\"text\":\"Grüße\"}\n\
        {\"id\":5,\"id\":6,\"text\":\"no\",\"text\":\"last\"}\n";
    let mut job = place.job("in.jsonl", content, "out.parquet");
    job.keep = Keep::All;
    job.limits.window_rows = 2;
    embed(&job).expect("embedded");
    let reasons = refused(&job);
    assert_eq!(reasons.len(), 2);
    assert!(
        reasons[0].1.contains("`id` is of type string"),
        "{reasons:?}"
    );
    assert!(reasons[1].1.contains("`new` is in no row"), "{reasons:?}");
    let batches = read_parquet(&job.output);
    check_table(&batches, &[0, 1, 4], &[TEXTS[0], TEXTS[1], TEXTS[4]]);
    assert_eq!(batches[0]["id"].as_primitive::<Int64Type>().value(0), 1);
    assert!(batches[0]["id"].is_null(1));
    assert!(batches[0]["b"].as_boolean().value(0));
    assert_eq!(
        batches[0]["f"].as_primitive::<Float64Type>().values()[..2],
        [1.0, 2.5]
    );
    assert_eq!(batches[0]["s"].as_string::<i32>().value(0), "x");
    assert_eq!(batches[0]["j"].as_string::<i32>().value(0), "[1]");
    assert_eq!(batches[0]["j"].as_string::<i32>().value(1), "\"y\"");
    // Any value is copied unchanged from JSONL to JSONL.
    job.output = place.path("out.jsonl");
    let report = embed(&job).expect("embedded");
    assert_eq!(report.written, 5);
    let lines = fs::read_to_string(&job.output).expect("read");
    let third = lines.lines().nth(2).expect("a line");
    assert!(
        third.starts_with("{\"row\":2,\"id\":\"3\",\"embedding\":[0.0,"),
        "{third}"
    );
    assert_eq!(read_lines(&job.output)[4]["id"], 6);
    assert_eq!(read_lines(&job.output)[0]["j"], serde_json::json!([1]));
}

#[test]
fn columns_of_csv() {
    let place = Place::new();
    let content = "id,text,\"a \"\"b\"\"\"\n1,one,x\n2,two words,\n3,,z\n";
    let mut job = place.job("in.csv", content, "out.jsonl");
    job.keep = Keep::Named(vec!["a \"b\"".to_owned(), "text".to_owned()]);
    embed(&job).expect("embedded");
    let expected = serde_json::json!(
        {"row": 1, "a \"b\"": "", "text": "two words", "embedding": vector("two words")}
    );
    assert_eq!(read_lines(&job.output)[1], expected);
}

#[test]
fn types_of_vectors() {
    let place = Place::new();
    let mut job = place.job("in.txt", "one\ntwo", "out.parquet");
    job.overwrite = true;
    for (vectors, name) in [
        (Vectors::F16, "f16"),
        (Vectors::Int8, "int8"),
        (Vectors::Binary, "binary"),
    ] {
        assert_eq!(name.parse::<Vectors>().expect("a type"), vectors);
        job.vectors = vectors;
        for output in ["out.parquet", "out.arrow"] {
            job.output = place.path(output);
            embed(&job).expect("embedded");
            let batches = match output {
                "out.parquet" => read_parquet(&job.output),
                _ => read_arrow(&job.output),
            };
            let list = batches[0]["embedding"].as_fixed_size_list().value(1);
            let expected = vector("two");
            match vectors {
                Vectors::F16 => {
                    let found = list.as_primitive::<Float16Type>().values();
                    let found: Vec<f32> = found.iter().map(|v| v.to_f32()).collect();
                    assert_eq!(found, expected);
                }
                Vectors::Int8 => {
                    let scale = batches[0]["scale"].as_primitive::<Float32Type>().value(1);
                    for (value, expected) in list
                        .as_primitive::<Int8Type>()
                        .values()
                        .iter()
                        .zip(expected)
                    {
                        assert!((f32::from(*value) * scale - expected).abs() <= 0.5001 * scale);
                    }
                }
                // The vector is 3, −43.25, 0.5, and a last value whose sign varies.
                _ => {
                    let last = u8::from(expected[3] > 0.0) << 4;
                    assert_eq!(
                        list.as_primitive::<UInt8Type>().values(),
                        &[0b1010_0000 | last]
                    );
                }
            }
        }
        job.output = place.path("out.jsonl");
        embed(&job).expect("embedded");
        let line = &read_lines(&job.output)[1];
        let n = if vectors == Vectors::Binary { 1 } else { WIDTH };
        assert_eq!(line["embedding"].as_array().map(Vec::len), Some(n));
        assert_eq!(line.get("scale").is_some(), vectors == Vectors::Int8);
    }
}

#[test]
fn arrays_of_numpy() {
    let place = Place::new();
    let content = "one\ntoo long\nnot a number\ntwo";
    let mut job = place.job("in.txt", content, "out.npy");
    job.limits.window_rows = 3;
    let report = embed(&job).expect("embedded");
    assert_eq!((report.rows, report.written), (4, 2));
    assert_eq!(
        refused(&job)
            .iter()
            .map(|(row, _)| *row)
            .collect::<Vec<_>>(),
        [1, 2]
    );
    let bytes = fs::read(&job.output).expect("read");
    let header = String::from_utf8_lossy(&bytes[10..128]);
    assert!(header.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (4, 4), }"));
    assert_eq!(bytes.len(), 128 + 4 * 4 * WIDTH);
    let value = |b: &[u8]| f32::from_le_bytes(b.try_into().expect("4 bytes"));
    let values: Vec<f32> = bytes[128..].chunks(4).map(value).collect();
    assert_eq!(values[..WIDTH], vector("one"));
    assert!(values[WIDTH..3 * WIDTH].iter().all(|value| value.is_nan()));
    assert_eq!(values[3 * WIDTH..], vector("two"));
    job.output = place.path("bits.npy");
    job.vectors = Vectors::Binary;
    embed(&job).expect("embedded");
    let bytes = fs::read(&job.output).expect("read");
    assert_eq!((bytes.len(), bytes[129], bytes[130]), (132, 0, 0));
    job.vectors = Vectors::Int8;
    assert!(matches!(embed(&job), Err(CorpusError::BadOption { .. })));
}

#[test]
fn empty_inputs() {
    for (input, content) in [("in.jsonl", ""), ("in.txt", ""), ("in.csv", "id,text\n")] {
        let place = Place::new();
        for output in ["out.parquet", "out.arrow", "out.npy", "out.jsonl"] {
            let job = place.job(input, content, output);
            let report = embed(&job).expect(output);
            assert_eq!((report.rows, report.errors), (0, None));
        }
        assert_eq!(
            read_parquet(&place.path("out.parquet"))
                .iter()
                .map(|b| b.num_rows())
                .sum::<usize>(),
            0
        );
        assert!(read_arrow(&place.path("out.arrow")).is_empty());
        assert_eq!(fs::read(place.path("out.npy")).expect("read").len(), 128);
        assert_eq!(fs::read(place.path("out.jsonl")).expect("read").len(), 0);
        assert_eq!(place.names().len(), 5);
    }
    let place = Place::new();
    let job = place.job("in.csv", "", "out.npy");
    assert!(matches!(embed(&job), Err(CorpusError::BadInput { .. })));
    assert_eq!(place.names(), ["in.csv"]);
}

/// Returns a value of each kind for a pair of texts. There are `n` vectors and `n` records, where `n` is the length of the first text in
/// bytes.
fn values(texts: &Texts) -> Vec<Value> {
    let (n, m) = (texts[0].len(), texts[1].len());
    let record = |at: usize| {
        let number = Value::Number(at as f32 / 4.0);
        vec![
            Value::Text(format!("label {at}")),
            number,
            Value::Integer(at as i64),
        ]
    };
    vec![
        Value::Vectors((0..2 * n).map(|at| at as f32 - 1.0).collect()),
        Value::Number(m as f32),
        Value::Text(texts.concat()),
        Value::Integer(n as i64),
        Value::Records((0..n).map(record).collect()),
    ]
}

fn pairs() -> impl gemmule_corpus::Model {
    let fields = [
        ("label", Kind::Text),
        ("score", Kind::Number),
        ("index", Kind::Integer),
    ];
    let fields = fields.map(|(name, kind)| Column::new(name, kind)).to_vec();
    let columns = [
        ("vectors", Kind::Vectors(2)),
        ("number", Kind::Number),
        ("both", Kind::Text),
        ("length", Kind::Integer),
        ("records", Kind::Records(fields)),
    ];
    let columns = columns.map(|(name, kind)| Column::new(name, kind)).to_vec();
    Function::new("pairs", columns, |rows: &[Texts]| {
        let rows = rows.iter().map(|texts| Ok(values(texts))).collect();
        Ok(Results { rows, tokens: None })
    })
}

#[test]
fn pairs_of_texts_and_columns_of_each_kind() {
    let rows = [("abc", "x"), ("", "yy"), ("d", "")];
    let json = |(q, d): &(&str, &str)| serde_json::json!({"q": q, "d": d}).to_string() + "\n";
    let bad = "{\"q\": \"a\"}\n{\"q\": 1, \"d\": \"a\"}\n";
    let jsonl = rows.iter().map(json).collect::<String>() + bad;
    let csv = "d,id,q\nx,1,abc\nyy,2,\n,3,d\n4\n\"\u{ff}\",5,\n";
    let csv: Vec<u8> = csv.chars().map(|c| c as u8).collect();
    for input in ["in.jsonl", "in.csv", "in.parquet"] {
        for window_rows in [1, 2, 100] {
            let place = Place::new();
            let content = if input == "in.jsonl" {
                jsonl.clone().into_bytes()
            } else {
                csv.clone()
            };
            let mut job = place.job(input, content, "out.jsonl");
            if input == "in.parquet" {
                let queries = [Some("abc"), Some(""), Some("d"), None, Some("a")];
                let documents = [Some("x"), Some("yy"), Some(""), Some("a"), None];
                let batch = RecordBatch::try_from_iter_with_nullable([
                    (
                        "d",
                        Arc::new(StringArray::from(documents.to_vec())) as ArrayRef,
                        true,
                    ),
                    (
                        "q",
                        Arc::new(StringArray::from(queries.to_vec())) as _,
                        true,
                    ),
                ]);
                write_parquet(&job.input, &batch.expect("a batch"), Compression::SNAPPY);
            }
            job.columns = vec!["q".to_owned(), "d".to_owned()];
            job.limits.window_rows = window_rows;
            let report = run(&job, &mut pairs(), Hooks::default()).expect(input);
            assert_eq!((report.rows, report.written), (5, 3), "{input}");
            assert_eq!(
                refused(&job)
                    .iter()
                    .map(|(row, _)| *row)
                    .collect::<Vec<_>>(),
                [3, 4]
            );
            let lines = read_lines(&job.output);
            let record = |at: usize| serde_json::json!({"label": format!("label {at}"), "score": at as f32 / 4.0, "index": at});
            let first = serde_json::json!({
                "row": 0, "vectors": [[-1.0, 0.0], [1.0, 2.0], [3.0, 4.0]], "number": 1.0, "both": "abcx", "length": 3,
                "records": [record(0), record(1), record(2)],
            });
            assert_eq!(lines[0], first);
            assert_eq!(
                (&lines[1]["vectors"], &lines[1]["records"]),
                (&serde_json::json!([]), &serde_json::json!([]))
            );
            for (output, vectors) in [
                ("out.parquet", Vectors::F32),
                ("out.arrow", Vectors::Int8),
                ("b.parquet", Vectors::Int8),
            ] {
                job.output = place.path(output);
                job.vectors = vectors;
                run(&job, &mut pairs(), Hooks::default()).expect(output);
                let batches = match output {
                    "out.arrow" => read_arrow(&job.output),
                    _ => read_parquet(&job.output),
                };
                let batch = &batches[0];
                let own = batch["vectors"].as_list::<i32>().value(0);
                assert_eq!((own.len(), own.as_fixed_size_list().value_length()), (3, 2));
                if vectors == Vectors::F32 {
                    let values = own.as_fixed_size_list().values();
                    assert_eq!(
                        values.as_primitive::<Float32Type>().values()[..],
                        [-1.0, 0.0, 1.0, 2.0, 3.0, 4.0]
                    );
                } else {
                    let scales = batch["scale"].as_list::<i32>().value(0);
                    assert_eq!(scales.as_primitive::<Float32Type>().value(2), 4.0 / 127.0);
                }
                assert_eq!(batch["number"].as_primitive::<Float32Type>().value(0), 1.0);
                assert_eq!(batch["both"].as_string::<i32>().value(0), "abcx");
                assert_eq!(batch["length"].as_primitive::<Int64Type>().value(0), 3);
                let records = batch["records"].as_list::<i32>().value(0);
                let records = records.as_struct();
                assert_eq!(records["label"].as_string::<i32>().value(2), "label 2");
                assert_eq!(records["score"].as_primitive::<Float32Type>().value(2), 0.5);
                assert_eq!(records["index"].as_primitive::<Int64Type>().value(2), 2);
                let n: usize = batches.iter().map(RecordBatch::num_rows).sum();
                assert_eq!(n, 3);
            }
        }
    }
}

#[test]
fn columns_of_pairs_that_are_missing_or_no_strings() {
    let place = Place::new();
    let mut job = place.job("in.jsonl", "{\"q\": \"a\", \"d\": 1}\n", "out.jsonl");
    let fail = |job: &Job| {
        run(job, &mut pairs(), Hooks::default())
            .expect_err("it fails")
            .to_string()
    };
    job.columns = vec!["q".to_owned(), "e".to_owned()];
    assert!(fail(&job).contains("has no column `e`; it has `q` (string), `d` (number)"));
    job.columns[1] = "d".to_owned();
    let error = fail(&job);
    assert!(
        error.contains("column `d`") && error.contains("its type is number"),
        "{error}"
    );
    job.columns[1] = "q".to_owned();
    assert!(fail(&job).contains("`q` is read twice"));
    job.columns[1] = "d".to_owned();
    job.output = place.path("out.npy");
    assert!(fail(&job).contains("cannot hold several columns"));
    assert_eq!(place.names(), ["in.jsonl"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Any character is preserved by each input and output format.
    #[test]
    fn texts_of_any_characters(
        texts in prop::collection::vec(any::<String>(), 1..20),
        window_rows in 1usize..9,
    ) {
        let quoted = |text: &String| format!("\"{}\"\n", text.replace('"', "\"\""));
        let csv = texts.iter().map(quoted).collect::<String>();
        let json = |text: &String| serde_json::json!({"text": text}).to_string() + "\n";
        let inputs = [
            ("in.csv", "text\n".to_owned() + &csv),
            ("in.tsv", "text\n".to_owned() + &csv),
            ("in.jsonl", texts.iter().map(json).collect()),
            ("in.parquet", String::new()),
        ];
        let place = Place::new();
        for (input, content) in inputs {
            let mut job = place.job(input, content, "out.jsonl");
            if input == "in.parquet" {
                let column: ArrayRef = Arc::new(StringArray::from(texts.clone()));
                let batch = RecordBatch::try_from_iter([("text", column)]).expect("a batch");
                write_parquet(&job.input, &batch, Compression::SNAPPY);
            }
            job.keep = Keep::Named(vec!["text".to_owned()]);
            job.limits.window_rows = window_rows;
            job.overwrite = true;
            embed(&job).expect("embedded");
            let rows = read_lines(&job.output);
            prop_assert_eq!(rows.len(), texts.len());
            for (row, text) in rows.iter().zip(&texts) {
                prop_assert_eq!(row["text"].as_str(), Some(text.as_str()));
                prop_assert_eq!(&row["embedding"], &serde_json::json!(vector(text)));
            }
            job.output = place.path("out.arrow");
            embed(&job).expect("embedded");
            let batches = read_arrow(&job.output);
            let found = batches.iter().flat_map(|batch| batch["text"].as_string::<i32>().iter());
            let found: Vec<_> = found.flatten().map(str::to_owned).collect();
            prop_assert_eq!(&found, &texts);
        }
    }
}
