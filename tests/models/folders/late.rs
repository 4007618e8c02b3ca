//! Compares late-interaction models (ColBERT) with PyLate. `scripts/late_interaction.py` creates the folders and stores PyLate's results.

use gemmule::{
    Batch, DType, DeviceChoice, Engine, Output,
    heads::{TokenVectors, max_sim},
    measure::{Bound, Comparison},
    text::{LateScore, Prompt, TextEncoder, TextRole},
};
use serde::Deserialize;

use super::folder;

/// The contents of a folder's `expected.json`.
#[derive(Deserialize)]
struct Expected {
    queries: Vec<Run>,
    documents: Vec<Run>,
    /// MaxSim score of each query with each document.
    scores: Vec<Vec<f32>>,
}

#[derive(Deserialize)]
struct Run {
    text: String,
    ids: Vec<u32>,
    /// Number of tokens with an attention mask of 1.
    attended: usize,
    rows: usize,
    width: usize,
    values: Vec<f32>,
}

fn expected(name: &str) -> Expected {
    let text = std::fs::read_to_string(folder(name).join("expected.json")).expect("results");
    serde_json::from_str(&text).expect("results of a known form")
}

fn engine(name: &str) -> Engine {
    let built = Engine::from_checkpoint(folder(name))
        .device(DeviceChoice::Cpu)
        .build();
    built.unwrap_or_else(|e| panic!("{name}: {:?}", miette::Report::new(e)))
}

#[track_caller]
fn compare(what: &str, got: &[f32], want: &[f32]) {
    let output = |values: &[f32]| Output {
        name: "colbert".to_owned(),
        shape: vec![values.len() as u64],
        values: values.to_vec(),
    };
    assert_eq!(got.len(), want.len(), "{what}");
    let comparison = Comparison::between(&output(got), &output(want));
    assert!(
        Bound::of(DType::F32).holds(&comparison),
        "{what}: {comparison:?}"
    );
}

/// Compares token ids, vectors and scores with PyLate's. Returns the number of queries with tokens that no token attends to.
#[track_caller]
fn matches(name: &str) -> usize {
    let expected = expected(name);
    let encoder = TextEncoder::open(&folder(name)).expect("a tokenizer");
    let engine = engine(name);
    let mut n_hidden = 0;
    for (role, runs) in [
        (TextRole::Query, &expected.queries),
        (TextRole::Document, &expected.documents),
    ] {
        for run in runs {
            let what = format!("{name}, {:?}", run.text);
            let encoded = encoder.encode_as(role, &run.text, Prompt::Default, encoder.cut_side());
            let encoded = encoded.unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_eq!(encoded.ids, run.ids, "{what}");
            assert_eq!(
                encoded.attended.unwrap_or(encoded.ids.len()),
                run.attended,
                "{what}"
            );
            n_hidden += usize::from(encoded.attended.is_some());
            assert!(role == TextRole::Document || !encoded.is_cut, "{what}");
        }
        // Run all texts in one batch, which may contain queries with and without tokens that no token attends to.
        let texts: Vec<&str> = runs.iter().map(|run| run.text.as_str()).collect();
        let vectors = engine.token_vectors(role, &texts).expect("vectors");
        for (run, vectors) in runs.iter().zip(&vectors) {
            let what = format!("{name}, {:?}", run.text);
            assert_eq!(
                (vectors.rows().len(), vectors.width),
                (run.rows, run.width),
                "{what}"
            );
            compare(&what, &vectors.values, &run.values);
        }
    }
    let documents: Vec<&str> = expected
        .documents
        .iter()
        .map(|run| run.text.as_str())
        .collect();
    for (query, want) in expected.queries.iter().zip(&expected.scores) {
        let got = engine.rerank(&query.text, &documents).expect("scores");
        let far = got
            .iter()
            .zip(want)
            .find(|(got, want)| (*got - *want).abs() > 1e-4);
        assert!(
            got.len() == want.len() && far.is_none(),
            "{name}: {got:?}, not {want:?}"
        );
        let none = engine.rerank::<&str>(&query.text, &[]).expect("no scores");
        assert!(none.is_empty(), "{name}");
    }
    n_hidden
}

#[test]
fn expansion_that_no_token_attends_to() {
    assert_eq!(matches("late-bert"), 2);
}

#[test]
fn windows_that_do_not_reach_the_query_and_a_stack_of_projections() {
    assert_eq!(matches("late-modernbert"), 2);
}

#[test]
fn expansion_that_is_attended_to_and_a_default_prompt() {
    assert_eq!(matches("late-attend"), 0);
}

#[test]
fn queries_that_are_not_expanded() {
    assert_eq!(matches("late-plain"), 0);
}

