"""Late interaction. The references are from PyLate, and for BGE-M3 from FlagEmbedding."""

import json

import numpy as np
import pytest
from conftest import CHECKPOINTS, checkpoint, runs

from gemmule import Engine, InputError, MultiVectorEncoder, Reranker

FOLDERS = sorted(folder.name for folder in CHECKPOINTS.glob("late-*"))


def expected(name):
    return json.loads((checkpoint(name) / "expected.json").read_text())


def matrix(run):
    return np.array(run["values"], np.float32).reshape(run["rows"], run["width"])


@pytest.mark.parametrize("name", FOLDERS)
def test_vectors_and_scores_are_those_of_pylate(name):
    want, encoder = expected(name), MultiVectorEncoder(checkpoint(name), device="cpu")
    for role, is_query in [("queries", True), ("documents", False)]:
        texts = [run["text"] for run in want[role]]
        vectors = encoder.encode(texts, is_query=is_query)
        assert isinstance(vectors, list) and len(vectors) == len(texts)
        for found, run in zip(vectors, want[role]):
            assert found.dtype == np.float32 and found.flags.c_contiguous
            np.testing.assert_allclose(found, matrix(run), atol=1e-5, err_msg=run["text"])
        one = encoder.encode(texts[0], is_query=is_query)
        np.testing.assert_allclose(one, vectors[0], atol=1e-6)
    queries, documents = [[run["text"] for run in want[role]] for role in ("queries", "documents")]
    scores = encoder.similarity(encoder.encode(queries), encoder.encode(documents, is_query=False))
    assert scores.dtype == np.float32 and scores.shape == (len(queries), len(documents))
    np.testing.assert_allclose(scores, want["scores"], atol=1e-4)
    # A reranker computes scores from the same vectors.
    reranker = Reranker(checkpoint(name), device="cpu")
    pairs = [(query, document) for document in documents for query in queries]
    found = reranker.predict(pairs)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.array(want["scores"]).T.ravel(), atol=1e-4)
    np.testing.assert_allclose(reranker.predict(pairs[1]), want["scores"][1][0], atol=1e-4)
    ranked = reranker.rank(queries[0], documents, top_k=2, return_documents=True)
    order = np.argsort(-np.array(want["scores"][0]), kind="stable")[:2]
    assert [entry["corpus_id"] for entry in ranked] == order.tolist()
    assert [entry["text"] for entry in ranked] == [documents[index] for index in order]


def test_documents_are_ranked():
    encoder = MultiVectorEncoder(checkpoint("late-bert"), device="cpu")
    want = expected("late-bert")
    query, documents = want["queries"][0]["text"], [run["text"] for run in want["documents"]]
    ranked = encoder.rank(query, documents)
    scores = want["scores"][0]
    assert [entry["corpus_id"] for entry in ranked] == np.argsort(-np.array(scores), kind="stable").tolist()
    np.testing.assert_allclose([entry["score"] for entry in ranked], sorted(scores, reverse=True), atol=1e-4)
    assert set(ranked[0]) == {"corpus_id", "score"}
    best = encoder.rank(query, documents, top_k=1, return_documents=True)
    assert [entry["text"] for entry in best] == [documents[ranked[0]["corpus_id"]]]


def test_lengths_and_prompts_are_those_of_the_folder():
    settings = json.loads((checkpoint("late-attend") / "config_sentence_transformers.json").read_text())
    encoder = MultiVectorEncoder(checkpoint("late-attend"), device="cpu")
    assert encoder.query_length == settings["query_length"]
    assert encoder.document_length == settings["document_length"]
    assert encoder.prompt_names == sorted(settings["prompts"])
    default = settings["prompts"][settings["default_prompt_name"]]
    text = "Who found the letter?"
    np.testing.assert_array_equal(encoder.encode(text, prompt=default), encoder.encode(text))
    assert not np.allclose(encoder.encode(text, prompt=""), encoder.encode(text), atol=1e-3)
    long = encoder.encode("word " * 1000, is_query=False)
    assert long.shape[0] <= encoder.document_length


def test_results_do_not_depend_on_the_batch():
    encoder = MultiVectorEncoder(checkpoint("late-plain"), device="cpu")
    texts = ["a letter " * n for n in (7, 1, 30, 3, 12)] + ["", "!"]
    alone = [encoder.encode_document(text) for text in texts]
    for batch_tokens in (None, 1, 40):
        for found, own in zip(encoder.encode_document(texts, batch_tokens=batch_tokens), alone):
            assert found.shape == own.shape
            np.testing.assert_allclose(found, own, atol=2e-6)
    scores = encoder.similarity(encoder.encode_query("a letter"), alone)
    assert scores.shape == (1, len(texts))


def test_bge_m3_leaves_out_the_first_token_and_scores_by_the_mean():
    encoder = MultiVectorEncoder(checkpoint("st-m3"), device="cpu")
    run = next(run for run in runs("st-m3") if run["output"] == "colbert")
    rows = np.array(run["values"], np.float32).reshape(run["shape"])
    parts = np.split(rows, np.cumsum([len(ids) for ids in run["ids"]])[:-1])
    vectors = encoder.encode(run["texts"], is_query=False)
    for found, part in zip(vectors, parts):
        np.testing.assert_allclose(found, part[1:], atol=1e-5)
    scores = encoder.similarity(vectors, vectors)
    means = [[(q @ d.T).max(axis=1).mean() for d in vectors] for q in vectors]
    np.testing.assert_allclose(scores, means, atol=1e-5)
    reranker = Reranker(checkpoint("st-m3"), device="cpu")
    pairs = [(run["texts"][0], text) for text in run["texts"]]
    np.testing.assert_allclose(reranker.predict(pairs), scores[0], atol=1e-5)


def test_inputs_are_checked():
    encoder = MultiVectorEncoder(checkpoint("late-plain"), device="cpu")
    width = encoder.encode("a").shape[1]
    rows = np.zeros((2, width), np.float32)
    for queries, error, text in [
        ("a", TypeError, "queries is str; expected an array of shape"),
        (["a"], TypeError, r"queries\[0\] is str; expected an array of shape"),
        ([], InputError, "queries is empty"),
        (rows[0], InputError, r"queries\[0\] has 0 dimensions; expected 2"),
        ([rows[0]], InputError, r"queries\[0\] has 1 dimensions; expected 2"),
        (rows[:, :-1], InputError, "vectors"),
    ]:
        with pytest.raises(error, match=text):
            encoder.similarity(queries, rows)
    with pytest.raises(InputError, match="sentences is empty"):
        encoder.encode([])
    with pytest.raises(TypeError, match=r"documents\[1\] is int; expected str"):
        encoder.rank("a", ["b", 1])
    with pytest.raises(InputError, match="there is no prompt `nothing`"):
        encoder.encode("a", prompt_name="nothing")
    with pytest.raises(InputError, match="colbert"):
        MultiVectorEncoder(checkpoint("st-mean"), device="cpu")
    with pytest.raises(InputError, match="MultiVectorEncoder"):
        Engine(checkpoint("late-plain"), device="cpu").run(["a text"])
