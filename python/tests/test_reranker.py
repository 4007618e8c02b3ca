import numpy as np
import pytest
from conftest import CHECKPOINTS, checkpoint, runs

from gemmule import InputError, Reranker


FOLDERS = sorted(folder.name for folder in CHECKPOINTS.glob("ce-*"))


@pytest.mark.parametrize("name", FOLDERS)
def test_scores_are_those_of_sentence_transformers(name):
    reranker = Reranker(checkpoint(name), device="cpu")
    for run in [run for run in runs(name) if run["output"] == "scores"]:
        pairs = [tuple(pair) for pair in run["pairs"]]
        scores = reranker.predict(pairs, prompt_name=run["prompt_name"])
        assert scores.dtype == np.float32
        assert scores.shape == tuple(run["shape"])
        np.testing.assert_allclose(scores.ravel(), run["values"], atol=1e-5)


def test_one_pair_has_one_score(reranker):
    pair = ("Who wrote the letter?", "It was found in a box.")
    scores = reranker.predict([pair, list(pair)])
    assert reranker.predict(pair).shape == ()
    assert reranker.predict(list(pair)) == scores[0] == scores[1]
    labels = Reranker(checkpoint("ce-nli"), device="cpu").predict(pair)
    assert labels.shape == (3,)


def test_documents_are_ranked(reranker):
    query, documents = "Who wrote the letter?", ["a box", "A painter wrote it.", "The train", "a box"]
    scores = reranker.predict([(query, document) for document in documents])
    ranked = reranker.rank(query, documents)
    order = sorted(range(4), key=lambda index: (-scores[index], index))
    assert [entry["corpus_id"] for entry in ranked] == order
    np.testing.assert_allclose([entry["score"] for entry in ranked], scores[order], atol=1e-6)
    best = reranker.rank(query, documents, top_k=2, return_documents=True)
    assert [entry["text"] for entry in best] == [documents[index] for index in order[:2]]
    assert set(ranked[0]) == {"corpus_id", "score"}


def test_several_labels_have_no_rank():
    reranker = Reranker(checkpoint("ce-nli"), device="cpu")
    with pytest.raises(InputError, match="3 scores for each pair"):
        reranker.rank("a", ["b", "c"])