/// Tests a folder that sentence-transformers' `MultiVectorEncoder` saves. `scripts/folders.py` creates it.
#[test]
fn prompts_and_lengths_of_a_multi_vector_encoder() {
    assert_eq!(matches("late-multi"), 2);
    let opened = gemmule::text::Folder::open(&folder("late-multi")).expect("a folder");
    let late = opened
        .late_interaction()
        .expect("it is for late interaction");
    assert_eq!(late.length(TextRole::Query), 20);
    assert_eq!(late.length(TextRole::Document), 30);
}

#[test]
fn queries_that_are_only_padded_if_they_are_short() {
    assert_eq!(matches("late-min"), 0);
}

#[test]
fn a_checkpoint_of_stanford() {
    assert_eq!(matches("late-stanford"), 2);
}

/// FlagEmbedding leaves out the vector of the first token. Each token of the query has a max product with the document's tokens. The score
/// of a document is the mean of these max products, not their sum.
#[test]
fn vectors_of_tokens_beside_embeddings_score_by_their_mean() {
    let built = Engine::from_checkpoint(folder("st-m3"))
        .device(DeviceChoice::Cpu)
        .outputs(["colbert"])
        .build();
    let engine = built.expect("it loads");
    let runs = super::expected("st-m3");
    let run = runs
        .iter()
        .find(|run| run.output == "colbert")
        .expect("a run");
    let texts = run.texts.as_ref().expect("texts");
    let vectors = engine
        .token_vectors(TextRole::Document, texts)
        .expect("vectors");
    let width = run.shape[1] as usize;
    let mut rows = run.values.chunks_exact(width);
    for (ids, vectors) in run.ids.iter().zip(&vectors) {
        let own: Vec<&[f32]> = rows.by_ref().take(ids.len()).collect();
        compare("st-m3", &vectors.values, &own[1..].concat());
    }
    let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let score = |query: &TokenVectors, document: &TokenVectors| {
        let largest = query.rows().map(|q| {
            let products = document.rows().map(|d| product(q, d));
            products.fold(f32::NEG_INFINITY, f32::max)
        });
        largest.sum::<f32>() / query.rows().len() as f32
    };
    let got = engine.rerank(&texts[0], texts).expect("scores");
    assert!(
        (got[0] - 1.0).abs() < 1e-5,
        "a text is like itself: {got:?}"
    );
    for (got, document) in got.iter().zip(&vectors) {
        assert!((got - score(&vectors[0], document)).abs() < 1e-5);
    }
}

#[test]
fn a_document_without_vectors_scores_zero() {
    let vectors = |values: &[f32]| TokenVectors {
        width: 2,
        values: values.to_vec(),
    };
    let query = vectors(&[1.0, 0.0, 0.0, -2.0]);
    let documents = [vectors(&[]), vectors(&[3.0, 4.0, -1.0, -1.0]), vectors(&[])];
    let score = |score| max_sim(&query, &documents, score);
    assert_eq!(score(LateScore::Sum), [0.0, 3.0 + 2.0, 0.0]);
    assert_eq!(score(LateScore::Mean), [0.0, 2.5, 0.0]);
}

#[test]
fn tokens_that_are_not_attended_to_need_a_mask() {
    let batch = || Batch::from_sequences(&[vec![2, 5, 6, 4, 4], vec![2, 7]]).expect("a batch");
    let refused = |attended: &[u32]| {
        batch()
            .with_attended(attended.to_vec())
            .expect_err("refused")
            .to_string()
    };
    insta::assert_snapshot!(refused(&[3]), @"numbers of attended tokens: expected 2, found 1");
    insta::assert_snapshot!(refused(&[3, 3]), @"the number of attended tokens of sequence 1 is 3; expected 1 to 2, the length of the sequence");
    insta::assert_snapshot!(refused(&[0, 2]), @"the number of attended tokens of sequence 0 is 0; expected 1 to 5, the length of the sequence");
    let expanded = batch()
        .with_attended(vec![3, 2])
        .expect("as many as tokens or fewer");
    let error = engine("late-attend")
        .session()
        .expect("a session")
        .run(&expanded);
    insta::assert_snapshot!(error.expect_err("its attention has no mask"), @"tokens of sequence 0 attend to 3 of its 5 tokens, but the engine's attention reads all of them; expected a late-interaction model that excludes query expansion from attention, or a batch without `with_attended`");
    engine("late-bert")
        .session()
        .expect("a session")
        .run(&expanded)
        .expect("it has one");
}

/// A setting of the folder determines whether attention skips the mask tokens that expand a query. An artifact stores this setting.
#[test]
fn an_artifact_masks_the_expansion_too() {
    let expected = expected("late-bert");
    let query = &expected.queries[1];
    let opened = gemmule::text::Folder::open(&folder("late-bert")).expect("a folder");
    let config = opened.config().expect("a config");
    let description = gemmule::model::Description::for_config(config).expect("it is shipped");
    let machine = gemmule::machine::Machine::usual().expect("it is described");
    let options = gemmule::engine::CompileOptions {
        modules: opened.modules().expect("modules").to_vec(),
        ..gemmule::engine::CompileOptions::new(DType::F32, machine)
    };
    let compiled = gemmule::engine::compile(&description, config, &options).expect("it compiles");
    let file = tempfile::NamedTempFile::new().expect("a file");
    let artifact = gemmule::engine::Artifact::of(compiled, Vec::new());
    artifact.write(file.path()).expect("it is written");
    let engine = Engine::from_artifact(file.path())
        .checkpoint(folder("late-bert"))
        .device(DeviceChoice::Cpu)
        .build()
        .expect("it loads");
    let vectors = engine
        .token_vectors(TextRole::Query, &[&query.text])
        .expect("vectors");
    compare("late-bert", &vectors[0].values, &query.values);
}

/// Returns the texts of a folder's documents, repeated so that they fill several batches of different lengths.
fn many_documents(expected: &Expected) -> Vec<String> {
    let texts = expected.documents.iter().map(|run| &run.text);
    let repeated = |(nth, text): (usize, &String)| vec![text.as_str(); 1 + nth % 3].join(" ");
    texts.cycle().take(3000).enumerate().map(repeated).collect()
}

#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn a_gpu_scores_documents_whose_vectors_stay_on_it() {
    for name in [
        "late-bert",
        "late-modernbert",
        "late-attend",
        "late-plain",
        "late-multi",
    ] {
        let expected = expected(name);
        let query = &expected.queries[0].text;
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let built = Engine::from_checkpoint(folder(name)).device(DeviceChoice::Cuda(0));
            let engine = built.dtype(dtype).build().expect("a model");
            let score = engine.folder().expect("a folder").late_score();
            let documents = many_documents(&expected);
            let got = engine.rerank(query, &documents).expect("scores");
            let queries = engine.token_vectors(TextRole::Query, &[query]);
            let queries = queries.expect("vectors");
            let vectors = engine.token_vectors(TextRole::Document, &documents);
            let vectors = vectors.expect("vectors");
            let want = max_sim(&queries[0], &vectors, score);
            let copied = engine.late_scorer(score).on_device(&queries[0], &vectors);
            let copied = copied.expect("scores").expect("a GPU");
            let far = |(got, want): (&f32, &f32)| (got - want).abs() > 1e-4 * want.abs().max(1.0);
            for (how, got) in [("rerank", &got), ("copied", &copied)] {
                let first = got.iter().zip(&want).position(far);
                assert_eq!(
                    (got.len(), first),
                    (want.len(), None),
                    "{name} {dtype} {how}"
                );
            }
        }
    }
}

/// Computes scores of vectors in host memory on a GPU (which includes copying them) and on the CPU, compares them, and prints the times.
#[test]
#[ignore = "needs a CUDA device and NVRTC"]
fn a_gpu_scores_vectors_that_are_copied_to_it() {
    let built = Engine::from_checkpoint(folder("late-bert")).device(DeviceChoice::Cuda(0));
    let engine = built.build().expect("a model");
    let text = engine.token_vectors(TextRole::Document, &["a text"]);
    let width = text.expect("vectors")[0].width;
    let value = |i: usize| ((i * 7919) % 2003) as f32 / 2003.0 - 0.5;
    let rows = |n: usize, seed: usize| TokenVectors {
        width,
        values: (0..n * width).map(|i| value(i + seed)).collect(),
    };
    for (n, tokens, n_query) in [
        (10, 300, 32),
        (1000, 300, 32),
        (1000, 300, 256),
        (3, 70_000, 8),
        (2, 0, 4),
    ] {
        // `tokens` is for vectors of width 128. Adapt it to the model's width, so that a document has the same number of values.
        let tokens = tokens * 128 / width;
        let documents: Vec<TokenVectors> = (0..n).map(|i| rows(tokens, i)).collect();
        let query = rows(n_query, 5);
        let scorer = engine.late_scorer(LateScore::Sum);
        let mut times = [f64::INFINITY; 2];
        for _ in 0..4 {
            let start = std::time::Instant::now();
            let copied = scorer.on_device(&query, &documents);
            times[0] = times[0].min(start.elapsed().as_secs_f64());
            let start = std::time::Instant::now();
            let want = max_sim(&query, &documents, LateScore::Sum);
            times[1] = times[1].min(start.elapsed().as_secs_f64());
            let copied = copied.expect("scores").expect("a GPU");
            let far = |(got, want): (&f32, &f32)| (got - want).abs() > 1e-4 * want.abs().max(1.0);
            let first = copied.iter().zip(&want).position(far);
            assert_eq!((copied.len(), first), (n, None), "{n} {tokens} {n_query}");
        }
        let [gpu, cpu] = times.map(|seconds| seconds * 1e3);
        println!(
            "{n} documents of {tokens} x {width}, query of {n_query}: GPU {gpu:.2} ms, CPU {cpu:.2} ms"
        );
    }
}
